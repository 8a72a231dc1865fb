"""Chooses the next tokens from logits, request by request: a result depends on its row and seed, never on the batch.

Order: penalties, minimum length, temperature, min-p, top-k, top-p. Randomness comes from the caller as one number a
token, a pure function of seed and position, so that a preempted request goes on as if nothing had happened.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from tidegate_engine.request import Request, SampledToken, SamplingParams, TokenLogprobs

CANDIDATES = 1024
"""Most likely tokens that are sorted at first; the whole vocabulary only when top-p reaches beyond them."""


def uniform(seed: bytes, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only."""
    digest = hashlib.blake2b(seed + position.to_bytes(8, "big"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def seed_of(request: Request, entropy: bytes) -> bytes:
    """The request's own seed, or one made of `entropy` and its id."""
    if request.params.seed is not None:
        return b"seed %d" % request.params.seed
    return hashlib.blake2b(request.id.encode(), key=entropy, digest_size=16).digest()


def sample(
    logits: Tensor, requests: Sequence[Request], *, eos_ids: Sequence[int], entropy: bytes
) -> list[SampledToken]:
    """A token for each row of `logits` (`[requests, vocab]`); a row that is not finite yields an error of its own."""
    logits = logits.float()
    highest, greedy = logits.max(dim=-1)
    chosen: list[SampledToken] = []
    rows = zip(logits, requests, highest.isfinite().tolist(), greedy.tolist(), strict=True)
    for row, request, is_finite, most_likely in rows:
        if not is_finite:
            chosen.append(SampledToken(-1, error="the model's logits are not finite"))
            continue
        token_id = most_likely
        if not _is_plain(request):
            random = uniform(seed_of(request, entropy), request.output_tokens)
            token_id = choose(_adjusted(row, request, eos_ids), request.params, random)
        logprobs = None if request.params.logprobs is None else _logprobs(row, token_id, request.params.logprobs)
        chosen.append(SampledToken(token_id, is_eos=token_id in eos_ids, logprobs=logprobs))
    return chosen


def choose(logits: Tensor, params: SamplingParams, random: float) -> int:
    """The token that `random` in [0, 1) falls on among those that the parameters leave."""
    if params.temperature == 0 or params.top_k == 1:
        return int(logits.argmax())
    probabilities = torch.softmax((logits - logits.max()) / params.temperature, dim=-1)
    if params.min_p > 0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0
    vocab_size = probabilities.shape[0]
    top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    if top_k == vocab_size and params.top_p >= 1:
        return _draw(probabilities, random)
    kept, ids = _most_likely(probabilities, top_k, params.top_p)
    return int(ids[_draw(kept, random)])


def _most_likely(probabilities: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The `top_k` largest in order, and their ids; zero after those that make up `top_p` of them, one at least."""
    vocab_size = probabilities.shape[0]
    total = probabilities.sum(dtype=torch.float64)
    for size in (top_k,) if top_k < vocab_size else (min(CANDIDATES, vocab_size), vocab_size):
        values, ids = probabilities.topk(size)
        kept = values.double()
        ends = kept.cumsum(0)
        limit = top_p * (ends[-1] if top_k < vocab_size else total)
        if bool(ends[-1] >= limit):
            break
    kept[1:][ends[:-1] >= limit] = 0
    return kept, ids


def _draw(weights: Tensor, random: float) -> int:
    """Index that `random` falls on when the weights lie side by side; never one of weight zero."""
    ends = weights.double().cumsum(0)
    index = int(torch.searchsorted(ends, ends[-1] * random, right=True))
    if index < weights.shape[0]:
        return index
    return int(weights.nonzero()[-1])  # rounding put the point on the far end


def _is_plain(request: Request) -> bool:
    """Nothing but the largest logit matters."""
    params = request.params
    return (
        params.temperature == 0
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and request.output_tokens >= params.min_tokens
    )


def _adjusted(logits: Tensor, request: Request, eos_ids: Sequence[int]) -> Tensor:
    """A copy of the logits after penalties and minimum length."""
    params = request.params
    logits = logits.clone()
    output = _counts(request.output_ids, logits.shape[0])
    if params.repetition_penalty != 1:
        seen = _counts(request.prompt_ids, logits.shape[0]) + output > 0
        penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    logits -= params.presence_penalty * (output > 0) + params.frequency_penalty * output
    if request.output_tokens < params.min_tokens:
        logits[[*eos_ids, *params.stop_token_ids]] = -torch.inf
    return logits


def _counts(ids: Sequence[int], vocab_size: int) -> Tensor:
    return torch.bincount(torch.tensor(list(ids), dtype=torch.long), minlength=vocab_size)


def _logprobs(logits: Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Log probabilities as the model gave them, before penalties and temperature."""
    values = torch.log_softmax(logits, dim=-1)
    top = values.topk(min(count, values.shape[0]))
    return TokenLogprobs(
        logprob=float(values[token_id]),
        top=tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )
