"""What a benchmark sends and when: a trace's requests or made-up ones, and the text of their prompts.

Pure apart from reading the trace. Times are seconds from the start of the load, lengths are tokens. Called by `bench`.
"""

import csv
import gzip
import json
import math
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO

MAX_REQUESTS = 1_000_000
"""Of one run: each is remembered until its end is reported."""
MAX_LENGTH = 1 << 20
MAX_LINE_CHARACTERS = 1 << 20
HASH_BLOCK_TOKENS = 512
"""Tokens of a prompt for which one of Mooncake's hash ids stands."""
ARRIVAL_NAMES = ("arrival", "timestamp", "t_s", "t", "arrived_at", "time")
INPUT_NAMES = ("isl", "contexttokens", "request tokens", "input_length", "input_tokens", "num_prefill_tokens")
OUTPUT_NAMES = ("osl", "generatedtokens", "response tokens", "output_length", "output_tokens", "num_decode_tokens")
SOURCE_NAMES = ("source", "client", "service", "tenant", "model")
"""Columns of the traces that are known, in lower case: ours, Azure's, BurstGPT's, Mooncake's, Vidur's. A source is
optional."""
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother", "area",
    "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue",
    "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "law",
    "car", "city", "community", "name", "president", "team", "minute", "idea", "body", "information", "back", "parent",
    "face", "others", "level", "office", "door", "health", "person", "art", "war", "history", "party", "result",
    "change", "morning", "reason", "research", "girl", "moment", "air", "teacher", "force", "education",
)  # fmt: skip
"""One token each, with the space before them, in the usual vocabularies."""


class WorkloadError(ValueError):
    """A trace or a description of lengths that cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, and when it is due."""

    index: int
    at_seconds: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    """One for each 512 tokens of the prompt; equal ids stand for equal text."""
    source: str = ""
    """Who sent it, as the trace names it."""


# --- made-up requests


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: `fixed`, `uniform` (both ends inclusive) or `lognormal` (median, sigma)."""

    kind: str
    first: float
    second: float = 0.0

    def draw(self, rng: random.Random) -> int:
        match self.kind:
            case "fixed":
                value = self.first
            case "uniform":
                value = rng.randint(int(self.first), int(self.second))
            case _:
                value = self.first * math.exp(min(50.0, rng.gauss(0.0, self.second)))
        return max(1, min(MAX_LENGTH, round(value)))


def parse_lengths(text: str) -> Lengths:
    """Read `512`, `uniform:128,1024` or `lognormal:512,0.8`; raises WorkloadError."""
    kind, _, rest = text.rpartition(":")
    kind = kind or "fixed"
    wanted = {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind)
    try:
        values = [float(part) for part in rest.split(",")]
    except ValueError:
        values = []
    if wanted is None or len(values) != wanted or not all(math.isfinite(value) for value in values):
        raise WorkloadError(f"{text!r} is no distribution of lengths; write 512, uniform:128,1024 or lognormal:512,0.8")
    found = Lengths(kind, *values)
    if not 1 <= found.first <= MAX_LENGTH or (kind == "uniform" and not found.first <= found.second <= MAX_LENGTH):
        raise WorkloadError(f"{text!r}: lengths are 1 to {MAX_LENGTH} tokens, the smaller one first")
    if kind == "lognormal" and not 0 <= found.second <= 5:
        raise WorkloadError(f"{text!r}: sigma is 0 to 5")
    return found


def made_up(isl: Lengths, osl: Lengths, *, arrivals: Iterable[float], rng: random.Random) -> Iterator[PlannedRequest]:
    """A request for each arrival."""
    for index, at in enumerate(arrivals):
        yield PlannedRequest(index, at, isl.draw(rng), osl.draw(rng))


def poisson(rate: float, *, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Arrivals at `rate` a second with gamma distributed gaps: 1 is Poisson, less is burstier, infinite is even."""
    at = 0.0
    while True:
        yield at
        at += 1 / rate if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / (rate * burstiness))


