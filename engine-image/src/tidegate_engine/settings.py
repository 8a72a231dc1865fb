"""The live batch settings, their envelope, and the histogram edges that engine, operator and simulator share.

Pure: no torch, no I/O. Wire names are vLLM's (`max_num_seqs`, ...); the object's names are Kubernetes-like and live in
the operator's `api`. Called by the scheduler, the admin routes, the metrics, and the operator's capacity maths.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

ISL_EDGES = (0, 64, 256, 1024, 4096, 16384, 65536)
"""Lower edges, inclusive, of the input-length cells, in tokens."""
OSL_EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
"""Lower edges, inclusive, of the output-length cells, in tokens."""
TTFT_BUCKETS_SECONDS = (
    0.001, 0.0016, 0.0025, 0.004, 0.0063, 0.01, 0.016, 0.025, 0.04, 0.063, 0.1, 0.16, 0.25, 0.4, 0.5, 0.63,
    1.0, 1.6, 2.0, 2.5, 4.0, 6.3, 10.0, 16.0, 25.0, 40.0, 63.0, 100.0, 160.0,
)  # fmt: skip
"""Upper bounds for TTFT, queue and end-to-end time."""
ITL_BUCKETS_SECONDS = (
    0.002, 0.0032, 0.005, 0.008, 0.0125, 0.02, 0.032, 0.05, 0.08, 0.125, 0.2, 0.32, 0.5, 0.8, 1.25, 2.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What a replica may batch, changeable between two steps of a running engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


MIN_KV_ADMISSION = 0.05
DEFAULT_WATERMARK = 0.01
MAX_WATERMARK = 0.5
MAX_QUEUE_TIMEOUT_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """What the scheduler goes by beside the batch settings, when it starts requests and prefills. None = no limit."""

    max_num_partial_prefills: int | None = None
    """Prompts that may be computed in parts at a time."""
    max_prefill_tokens_per_step: int | None = None
    """Of all prompts together; decodes do not count."""
    kv_admission_limit: float = 1.0
    """Share of the KV blocks that admission may fill; running requests may grow beyond it."""
    watermark: float = DEFAULT_WATERMARK
    """Share of the KV blocks that admission leaves free, at least one block for each running request."""
    reserve_ratio: float | None = None
    """Share of the output that is likely to come for which admission keeps blocks back; None = it adapts itself."""
    enable_prefix_caching: bool = True
    """Whether requests share the blocks of equal beginnings."""
    queue_timeout_s: float | None = None
    """A request that has not begun after so long is given up."""


SETTING_NAMES = tuple(field.name for field in fields(BatchSettings))


DEFAULT_SETTINGS = BatchSettings(max_num_seqs=64, max_num_batched_tokens=4096, long_prefill_token_threshold=1024)
"""What an engine and an object that say nothing start with."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """Inclusive bounds of every setting; fixed at start, since buffers are sized by it."""

    max_num_seqs: tuple[int, int] = (1, 256)
    max_num_batched_tokens: tuple[int, int] = (512, 16384)
    long_prefill_token_threshold: tuple[int, int] = (256, 8192)

    def bounds(self, name: str) -> tuple[int, int]:
        low, high = getattr(self, name)
        return int(low), int(high)


@dataclass(frozen=True, slots=True)
class Violation:
    """Why settings are refused: the field, what is allowed, and a sentence."""

    field: str
    allowed: tuple[float, float] | None
    reason: str


def find_violation(settings: BatchSettings, envelope: Envelope) -> Violation | None:
    """Return the first reason why `settings` may not be applied, or None."""
    for name, value in settings.as_dict().items():
        low, high = envelope.bounds(name)
        if not low <= value <= high:
            return Violation(name, (low, high), f"{name} is {value}; allowed are {low} to {high}")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        return Violation(
            "max_num_batched_tokens",
            (settings.max_num_seqs, envelope.max_num_batched_tokens[1]),
            f"max_num_batched_tokens ({settings.max_num_batched_tokens}) is below max_num_seqs "
            f"({settings.max_num_seqs}): running sequences could not all decode in one step",
        )
    return None


@dataclass(frozen=True, slots=True)
class Pattern:
    """A class of requests by input and output length: [min, max) in tokens, max None = open."""

    name: str
    isl_min: int = 0
    isl_max: int | None = None
    osl_min: int = 0
    osl_max: int | None = None

    def holds(self, isl: int, osl: int) -> bool:
        return (
            self.isl_min <= isl
            and (self.isl_max is None or isl < self.isl_max)
            and self.osl_min <= osl
            and (self.osl_max is None or osl < self.osl_max)
        )


LONG_INPUT_TOKENS = 1024
LONG_OUTPUT_TOKENS = 256
OTHER_PATTERN = "Other"
DEFAULT_PATTERNS = (
    Pattern("LongInShortOut", isl_min=LONG_INPUT_TOKENS, osl_max=LONG_OUTPUT_TOKENS),
    Pattern("LongInLongOut", isl_min=LONG_INPUT_TOKENS, osl_min=LONG_OUTPUT_TOKENS),
    Pattern("ShortInLongOut", isl_max=LONG_INPUT_TOKENS, osl_min=LONG_OUTPUT_TOKENS),
    Pattern("ShortInShortOut", isl_max=LONG_INPUT_TOKENS, osl_max=LONG_OUTPUT_TOKENS),
)


def pattern_of(isl: int, osl: int, patterns: Sequence[Pattern] = DEFAULT_PATTERNS) -> str:
    """Name of the first pattern that holds the lengths, `Other` when none does."""
    return next((pattern.name for pattern in patterns if pattern.holds(isl, osl)), OTHER_PATTERN)


def lower_edge(tokens: int, edges: Sequence[int]) -> int:
    """The cell's label: the largest edge not above `tokens`."""
    return edges[max(0, bisect_right(edges, tokens) - 1)]


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """`settings.json` of the object's ConfigMap: what a new pod starts with."""

    generation: int
    settings: BatchSettings
    envelope: Envelope
    patterns: tuple[Pattern, ...]


