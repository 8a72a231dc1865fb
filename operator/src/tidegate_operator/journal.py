"""Decisions on record: each with all that it was made from, so that another version can make it again.

Lines of JSON, each compressed by itself (`zcat` reads them), in a file of bounded size. What was scraped is written
once: a line holds only the samples that are new since the line before. Written by `reconcile` where the installation
asks for it, read by `replay`.
"""

import gzip
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tidegate_operator.demand import Measured, PodSample, PodWindow, Values, measured_of
from tidegate_operator.observation import Decision
from tidegate_operator.observing import Facts
from tidegate_operator.pods import incarnation

COMPRESSION = 3
"""Level: higher ones take several times as long for a few percent."""
FACTS, DECISION = TypeAdapter(Facts), TypeAdapter(Decision)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision."""

    name: str
    """The object's, with its namespace: `namespace/name`."""
    spec: Mapping[str, Any]
    """As the API server has it."""
    facts: Facts
    memory: Mapping[str, object]
    """What the decision before had left."""
    decision: Decision


class UnreadableJournal(Exception):
    """The file is no journal; the message says why."""


class Journal:
    """Invariant: this file and the one before it, `PATH.1`, together stay below the bound, but for a line's length."""

    def __init__(self, path: Path, *, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._written: dict[str, float] = {}
        """Time of the newest sample in this file, by pod's life."""
        self._has_failed = False

    def write(self, entry: Entry) -> None:
        """Add a line. What goes wrong is logged once and ends the recording: decisions go on without it."""
        if self._has_failed:
            return
        try:
            if self._path.exists() and self._path.stat().st_size > self._most_bytes / 2:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._written.clear()
            line = json.dumps(self._as_json(entry), separators=(",", ":")) + "\n"
            # In one piece and past every buffer, so that a process that is killed leaves whole lines.
            with self._path.open("ab", buffering=0) as file:
                file.write(gzip.compress(line.encode(), COMPRESSION))
        except OSError as error:
            self._has_failed = True
            logger.warning("Decisions are recorded no longer: %s cannot be written: %s", self._path, error.strerror)

    def _as_json(self, entry: Entry) -> dict[str, object]:
        measured = entry.facts.measured
        lives = {replica.name: incarnation(replica) for replica in entry.facts.replicas}
        return {
            "name": entry.name,
            "spec": entry.spec,
            "facts": FACTS.dump_python(entry.facts, mode="json", exclude={"measured"}),
            "error": measured.error,
            "samples": {pod: self._new_samples(lives[pod], ring) for pod, ring in measured.samples.items()},
            "windows": [_window_json(window) for window in measured.windows if window.pod not in measured.samples],
            "memory": entry.memory,
            "decision": DECISION.dump_python(entry.decision, mode="json"),
        }

    def _new_samples(self, life: str, ring: Sequence[PodSample]) -> dict[str, object]:
        """When the samples that count begin, and those that no line has told yet."""
        told = self._written.get(life)
        new = [sample for sample in ring if told is None or sample.at > told]
        self._written[life] = ring[-1].at
        return {"since": ring[0].at, "new": [[sample.at, _values_json(sample.values)] for sample in new]}


def read(paths: Iterable[Path]) -> Iterator[Entry]:
    """The decisions in these files, which follow each other in time. Raises UnreadableJournal.

    A last line that was not finished is left out.
    """
    for path in paths:
        rings: dict[str, list[PodSample]] = {}
        for number, line in enumerate(_lines(path), 1):
            try:
                yield _entry(json.loads(line), rings)
            except (ValidationError, ValueError, TypeError, LookupError, AttributeError) as error:
                told = str(error).partition("\n")[0]
                raise UnreadableJournal(f"{path}, line {number} is no decision on record: {told}") from error


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line
    except EOFError:
        return
    except (OSError, UnicodeDecodeError, zlib.error) as error:
        raise UnreadableJournal(f"{path} cannot be read: {error}") from error


def _entry(data: Any, rings: dict[str, list[PodSample]]) -> Entry:
    """Of one line; `rings` holds the samples of the lines before, by pod's life."""
    facts = FACTS.validate_python({**data["facts"], "measured": Measured()})
    lives = {replica.name: incarnation(replica) for replica in facts.replicas}
    samples = {}
    for pod, told in data["samples"].items():
        ring = [sample for sample in rings.get(lives[pod], ()) if sample.at >= told["since"]]
        ring += [PodSample(at, _values(values)) for at, values in told["new"]]
        samples[pod] = rings[lives[pod]] = ring
    scraped = measured_of({pod: tuple(ring) for pod, ring in samples.items()})
    windows = (*scraped.windows, *map(_window, data["windows"]))
    return Entry(
        name=data["name"],
        spec=data["spec"],
        facts=replace(facts, measured=Measured(windows, data["error"], scraped.samples)),
        memory=data["memory"],
        decision=DECISION.validate_python(data["decision"]),
    )


def _window_json(window: PodWindow) -> list[object]:
    values = _values_json(window.values)
    return [window.pod, window.sampled_at, window.seconds, window.scrapes, values, window.arrived_lately]


def _window(data: Any) -> PodWindow:
    pod, sampled_at, seconds, scrapes, values, arrived_lately = data
    return PodWindow(pod, sampled_at, seconds, scrapes, _values(values), arrived_lately)


def _values_json(values: Values) -> dict[str, float]:
    # No term and no label that stays holds a space.
    return {" ".join(key): value for key, value in values.items()}


def _values(data: Mapping[str, float]) -> Values:
    return {tuple(key.split(" ")): value for key, value in data.items()}
