"""What requests ask of their next tokens as the sampling kernel takes it: a tensor a wish, a list of adjustments.

Pure functions of parameters and counts. `sampling` keeps both and calls the kernel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidegate_engine.request import SamplingParams
from tidegate_kernels.reference import Adjustments, Choice

BELOW_ONE = 1 - 2.0**-24
"""The largest fp32 below one: a larger double would be rounded up to it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a row's request has said before it."""

    prompt: Sequence[int]
    """Tokens, where they are penalised."""
    counts: Mapping[int, int]
    """By token of the answer."""


NOTHING = Said((), {})


def choice_of(params: Sequence[SamplingParams], *, vocab: int, device: torch.device) -> Choice:
    """Of rows with such parameters; its random numbers are zeros."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Choice(
        temperatures=column([each.temperature for each in params]),
        top_ks=column([each.top_k if 0 < each.top_k < vocab else 0 for each in params], torch.int32),
        top_ps=column([each.top_p for each in params]),
        min_ps=column([each.min_p for each in params]),
        randoms=column([0.0] * len(params)),
    )


def randoms_of(rows: Sequence[int], points: NDArray[np.float64], *, count: int, device: torch.device) -> Tensor:
    """The numbers of the rows that draw, zero for the others, as the kernel takes them."""
    found = np.zeros(count, np.float32)
    found[list(rows)] = np.minimum(points, BELOW_ONE)
    return torch.from_numpy(found).to(device)


def adjustments_of(params: Sequence[SamplingParams], said: Mapping[int, Said], device: torch.device) -> Adjustments:
    """Penalties and biases of all rows; `said` has those of rows that are penalised or biased."""
    starts: list[int] = [0]
    ids: list[int] = []
    counts: list[int] = []
    biases: list[float] = []
    for index, each in enumerate(params):
        if (own := said.get(index)) is not None:
            bias = dict(each.logit_bias)
            entries = {**dict.fromkeys(bias, -1), **dict.fromkeys(own.prompt, 0), **own.counts}
            ids += entries
            counts += entries.values()
            biases += [bias.get(token, 0.0) for token in entries]
        starts.append(len(ids))

    def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    return Adjustments(
        starts=tensor(starts, torch.int32),
        ids=tensor(ids, torch.int64),
        counts=tensor(counts, torch.int32),
        biases=tensor(biases, torch.float32),
        repetitions=tensor([each.repetition_penalty for each in params], torch.float32),
        presences=tensor([each.presence_penalty for each in params], torch.float32),
        frequencies=tensor([each.frequency_penalty for each in params], torch.float32),
    )
