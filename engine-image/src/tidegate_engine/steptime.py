"""The step-time formula, its profiles and its online fit: one place for engine, capacity and simulator.

Pure: no torch, no numpy, no clock. `t = base + token·max(0, T − T0) + kv·KV + sequence·S + attention·Σ p(ctx + p/2)
+ mixed·KV·[step has prefill]` with T tokens in the step, KV the sum of decode contexts, S sequences, p a prefill chunk.
"""

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any

from tidegate_engine.request import Step


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, as far as its time depends on it."""

    tokens: float
    decode_kv_tokens: float
    sequences: float
    prefill_attention: float
    """Σ p·(ctx + p/2) over the prefill chunks, in tokens²."""
    has_prefill: bool


def shape_of(items: Iterable[tuple[int, int, bool]]) -> StepShape:
    """Shape of (start, count, is_prefill) items: `start` computed tokens before, `count` computed now."""
    tokens = kv = sequences = 0
    attention = 0.0
    has_prefill = False
    for start, count, is_prefill in items:
        tokens += count
        sequences += 1
        if is_prefill:
            has_prefill = True
            attention += count * (start + count / 2)
        else:
            kv += start + count
    return StepShape(tokens, kv, sequences, attention, has_prefill)


def shape_of_step(step: Step) -> StepShape:
    """Shape of a planned step. An item of one token that samples is a decode, with or without drafts behind it."""
    decodes = len(step.decodes)
    shape = shape_of(
        [(item.start, item.count, not item.samples or item.count - len(item.drafts) > 1) for item in step.chunks]
    )
    return replace(
        shape,
        tokens=shape.tokens + decodes,
        decode_kv_tokens=shape.decode_kv_tokens + sum(step.decodes.starts) + decodes,
        sequences=shape.sequences + decodes,
    )


@dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients c0, T0, c1..c5; seconds, and tokens for the threshold."""

    base_seconds: float
    threshold_tokens: float
    token_seconds: float
    kv_token_seconds: float
    sequence_seconds: float
    attention_seconds: float
    mixed_kv_token_seconds: float

    def seconds(self, shape: StepShape) -> float:
        """Predicted duration of a step of this shape."""
        return (
            self.base_seconds
            + self.token_seconds * max(0.0, shape.tokens - self.threshold_tokens)
            + self.kv_token_seconds * shape.decode_kv_tokens
            + self.sequence_seconds * shape.sequences
            + self.attention_seconds * shape.prefill_attention
            + (self.mixed_kv_token_seconds * shape.decode_kv_tokens if shape.has_prefill else 0.0)
        )

    def as_dict(self) -> dict[str, float]:
        """Coefficients by the names that profiles, `step_model` metrics and `/admin/v1/info` use."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


TERMS = tuple(item.name for item in fields(StepModel))
MAX_TERM_SECONDS = 3600.0
MAX_KV_BLOCKS = 1 << 26


@dataclass(frozen=True, slots=True)
class Profile:
    """What a modelled GPU and model are: how fast they step, what they hold, how long they take to start."""

    name: str
    gpu: str
    gpus: int
    model: str
    layers: int
    kv_heads: int
    head_size: int
    vocab_size: int
    weight_dtype: str
    kv_dtype: str
    weight_bytes: int
    kv_token_bytes: int
    kv_blocks: int
    block_tokens: int
    max_model_len: int
    start_seconds: Mapping[str, float]
    """By phase: weights, warmup."""
    step: StepModel
    source: Mapping[str, str]
    """For each term of `step` and for the sizes: fitted or estimated, and from what."""


def profile_names() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("tidegate_engine") / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_profile(name: str) -> Profile:
    """Read a profile by its name, or from a path that ends in `.json`; raises ValueError saying what is wrong."""
    if name.endswith(".json"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"profile {name} cannot be read: {error.strerror}") from error
    elif name in profile_names():
        text = (resources.files("tidegate_engine") / "profiles" / f"{name}.json").read_text(encoding="utf-8")
    else:
        raise ValueError(f"there is no profile {name!r}; there are {', '.join(profile_names())}")
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"profile {name} is not JSON: {error}") from error
    try:
        return parse_profile(data)
    except ValueError as error:
        raise ValueError(f"profile {name}: {error}") from error


def parse_profile(data: object) -> Profile:
    """Check and read a profile's JSON object; raises ValueError naming the field."""
    values = {**_object(data, "the profile")}
    _require_names(values, [item.name for item in fields(Profile)], "the profile")
    step = {name: _number(value, f"step.{name}") for name, value in _object(values["step"], "step").items()}
    _require_names(step, TERMS, "step")
    if step["base_seconds"] == 0:
        raise ValueError("step.base_seconds must be above 0: a step always takes time")
    start = _object(values["start_seconds"], "start_seconds")
    _require_names(start, ["weights", "warmup"], "start_seconds")
    source = _object(values["source"], "source")
    if missing := [name for name in TERMS if not isinstance(source.get(name), str)]:
        raise ValueError(f"source must say where {missing[0]} comes from")
    for item in fields(Profile):
        if item.type is int:
            number = values[item.name]
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{item.name} must be a whole number above 0, not {number!r}")
        elif item.type is str and not (isinstance(values[item.name], str) and values[item.name]):
            raise ValueError(f"{item.name} must be a text, not {values[item.name]!r}")
    if not 2 <= values["kv_blocks"] <= MAX_KV_BLOCKS:
        raise ValueError(f"kv_blocks must be 2, of which one is never used, to {MAX_KV_BLOCKS}")
    if slow := [term for term, seconds in step.items() if seconds > MAX_TERM_SECONDS and term.endswith("_seconds")]:
        raise ValueError(f"step.{slow[0]} is {step[slow[0]]:g} s; no step takes more than {MAX_TERM_SECONDS:g}")
    values["step"] = StepModel(**step)
    values["start_seconds"] = {name: _number(value, f"start_seconds.{name}") for name, value in start.items()}
    return Profile(**values)


