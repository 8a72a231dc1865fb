"""The step-time formula, its profiles and its online fit: one place for engine, capacity and simulator.

Pure: no torch, no numpy. `t = base + token·max(0, T − T0) + kv·KV + sequence·S + attention·Σ p(ctx + p/2)
+ mixed·KV·[step has prefill]` with T tokens in the step, KV the sum of decode contexts, S sequences, p a prefill chunk.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, as far as its time depends on it."""

    tokens: int
    decode_kv_tokens: int
    sequences: int
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
