"""What a policy is told of the engines before it starts: their speed, their KV cache, how long they take to start.

Peers get this from a profiler or a calibration run. Here they get the step model that the simulated engines have, so
that no baseline is worse than its rules are.
"""

import math
from dataclasses import dataclass

from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import StepModel, StepShape


@dataclass(frozen=True, slots=True)
class Plant:
    """One kind of replica, the goals, and the bounds."""

    step: StepModel
    kv_tokens: float
    settings: BatchSettings
    ttft_seconds: float
    itl_seconds: float
    start_seconds: float
    lowest_replicas: int = 1
    highest_replicas: int = 100

    def step_seconds(self, *, decoding: float, decode_kv: float, prefill: float, isl: float) -> float:
        """Of a step with so many decodes over so much context, and so many tokens of prompts of length `isl`."""
        return self.step.seconds(
            StepShape(
                tokens=decoding + prefill,
                decode_kv_tokens=decode_kv,
                sequences=decoding + (max(1.0, prefill / isl) if prefill > 0 and isl > 0 else 0.0),
                prefill_attention=prefill * isl / 2,
                has_prefill=prefill > 0,
            )
        )

    def prefill_seconds(self, tokens: float, *, isl: float, decoding: float, decode_kv: float) -> float:
        """Of reading `tokens` in, in steps of the token budget, beside the decodes."""
        budget = float(self.settings.max_num_batched_tokens)
        whole, rest = divmod(max(tokens, 0.0), budget)
        seconds = whole * self.step_seconds(decoding=decoding, decode_kv=decode_kv, prefill=budget, isl=isl)
        if rest > 0:
            seconds += self.step_seconds(decoding=decoding, decode_kv=decode_kv, prefill=rest, isl=isl)
        return seconds

    def largest_batch(self, *, isl: float, osl: float) -> int:
        """Sequences that slots and KV cache hold and that prompts can be read in for as fast as they end."""
        context = max(1.0, isl + osl / 2)
        tokens = self.settings.max_num_batched_tokens
        balance = osl * tokens / (isl + osl) if isl + osl > 0 else tokens
        return max(1, math.floor(min(self.kv_tokens / context, self.settings.max_num_seqs, balance, tokens - 1)))

    def decode_tokens_per_second(self, *, context: float, itl_seconds: float) -> float:
        """The most that decodes alone reach with their step within `itl_seconds`."""
        best = 1.0 / self.step_seconds(decoding=1, decode_kv=context, prefill=0, isl=0)
        most = max(1, math.floor(min(self.settings.max_num_seqs, self.kv_tokens / max(1.0, context))))
        for batch in range(1, most + 1):
            seconds = self.step_seconds(decoding=batch, decode_kv=batch * context, prefill=0, isl=0)
            if batch > 1 and seconds > itl_seconds:
                break
            best = max(best, batch / seconds)
        return best

    def prefill_tokens_per_second(self, isl: float) -> float:
        """Of one prompt after the other."""
        return isl / self.prefill_seconds(isl, isl=isl, decoding=0, decode_kv=0) if isl > 0 else math.inf
