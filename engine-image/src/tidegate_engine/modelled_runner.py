"""A runner that computes nothing and takes as long as a GPU would: the emulator behind the real server and scheduler.

Durations come from a profile's step-time formula; tokens are made up, the same for the same prompt and seed. Needs no
torch, no weights. Called by the engine loop.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from tidegate_engine.byte_tokenizer import ByteTokenizer
from tidegate_engine.request import Request, SampledToken, Step, TokenLogprobs
from tidegate_engine.runner import ModelInfo
from tidegate_engine.steptime import Profile, StepModel, shape_of_step

_TEXT = (
    "the sea ebb low bay fog oar net sky dry run tow and few old new hum far off one two sun set bar dam pen was has "
    "its all way day "
)
HOST_LINK_BYTES_PER_SECOND = 20e9
"""What a PCIe 4.0 link of 16 lanes carries."""
WORDS = tuple(ByteTokenizer().encode(_TEXT))
"""One token each: a text that reads as words, of the usual four characters a token."""


class ModelledRunner:
    """Sleeps to each step's deadline. The host's time between two steps lies inside the next one, as on a real GPU."""

    def __init__(
        self,
        profile: Profile,
        info: ModelInfo,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._profile = profile
        self._info = info
        self._most_kv_blocks = max(info.kv_blocks, profile.kv_blocks * profile.block_tokens // info.block_tokens)
        self._clock = clock
        self._sleep = sleep
        self._deadline: float | None = None

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def step_model(self) -> StepModel | None:
        return self._profile.step

    @property
    def adapters(self) -> None:
        return None

    @property
    def start_seconds(self) -> Mapping[str, float]:
        return self._profile.start_seconds

    def grown_bytes(self) -> None:
        """A GPU's workspace is not part of a profile."""

    def most_kv_blocks(self, *, written: int) -> int:
        """What the profile's GPU has, or what flags made of it."""
        return self._most_kv_blocks

    def resize(self, kv_blocks: int) -> None:
        self._info = replace(self._info, kv_blocks=kv_blocks)

    def rest(self) -> None:
        """The loop goes idle: the next step does not follow the last one directly."""
        self._deadline = None

    def run(self, step: Step) -> Mapping[str, SampledToken]:
        now = self._clock()
        seconds = self._profile.step.seconds(shape_of_step(step))
        seconds += (len(step.stores) + len(step.loads)) * _copy_seconds(self._profile, self._info.block_tokens)
        begin = now if self._deadline is None else self._deadline
        tokens = {request.id: _token(request) for request in step.decodes.requests}
        tokens.update((item.request.id, _token(item.request)) for item in step.chunks if item.samples)
        deadline = begin + seconds
        rest = deadline - self._clock()
        if rest > 0:
            self._sleep(rest)
        # A host that cannot keep up is not made to catch up for ever: at most one step is owed.
        self._deadline = max(deadline, self._clock() - seconds)
        return tokens


def model_info(
    profile: Profile, *, block_tokens: int, kv_blocks: int, max_model_len: int, host_bytes: int = 0
) -> ModelInfo:
    """The profile's facts, with the sizes that flags may have changed."""
    copying_pays = _copy_seconds(profile, block_tokens) < block_tokens * profile.step.token_seconds
    return ModelInfo(
        name=profile.model,
        layers=profile.layers,
        kv_heads=profile.kv_heads,
        head_size=profile.head_size,
        vocab_size=profile.vocab_size,
        max_model_len=max_model_len,
        weight_dtype=profile.weight_dtype,
        kv_dtype=profile.kv_dtype,
        weight_bytes=profile.weight_bytes,
        kv_token_bytes=profile.kv_token_bytes,
        kv_blocks=kv_blocks,
        block_tokens=block_tokens,
        gpu_product=profile.gpu,
        gpu_count=profile.gpus,
        eos_token_ids=ByteTokenizer.eos_token_ids,
        host_blocks=host_bytes // (profile.kv_token_bytes * block_tokens) if copying_pays else 0,
    )


def _copy_seconds(profile: Profile, block_tokens: int) -> float:
    """Of a KV block, between host and GPU."""
    return profile.kv_token_bytes * block_tokens / HOST_LINK_BYTES_PER_SECOND


def _token(request: Request) -> SampledToken:
    """The request's next token: never the end of the text, so that `max_tokens` decides the length."""
    last = request.prompt_ids[-1] if request.prompt_ids else 0
    choice = hash((request.prompt_tokens, last, request.params.seed or 0, request.output_tokens)) % len(WORDS)
    if request.params.logprobs is None:
        return _WORD_TOKENS[choice]
    count = min(request.params.logprobs, len(WORDS))
    top = tuple((WORDS[(choice + rank) % len(WORDS)], -0.25 - rank) for rank in range(count))
    return SampledToken(WORDS[choice], logprobs=TokenLogprobs(-0.25, top))


_WORD_TOKENS = tuple(SampledToken(word) for word in WORDS)
