"""A request and a step: the facts that scheduler, runner, engine loop and simulator pass to each other.

Pure: no torch, no I/O, no clock. A request carries counts and block hashes beside its ids, so that a simulator can
bring hashes ready-made and no ids. Only the scheduler mutates a request.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class FinishReason(StrEnum):
    """Why a request ended; the OpenAI words where there is one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class PoolingKind(StrEnum):
    """Which hidden states of a prompt become its embedding."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"
    """The first token's."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `logprobs` None = none, n = the chosen token's and the n most likely."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)"""
    grammar: str | None = None
    """llguidance's grammar that the whole answer follows; its end ends the answer."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a request is answered with."""

    name: str
    digest: str
    """Of its files: adapters of equal digests compute the same."""


class Window(NamedTuple):
    """How far back a token sees: the newest `tokens`, itself included, and the first `sinks` of the context."""

    tokens: int
    sinks: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One inference request. Times are seconds of the caller's monotonic clock."""

    id: str
    prompt_tokens: int
    max_tokens: int
    arrival: float
    prompt_ids: Sequence[int] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    adapter: Adapter | None = None
    """None = the model as it is."""
    pooling: PoolingKind | None = None
    """Set where the prompt's embedding is wanted instead of tokens; `max_tokens` is 1 then."""
    window: Window | None = None
    """None = what the model sees."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the full blocks of prompt + output; filled by the block pool, or brought ready-made (then without
    `prompt_ids`)."""

    state: RequestState = RequestState.WAITING
    output_ids: list[int] = field(default_factory=list)
    output_tokens: int = 0
    num_computed: int = 0
    """Tokens of prompt + output whose KV is written (or planned in the step in flight)."""
    num_cached: int = 0
    """Prompt tokens taken from the prefix cache at the first admission."""
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: FinishReason | None = None
    requested_max_tokens: int | None = None
    """What was asked for, when `max_tokens` was lowered to what fits; None = not lowered."""
    sequence: int = 0
    """Number of arrival, given by the scheduler; breaks ties of equal priority and arrival."""
    num_published: int = 0
    """Leading blocks that the prefix cache knows, or cannot know."""
    packed_prompt: bytes | None = None
    """`prompt_ids` as 64-bit integers, for hashing and comparing."""
    hash_epoch: int | None = None
    """Epoch of the prefix cache that `block_hashes` and the blocks belong to."""
    excused_seconds: float = 0.0
    """Of its wait for the first step, what passed while the engine was frozen."""
    bypassed: int = 0
    """How often a later request was admitted before this one, which did not fit."""

    @property
    def total_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return self.prompt_tokens + self.output_tokens

    @property
    def may_share(self) -> bool:
        """Whether cached keys and values may stand for its tokens: some poolings need the states of all of them."""
        return self.pooling is None or self.pooling is PoolingKind.LAST

    def token_ids(self, start: int, count: int) -> list[int]:
        """Ids of positions [start, start + count) of prompt + output."""
        offset = start - self.prompt_tokens
        if offset >= 0:
            return self.output_ids[offset : offset + count]
        prompt = list(self.prompt_ids[start : start + count])
        return prompt + self.output_ids[: count - len(prompt)]


class StepItem(NamedTuple):
    """Positions [start, start + count) of a request, computed in a step.

    `samples` is true when the last position yields the next token (a decode, or the last chunk of a prefill).
    """

    request: Request
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody wants here
    samples: bool
    blocks: Sequence[int]
    """The request's own block table (no copy), long enough for start + count tokens, as `blocks` lays it out. Valid
    until the step's commit, also when the request is aborted meanwhile; it may be longer than needed."""
    drafts: Sequence[int] = ()
    """Guesses of the tokens that follow the known ones; the last positions of the item, and each yields a token."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """Requests that compute one position and get a token for it, with what a `StepItem` says of each.

    In columns, since hundreds are in each step, and an object for each would take longer than all else that is done.
    """

    requests: Sequence[Request] = ()
    starts: Sequence[int] = ()
    tables: Sequence[Sequence[int]] = ()
    """Their block tables."""

    def __len__(self) -> int:
        return len(self.requests)


class BlockCopy(NamedTuple):
    """A block of the KV cache and a slot of the host pool, between which one is copied."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass computes."""

    id: int
    chunks: Sequence[StepItem]
    """All that are no plain decodes: chunks of prompts, and decodes with drafts."""
    settings_version: int
    decodes: Decodes = Decodes()
    stores: Sequence[BlockCopy] = ()
    """Blocks to copy to the host pool before anything is written to them; no slot comes twice."""
    loads: Sequence[BlockCopy] = ()
    """Slots to copy back, after the stores and before the forward pass."""

    @property
    def is_empty(self) -> bool:
        """There is nothing to compute."""
        return not (self.decodes or self.chunks)

    @property
    def items(self) -> list[StepItem]:
        """An item for each request, decodes first: for whoever is not in a hurry."""
        columns = self.decodes.requests, self.decodes.starts, self.decodes.tables
        return [
            *(StepItem(request, start, 1, True, table) for request, start, table in zip(*columns, strict=True)),
            *self.chunks,
        ]

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(item.count for item in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of the chosen token, and the most likely ones as (id, logprob), most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """What a runner returns for an item that samples. `is_eos` is the model's word; the scheduler decides."""

    token_id: int
    is_eos: bool = False
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Set when this one request failed in the step (NaN logits, ...): it is finished with reason `error`."""
    is_corrupted: bool = False
    """The error is the model's: what it computed is not finite."""
    is_final: bool = False
    """Nothing may follow (a grammar's end), whatever the minimum length says."""
    is_deferred: bool = False
    """There is no token yet (the grammar is still being compiled): the last position is to be computed again."""
    following: "tuple[SampledToken, ...]" = ()
    """Tokens after it that the step yields too, as far as its drafts were right."""
    embedding: bytes | None = None
    """The prompt's, for a request with `pooling`: float32, little-endian. The id means nothing then."""


class TokenEvent(NamedTuple):
    """What `commit` reports for a request: a token, its end, or both. `token` is None where only counts matter."""

    request: Request
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    interval_seconds: float | None = None
    """Since the request's token before; None for its first."""


@dataclass(frozen=True, slots=True)
class Continued:
    """Requests that got a token, not their first, and go on. In columns, since most of a step's requests do."""

    requests: list[Request] = field(default_factory=list)
    tokens: list[SampledToken | None] = field(default_factory=list)
    intervals_seconds: list[float] = field(default_factory=list)
    """Since the token before."""


@dataclass(frozen=True, slots=True)
class Booked:
    """What a commit tells of its requests: an event for each token and each end, but for those that just went on."""

    continued: Continued = field(default_factory=Continued)
    events: list[TokenEvent] = field(default_factory=list)

    def __iter__(self) -> Iterator[TokenEvent]:
        """An event for everything: for whoever is not in a hurry."""
        columns = self.continued.requests, self.continued.tokens, self.continued.intervals_seconds
        for request, token, interval_seconds in zip(*columns, strict=True):
            yield TokenEvent(request, token, None, interval_seconds)
        yield from self.events

    def __len__(self) -> int:
        return len(self.continued.requests) + len(self.events)