def parse_settings_file(data: Mapping[str, object]) -> SettingsFile:
    """Read `{"generation", "settings", "envelope", "patterns"}`; raises ValueError naming what is wrong."""
    try:
        file = SettingsFile(
            generation=_read_whole(_read(data, "generation"), "generation"),
            settings=_read_settings(_read(data, "settings")),
            envelope=_read_envelope(_read(data, "envelope")),
            patterns=_read_patterns(_read(data, "patterns")),
        )
    except ValueError as error:
        raise ValueError(f"settings.json: {error}") from error
    if violation := find_violation(file.settings, file.envelope):
        raise ValueError(f"settings.json: {violation.reason}")
    return file


def _read(data: object, name: str) -> object:
    """The member `name` of a JSON object."""
    if not isinstance(data, Mapping):
        raise ValueError(f"an object with {name} was expected, not {data!r}")
    if name not in data:
        raise ValueError(f"{name} is missing")
    value: object = data[name]
    return value


def _read_whole(value: object, name: str, *, lowest: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueError(f"{name} must be a whole number of {lowest} or more, not {value!r}")
    return value


def _read_settings(data: object) -> BatchSettings:
    return BatchSettings(
        **{name: _read_whole(_read(data, name), f"settings.{name}", lowest=1) for name in SETTING_NAMES}
    )


def _read_range(value: object, name: str) -> tuple[object, object]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueError(f"{name} must be a list of two, not {value!r}")
    return value[0], value[1]


def _read_envelope(data: object) -> Envelope:
    bounds = {}
    for name in SETTING_NAMES:
        where = f"envelope.{name}"
        low, high = (_read_whole(item, where, lowest=1) for item in _read_range(_read(data, name), where))
        if low > high:
            raise ValueError(f"{where} is empty: {low} is above {high}")
        bounds[name] = low, high
    return Envelope(**bounds)


def _read_lengths(value: object, name: str) -> tuple[int, int | None]:
    """A range of lengths [min, max), max None = open."""
    low, high = _read_range(value, name)
    minimum = _read_whole(low, name)
    return minimum, None if high is None else _read_whole(high, name, lowest=minimum + 1)


def _read_patterns(data: object) -> tuple[Pattern, ...]:
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ValueError(f"patterns must be a list, not {data!r}")
    patterns = []
    for index, item in enumerate(data):
        where = f"patterns[{index}]"
        name = _read(item, "name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}.name must be a text, not {name!r}")
        isl = _read_lengths(_read(item, "isl"), f"{where}.isl")
        osl = _read_lengths(_read(item, "osl"), f"{where}.osl")
        patterns.append(Pattern(name, *isl, *osl))
    return tuple(patterns)


def settings_file_dict(file: SettingsFile) -> dict[str, object]:
    """The inverse of `parse_settings_file`."""
    return {
        "generation": file.generation,
        "settings": file.settings.as_dict(),
        "envelope": {name: list(file.envelope.bounds(name)) for name in SETTING_NAMES},
        "patterns": [
            {"name": p.name, "isl": [p.isl_min, p.isl_max], "osl": [p.osl_min, p.osl_max]} for p in file.patterns
        ],
    }