def _object(data: object, name: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{name} must be an object, not {data!r}")
    return data


def _require_names(data: Mapping[str, object], names: Sequence[str], where: str) -> None:
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if unknown := [name for name in data if name not in names]:
        raise ValueError(f"{where} does not know {', '.join(unknown)}")


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of 0 or more, not {value!r}")
    return float(value)


# --- the online fit

THRESHOLD_CANDIDATES = (0, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512)
MIN_SAMPLES = 64
MIN_CELLS = 6
MAX_CELLS = 128
CELL_SAMPLES = 16
REFIT_SAMPLES = 256
"""New samples after which the fit is made again."""
HALF_LIFE_SAMPLES = 5000
"""Samples after which a cell that was not seen again counts half."""
INDEPENDENCE = 0.05
"""Share of a term's column that the terms before it must leave unexplained, for it to be fitted at all."""
HUBER_WIDTH = 1.5

FIT_TERMS = (
    "base_seconds",
    "token_seconds",
    "kv_token_seconds",
    "attention_seconds",
    "sequence_seconds",
    "mixed_kv_token_seconds",
)
"""In order of importance: where two cannot be told apart, the first takes it all."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted model, and how far to trust it."""

    model: StepModel
    residual_ratio: float
    """Mean of |measured − predicted| / measured."""
    terms: tuple[str, ...]
    """The coefficients that the data could tell; the others are 0."""
    samples: int


@dataclass(slots=True)
class _Cell:
    """The latest steps of about one shape, so that a long quiet spell does not drown the rare steps."""

    last_seen: int = 0
    recent: deque[tuple[StepShape, float]] = field(default_factory=lambda: deque(maxlen=CELL_SAMPLES))


@dataclass(frozen=True, slots=True)
class _Row:
    """A cell's mean step. The means of what is linear suffice; only the threshold needs each step's tokens."""

    tokens: tuple[float, ...]
    decode_kv_tokens: float
    prefill_attention: float
    sequences: float
    has_prefill: bool
    seconds: float
    weight: float


class OnlineFit:
    """Learns a StepModel from the steps that an engine makes anyway: non-negative, robust, forgetting.

    Steps are kept in cells of similar shape, a few of each; outliers are cut within a cell and damped between cells.
    `add` costs microseconds; the fit, some milliseconds, is made when it is read. One thread may add, another read.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._cells: dict[tuple[int, ...], _Cell] = {}
        self._fit: StepFit | None = None
        self._fitted_at = 0

    def add(self, shape: StepShape, seconds: float) -> None:
        """Learn that a step of this shape took `seconds`; what cannot be a duration is left out."""
        if not 0 < seconds < float("inf") or shape.tokens < 1:
            return
        self.samples += 1
        key = (
            int(shape.tokens).bit_length(),
            int(shape.decode_kv_tokens).bit_length(),
            int(shape.sequences).bit_length() // 2,
            int(shape.prefill_attention).bit_length() // 3,
            int(shape.has_prefill),
        )
        cell = self._cells.get(key)
        if cell is None:
            if len(self._cells) >= MAX_CELLS:
                del self._cells[min(self._cells, key=lambda other: self._cells[other].last_seen)]
            cell = self._cells[key] = _Cell()
        cell.last_seen = self.samples
        cell.recent.append((shape, seconds))

    @property
    def fit(self) -> StepFit | None:
        """The fit to what is known now; None until there are enough samples, varied enough to tell a token's cost."""
        if self.samples - self._fitted_at >= (REFIT_SAMPLES if self._fit else MIN_SAMPLES):
            self._fitted_at = self.samples
            self._fit = _fit_rows([self._row(cell) for cell in list(self._cells.values())], self.samples)
        return self._fit

    @property
    def model(self) -> StepModel | None:
        return None if self.fit is None else self.fit.model

    @property
    def residual_ratio(self) -> float | None:
        return None if self.fit is None else self.fit.residual_ratio

    def _row(self, cell: _Cell) -> _Row:
        recent = list(cell.recent)
        middle = median(seconds for _, seconds in recent)
        kept = [(shape, seconds) for shape, seconds in recent if middle / 2 <= seconds <= middle * 2]
        age = self.samples - cell.last_seen
        count = len(kept)
        return _Row(
            tokens=tuple(shape.tokens for shape, _ in kept),
            decode_kv_tokens=sum(shape.decode_kv_tokens for shape, _ in kept) / count,
            prefill_attention=sum(shape.prefill_attention for shape, _ in kept) / count,
            sequences=sum(shape.sequences for shape, _ in kept) / count,
            has_prefill=recent[0][0].has_prefill,
            seconds=sum(seconds for _, seconds in kept) / count,
            weight=count / CELL_SAMPLES * 0.5 ** (age / HALF_LIFE_SAMPLES),
        )


def _fit_rows(rows: Sequence[_Row], samples: int) -> StepFit | None:
    """Best fit over the threshold candidates, or None when the data cannot tell what a token costs."""
    if samples < MIN_SAMPLES or len(rows) < MIN_CELLS or not any(row.has_prefill for row in rows):
        return None  # in decodes tokens and sequences are the same number
    best: tuple[float, StepFit] | None = None
    for threshold in THRESHOLD_CANDIDATES:
        columns = _columns(rows, threshold)
        chosen = _independent(columns, [row.weight for row in rows])
        if 0 not in chosen or 1 not in chosen or len(rows) < len(chosen) + 2:
            continue
        coefficients, residuals = _solve_robustly(columns, chosen, [row.weight for row in rows])
        if not coefficients[0] or not coefficients[1]:
            continue
        error = sum(row.weight * abs(residual) for row, residual in zip(rows, residuals, strict=True))
        error /= sum(row.weight for row in rows)
        if best is None or error < best[0] * 0.98:
            values = dict(zip(FIT_TERMS, coefficients, strict=True))
            terms = tuple(name for name, value in values.items() if value)
            best = error, StepFit(StepModel(threshold_tokens=threshold, **values), error, terms, samples)
    return None if best is None else best[1]


def _columns(rows: Sequence[_Row], threshold: int) -> list[list[float]]:
    """For each of FIT_TERMS what its coefficient multiplies, over the row's time, so that errors are relative."""
    return [
        [1 / row.seconds for row in rows],
        [sum(t - threshold for t in row.tokens if t > threshold) / len(row.tokens) / row.seconds for row in rows],
        [row.decode_kv_tokens / row.seconds for row in rows],
        [row.prefill_attention / row.seconds for row in rows],
        [row.sequences / row.seconds for row in rows],
        [row.decode_kv_tokens / row.seconds if row.has_prefill else 0.0 for row in rows],
    ]


def _independent(columns: Sequence[Sequence[float]], weights: Sequence[float]) -> list[int]:
    """Indices of the columns that those before them do not explain already."""
    basis: list[list[float]] = []
    chosen = []
    for index, column in enumerate(columns):
        rest = [value * weight**0.5 for value, weight in zip(column, weights, strict=True)]
        length = _dot(rest, rest) ** 0.5
        for direction in basis:
            along = _dot(rest, direction)
            rest = [value - along * unit for value, unit in zip(rest, direction, strict=True)]
        left = _dot(rest, rest) ** 0.5
        if left > INDEPENDENCE * length:
            basis.append([value / left for value in rest])
            chosen.append(index)
    return chosen


def _solve_robustly(
    columns: Sequence[Sequence[float]], chosen: Sequence[int], weights: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Non-negative coefficients (one per column, 0 where not chosen) with Σ coefficient·column ≈ 1, and residuals."""
    effective = list(weights)
    coefficients = [0.0] * len(columns)
    residuals = [1.0] * len(weights)
    for _ in range(3):
        coefficients = _solve_non_negative(columns, chosen, effective)
        used = [(coefficient, column) for coefficient, column in zip(coefficients, columns, strict=True) if coefficient]
        residuals = [1 - sum(coefficient * column[i] for coefficient, column in used) for i in range(len(weights))]
        width = HUBER_WIDTH * max(0.005, 1.48 * median(map(abs, residuals)))
        effective = [w * min(1.0, width / max(abs(r), 1e-12)) for w, r in zip(weights, residuals, strict=True)]
    return coefficients, residuals


def _solve_non_negative(
    columns: Sequence[Sequence[float]], chosen: Sequence[int], weights: Sequence[float]
) -> list[float]:
    """Weighted least squares to 1, leaving out the most negative term until none is negative."""
    left = list(chosen)
    scales = {i: max(map(abs, columns[i])) for i in left}
    weighted = {i: [value / scales[i] * w for value, w in zip(columns[i], weights, strict=True)] for i in left}
    gram = {(i, j): _dot(weighted[i], columns[j]) / scales[j] for i in left for j in left}
    target = {i: sum(weighted[i]) for i in left}
    result = [0.0] * len(columns)
    while left:
        solution = _solve([[gram[i, j] for j in left] for i in left], [target[i] for i in left])
        lowest = min(range(len(left)), key=solution.__getitem__)
        if solution[lowest] >= 0:
            for index, value in zip(left, solution, strict=True):
                result[index] = value / scales[index]
            return result
        del left[lowest]
    return result


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive system by elimination with pivots."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for step in range(size):
        pivot = max(range(step, size), key=lambda row: abs(rows[row][step]))
        rows[step], rows[pivot] = rows[pivot], rows[step]
        for row in range(step + 1, size):
            factor = rows[row][step] / rows[step][step]
            rows[row] = [value - factor * above for value, above in zip(rows[row], rows[step], strict=True)]
    solution = [0.0] * size
    for step in reversed(range(size)):
        known = sum(rows[step][column] * solution[column] for column in range(step + 1, size))
        solution[step] = (rows[step][size] - known) / rows[step][step]
    return solution


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return float(sum(map(mul, left, right)))