# --- traces


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a trace is replayed, and how: seconds of the trace, divided by `speed`; lengths times a factor."""

    start_seconds: float = 0.0
    duration_seconds: float = math.inf
    """After division by `speed`."""
    speed: float = 1.0
    length_scale: float = 1.0
    max_model_len: int | None = None
    """Longer requests are left out."""
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """What was read, and how many rows of the window could not be used."""

    requests: Sequence[PlannedRequest]
    skipped: int


def read_trace(path: Path, window: Window) -> Trace:
    """The requests of `window` in order of arrival; the first one comes at 0. Raises WorkloadError."""
    return _select(stream_rows(path), window, path)


def stream_rows(path: Path) -> Iterator[PlannedRequest]:
    """All rows of a trace as they stand in it, one by one, times as in the file. Raises WorkloadError."""
    try:
        with _open(path) as file:
            yield from _rows(file, path)
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; a compressed trace is called .gz"
        ) from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _select(rows: Iterator[PlannedRequest], window: Window, path: Path) -> Trace:
    chosen: list[PlannedRequest] = []
    skipped = 0
    zero: float | None = None
    for row in rows:
        zero = row.at_seconds if zero is None else zero
        at = row.at_seconds - zero - window.start_seconds
        if at / window.speed > window.duration_seconds or (window.count is not None and len(chosen) >= window.count):
            break
        if at < 0:
            continue
        isl, osl = (round(tokens * window.length_scale) for tokens in (row.input_tokens, row.output_tokens))
        if not _fits(row, isl, osl, window.max_model_len):
            skipped += 1
            continue
        chosen.append(replace(row, at_seconds=at / window.speed, input_tokens=max(1, isl), output_tokens=max(1, osl)))
        if len(chosen) > MAX_REQUESTS:
            raise WorkloadError(
                f"{path} has more than {MAX_REQUESTS} requests; choose some with --num-prompts or --duration"
            )
    if not chosen:
        raise WorkloadError(f"{path} has no request that can be sent in the chosen window ({skipped} left out)")
    chosen.sort(key=lambda request: request.at_seconds)
    begins = chosen[0].at_seconds
    return Trace(
        [replace(each, index=n, at_seconds=each.at_seconds - begins) for n, each in enumerate(chosen)], skipped
    )


def _fits(row: PlannedRequest, isl: int, osl: int, max_model_len: int | None) -> bool:
    """Logs have rows of failed calls, without tokens."""
    if row.input_tokens < 1 or row.output_tokens < 1 or max(isl, osl) > MAX_LENGTH:
        return False
    return max_model_len is None or isl + osl <= max_model_len


def _rows(file: IO[str], path: Path) -> Iterator[PlannedRequest]:
    lines = _bounded_lines(file, path)
    first = next(lines, "")
    if not first:
        raise WorkloadError(f"{path} is empty")
    if first.lstrip().startswith("{"):
        yield from _mooncake_rows(first, lines, path)
        return
    names = [name.strip().lower() for name in next(csv.reader([first]), [])]
    columns = [_column(names, known, path) for known in (ARRIVAL_NAMES, INPUT_NAMES, OUTPUT_NAMES)]
    source = next((names.index(name) for name in SOURCE_NAMES if name in names), None)
    for number, cells in enumerate(csv.reader(lines), start=2):
        if cells:
            try:
                at, isl, osl = (cells[column] for column in columns)
                who = "" if source is None else cells[source]
                yield PlannedRequest(0, _seconds(at), int(float(isl)), int(float(osl)), source=who)
            except (IndexError, ValueError, OverflowError) as error:
                wanted = ", ".join(names[column] for column in columns)
                why = f"{len(cells)} columns of {len(names)}" if isinstance(error, IndexError) else error
                raise WorkloadError(
                    f"{path}, line {number}: {cells!r:.200} is no request ({why}); a time and two numbers of tokens "
                    f"are wanted in the columns {wanted}"
                ) from error


def _bounded_lines(file: IO[str], path: Path) -> Iterator[str]:
    while line := file.readline(MAX_LINE_CHARACTERS):
        if len(line) == MAX_LINE_CHARACTERS:
            raise WorkloadError(f"{path} has a line of more than {MAX_LINE_CHARACTERS} characters; it is no trace")
        yield line


def _column(names: Sequence[str], known: Sequence[str], path: Path) -> int:
    found = next((name for name in known if name in names), None)
    if found is None:
        raise WorkloadError(
            f"{path} has no column {' or '.join(known)}: its first line must name the columns, parted by commas, and "
            f"is {','.join(names)!r:.200}. Known are CSV files with arrival,isl,osl, the Azure and BurstGPT traces, "
            "and Mooncake's JSON lines"
        )
    return names.index(found)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = datetime.fromisoformat(text).timestamp()
    if not math.isfinite(value):
        raise ValueError(f"{text} is no time")
    return value


def _mooncake_rows(first: str, rest: Iterator[str], path: Path) -> Iterator[PlannedRequest]:
    """Lines with `timestamp` in milliseconds, lengths, and ids of the prompt's blocks."""
    number = 0
    for line in _chain(first, rest):
        number += 1
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield PlannedRequest(
                0,
                float(row["timestamp"]) / 1000,
                int(row["input_length"]),
                int(row["output_length"]),
                tuple(int(each) for each in row.get("hash_ids", ())),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WorkloadError(
                f"{path}, line {number}: {line[:100]!r} is no request ({error!r:.100}); timestamp, input_length and "
                "output_length are wanted, all of them numbers"
            ) from error


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


# --- prompts


@dataclass(frozen=True, slots=True)
class PromptScale:
    """How words become tokens on the server at hand: tokens = overhead + words * tokens_per_word."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead_tokens) / self.tokens_per_word))


PROBES = (16, 144)
"""Words of the prompts by which the scale is measured."""


def measured_scale(tokens: Mapping[int, int]) -> PromptScale:
    """From the tokens that prompts of `PROBES` words had; senseless counts give a token a word."""
    (few, few_tokens), (many, many_tokens) = sorted(tokens.items())
    slope = (many_tokens - few_tokens) / (many - few)
    return PromptScale(slope, few_tokens - slope * few) if slope > 0 else PromptScale()


def prompt_text(request: PlannedRequest, scale: PromptScale, *, seed: int) -> str:
    """Words that share no beginning with another prompt's, except where the trace says so."""
    words = scale.words(request.input_tokens)
    if not request.prefix_ids:
        return random_text(words, f"{seed} {request.index}")
    block = max(1, round(HASH_BLOCK_TOKENS / scale.tokens_per_word))
    counts = [min(block, words - start) for start in range(0, words, block)]
    own = [f"{seed} {request.index} {n}" for n in range(len(counts))]
    shared = [f"{seed} block {each}" for each in request.prefix_ids[: len(counts)]]
    seeds = shared + own[len(shared) :]
    return " ".join(random_text(count, each) for count, each in zip(counts, seeds, strict=True))


def random_text(words: int, seed: str) -> str:
    """The same text for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))
