"""Pools the hidden states of prompts as their chunks are computed. Called by `torch_runner`."""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate_engine.request import PoolingKind, Request, SampledToken, StepItem

NOT_FINITE = SampledToken(-1, error="the model's hidden states are not finite numbers", is_corrupted=True)


class Pooler:
    """Holds what earlier chunks of a prompt gave, as long as the request lives."""

    def __init__(self, *, is_normalised: bool) -> None:
        self._is_normalised = is_normalised
        self._begun: WeakKeyDictionary[Request, Tensor] = WeakKeyDictionary()

    def pool(
        self, states: Tensor, items: Sequence[StepItem], query_starts: Sequence[int]
    ) -> Mapping[str, SampledToken]:
        """The embeddings of the pooled requests that this step ends.

        `states` are those of all rows, `[rows, hidden]`; an item has the rows from its place in `query_starts` on.
        """
        done: dict[str, SampledToken] = {}
        for item, start in zip(items, query_starts, strict=False):
            request = item.request
            if request.pooling is None:
                continue
            pooled = self._add(request, item, states[start : start + item.count])
            if item.samples:
                self._begun.pop(request, None)
                done[request.id] = self._finish(request, pooled)
        return done

    def _add(self, request: Request, item: StepItem, rows: Tensor) -> Tensor:
        """What is known after these rows; a request that begins again, after a preemption, forgets what it had."""
        if request.pooling is PoolingKind.LAST:
            return rows[-1].float()
        if request.pooling is PoolingKind.CLS:
            pooled = rows[0].float().clone() if item.start == 0 else self._begun[request]
        else:
            pooled = rows.float().sum(dim=0)
            if item.start:
                pooled += self._begun[request]
        self._begun[request] = pooled
        return pooled

    def _finish(self, request: Request, pooled: Tensor) -> SampledToken:
        if request.pooling is PoolingKind.MEAN:
            pooled = pooled / request.prompt_tokens
        if self._is_normalised:
            pooled = F.normalize(pooled, dim=0)
        if not bool(pooled.isfinite().all()):
            return NOT_FINITE
        return SampledToken(-1, embedding=pooled.contiguous().to(torch.float32).numpy().astype("<f4").tobytes())
