"""Chooses the next tokens from logits: a result depends on its row and seed, never on the batch.

Order: penalties, logit bias, grammar, minimum length, temperature, min-p, top-k, top-p. Randomness is one number a
token, a pure function of seed and position: a preempted request goes on as if nothing had happened, and a drafted token
is right exactly when it is the one that would have been chosen.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate_engine.request import Request, SampledToken, SamplingParams, StepItem, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below count as zero: dividing by them overflows."""
CANDIDATES = (64, 1024)
"""Most likely tokens that are sorted at first, and then; the whole vocabulary only where top-p reaches beyond them."""
SPAN = 128
"""Tokens that a draw skips at once; the sum of so few is exact enough in single precision."""
ROWS_AT_ONCE = 64
"""Rows that random choices are made for at once: bounds the memory that they take."""
NOT_FINITE = SampledToken(-1, error="the model's logits are not finite", is_corrupted=True)
NONE_LEFT = SampledToken(-1, error="no token is left to choose from")
OVERFLOW = SampledToken(-1, error="the request's penalties and biases make its logits infinite")
NO_MASKS = SampledToken(-1, error="this model's answers cannot be held to a grammar")

logger = logging.getLogger(__name__)


class Masks(Protocol):
    """What the sampler asks of `grammars`, which says which tokens a request's grammar allows."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Tokens that it allows where a grammar may end; choosing one is the end."""
        ...

    def prepare(self, requests: Iterable[Request]) -> None:
        """Their first token is wanted soon."""
        ...

    def allowed(self, rows: "Sequence[Row]", *, may_wait: bool) -> tuple[Tensor, list[SampledToken | None]]:
        """One row each, true for an allowed token; and what to answer instead, where no token can be chosen.

        `may_wait`: nobody else's token is held up by waiting a little for a grammar.
        """
        ...


class Row(NamedTuple):
    """One row of logits: the token after the request's known ones and the first `drafts` of those drafted for it."""

    request: Request
    drafts: Sequence[int] = ()

    @property
    def output_tokens(self) -> int:
        return self.request.output_tokens + len(self.drafts)


@dataclass(slots=True)
class _Said:
    """What penalties need to know of a request: its prompt's tokens once each, and counts of the first `output`."""

    prompt: list[int]
    counts: dict[int, int]
    output: int = 0


class Sampler:
    """Chooses tokens for one model. `masks` None = no request has a grammar."""

    def __init__(self, *, eos_ids: Sequence[int], entropy: bytes, masks: Masks | None = None) -> None:
        self._eos_ids = tuple(eos_ids)
        self._grammar_ends = () if masks is None else tuple(masks.eos_ids)
        self._entropy = entropy
        self._masks = masks
        self._said: WeakKeyDictionary[Request, _Said] = WeakKeyDictionary()

    def prepare(self, items: Sequence[StepItem]) -> None:
        """Begin what can be done while the step is computed."""
        if self._masks is not None:
            self._masks.prepare(item.request for item in items)

    def sample(self, logits: Tensor, items: Sequence[StepItem]) -> list[SampledToken]:
        """A token for each item, with those after it that its drafts got right.

        `logits` has one row (`[rows, vocab]`) for each item and one more for each of its drafts. Whatever fails, fails
        for its own item.
        """
        try:
            return self._sample(logits, items)
        except Exception:
            logger.exception("tokens cannot be chosen together; each request is tried alone")
            float(logits.max())  # a device that is lost fails here again, and with it the step
        results = []
        start = 0
        for item in items:
            end = start + len(item.drafts) + 1
            results.append(self._sample_alone(logits[start:end], item))
            start = end
        return results

    def _sample_alone(self, logits: Tensor, item: StepItem) -> SampledToken:
        try:
            return self._sample(logits, [item])[0]
        except Exception as error:
            logger.exception("no token can be chosen for %s", item.request.id)
            return SampledToken(-1, error=f"choosing the token failed: {type(error).__name__}: {error}")

    def _sample(self, logits: Tensor, items: Sequence[StepItem]) -> list[SampledToken]:
        rows = [Row(item.request, item.drafts[:count]) for item in items for count in range(len(item.drafts) + 1)]
        tokens = self._choose_all(logits.float(), rows)
        if len(rows) == len(items):
            return tokens
        results = []
        start = 0
        for item in items:
            end = start + len(item.drafts) + 1
            results.append(_accept(tokens[start:end], item.drafts))
            start = end
        return results

    def _choose_all(self, logits: Tensor, rows: Sequence[Row]) -> list[SampledToken]:
        highest, greedy = logits.max(dim=-1)
        finite = highest.isfinite().tolist()
        ids: list[int] = greedy.tolist()
        replaced: dict[int, SampledToken] = {
            index: NOT_FINITE for index, is_finite in enumerate(finite) if not is_finite
        }
        adjusted = [index for index, row in enumerate(rows) if not self._is_plain(row)]
        changed: Tensor | None = None
        if adjusted:
            changed = logits[adjusted]
            instead = self._adjust(changed, [rows[index] for index in adjusted], step_rows=len(rows))
            values, best = changed.max(dim=-1)
            for index, token_id, value, other in zip(adjusted, best.tolist(), values.tolist(), instead, strict=True):
                ids[index] = token_id
                if not finite[index]:
                    continue
                if other is not None or not math.isfinite(value):
                    replaced[index] = other or (NONE_LEFT if value == -math.inf else OVERFLOW)
        random = [
            index for index, row in enumerate(rows) if index not in replaced and not is_greedy(row.request.params)
        ]
        for start in range(0, len(random), ROWS_AT_ONCE):
            part = random[start : start + ROWS_AT_ONCE]
            params = [rows[index].request.params for index in part]
            randoms = [self._random(rows[index]) for index in part]
            for index, token_id in zip(
                part, choose(_rows_of(part, logits, adjusted, changed), params, randoms), strict=True
            ):
                ids[index] = token_id
        logprobs = _logprobs(logits, rows, ids)
        eos_ids = self._eos_ids
        tokens = []
        for index, (row, token_id) in enumerate(zip(rows, ids, strict=True)):
            if replaced and index in replaced:
                tokens.append(replaced[index])
                continue
            is_final = token_id in self._grammar_ends and row.request.params.grammar is not None
            is_eos = is_final or token_id in eos_ids
            tokens.append(SampledToken(token_id, is_eos, logprobs.get(index) if logprobs else None, is_final=is_final))
        return tokens

    def _random(self, row: Row) -> float:
        seed = row.request.params.seed
        source = self._entropy + row.request.id.encode() if seed is None else b"seed %d" % seed
        return uniform(source, row.output_tokens)

    def _is_plain(self, row: Row) -> bool:
        """The logits are used as they are."""
        params = row.request.params
        return (
            params.presence_penalty == 0
            and params.frequency_penalty == 0
            and params.repetition_penalty == 1
            and not params.logit_bias
            and params.grammar is None
            and row.output_tokens >= params.min_tokens
        )

    def _adjust(self, logits: Tensor, rows: Sequence[Row], *, step_rows: int) -> list[SampledToken | None]:
        """Apply to each row, in place, what its request asks for; returns what to answer instead of a token of its.

        `step_rows`: how many rows the step has, these and plain ones.
        """
        for index, row in enumerate(rows):
            params = row.request.params
            if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
                self._penalise(logits[index], row)
            if params.logit_bias:
                ids, biases = zip(*params.logit_bias, strict=True)
                logits[index, list(ids)] += torch.tensor(biases, device=logits.device)
        held = [index for index, row in enumerate(rows) if row.request.params.grammar is not None]
        instead = self._apply_grammars(logits, rows, held, may_wait=len(held) == step_rows)
        for index, row in enumerate(rows):
            if row.output_tokens < row.request.params.min_tokens:
                ends = [*self._eos_ids, *self._grammar_ends, *row.request.params.stop_token_ids]
                before = logits[index, ends]
                logits[index, ends] = -torch.inf
                if row.request.params.grammar is not None and logits[index].max() == -torch.inf:
                    logits[index, ends] = before  # nothing else continues the grammar: its end goes before the length
        return instead

    def _apply_grammars(
        self, logits: Tensor, rows: Sequence[Row], held: Sequence[int], *, may_wait: bool
    ) -> list[SampledToken | None]:
        """Leave what the grammars of the rows `held` allow; returns what to answer instead of a token of each row's."""
        instead: list[SampledToken | None] = [None] * len(rows)
        if not held:
            return instead
        if self._masks is None:
            for index in held:
                instead[index] = NO_MASKS
            return instead
        allowed, found = self._masks.allowed([rows[index] for index in held], may_wait=may_wait)
        for index, token in zip(held, found, strict=True):
            instead[index] = token
        width = logits.shape[1]
        if allowed.shape[1] < width:  # logits of no token
            allowed = F.pad(allowed, (0, width - allowed.shape[1]))
        places = list(held)
        logits[places] = logits[places].masked_fill(~allowed[:, :width].to(logits.device), -torch.inf)
        return instead

    def _penalise(self, logits: Tensor, row: Row) -> None:
        params = row.request.params
        said = self._said_by(row.request)
        counts = said.counts
        if row.drafts:
            counts = dict(counts)
            _count(row.drafts, counts)
        if params.repetition_penalty != 1:
            seen = list({*said.prompt, *counts})
            values = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if counts:
            amounts = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits.device)
            logits[list(counts)] -= params.presence_penalty + params.frequency_penalty * amounts

    def _said_by(self, request: Request) -> _Said:
        said = self._said.get(request)
        if said is None:
            prompt = list(set(request.prompt_ids)) if request.params.repetition_penalty != 1 else []
            said = self._said[request] = _Said(prompt, {})
        _count(request.output_ids[said.output :], said.counts)
        said.output = len(request.output_ids)
        return said


def _rows_of(part: list[int], logits: Tensor, adjusted: Sequence[int], changed: Tensor | None) -> Tensor:
    """A copy of the rows `part`, each as it was adjusted."""
    rows = logits[part]
    if changed is not None:
        place_of = {index: place for place, index in enumerate(adjusted)}
        if moved := [at for at, index in enumerate(part) if index in place_of]:
            rows[moved] = changed[[place_of[part[at]] for at in moved]]
    return rows


def uniform(seed: bytes, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only."""
    digest = hashlib.blake2b(seed + position.to_bytes(8, "big"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def is_greedy(params: SamplingParams) -> bool:
    """Only the most likely token can be chosen."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1


def choose(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    """The token of each row that its number in [0, 1) falls on among those that its parameters leave.

    `logits` fp32 `[rows, vocab]`, changed in place; no row is greedy. Rows do not influence each other.
    """
    device = logits.device
    temperatures = torch.tensor([[row.temperature] for row in params], device=device)
    weights = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperatures).exp_()  # the largest is 1
    if any(row.min_p > 0 for row in params):
        weights.masked_fill_(weights < torch.tensor([[row.min_p] for row in params], device=device), 0)
    points = torch.tensor(randoms, dtype=torch.float64, device=device)
    vocab = weights.shape[1]
    cut = [index for index, row in enumerate(params) if 0 < row.top_k < vocab or row.top_p < 1]
    if not cut:
        chosen: list[int] = _draw(weights, points).tolist()
        return chosen
    ids = [0] * len(params)
    free = sorted(set(range(len(params))).difference(cut))
    if free:
        for index, token_id in zip(free, _draw(weights[free], points[free]).tolist(), strict=True):
            ids[index] = token_id
    for size in (*(size for size in CANDIDATES if size < vocab), vocab):
        found = _draw_among(weights[cut], points[cut], [params[index] for index in cut], size=size)
        for index, token_id in zip(cut, found, strict=True):
            if token_id is not None:
                ids[index] = token_id
        cut = [index for index, token_id in zip(cut, found, strict=True) if token_id is None]
        if not cut:
            break
    return ids


def _draw_among(weights: Tensor, points: Tensor, params: Sequence[SamplingParams], *, size: int) -> list[int | None]:
    """Draw by top-k and top-p among the `size` most likely; None where more of them have to be known."""
    device, vocab = weights.device, weights.shape[1]
    top_k = torch.tensor([[row.top_k if 0 < row.top_k < vocab else vocab] for row in params], device=device)
    top_p = torch.tensor([[row.top_p] for row in params], dtype=torch.float64, device=device)
    values, token_ids = weights.topk(size)
    kept = values.double()
    kept[torch.arange(size, device=device) >= top_k] = 0
    ends = kept.cumsum(-1)
    total = torch.where(top_k < vocab, ends[:, -1:], _span_sums(weights)[1].sum(-1, keepdim=True))
    limit = top_p * total
    is_enough = (top_k <= size) | ((top_k == vocab) & (ends[:, -1:] >= limit)) | (size == vocab)
    kept[:, 1:][ends[:, :-1] >= limit] = 0
    chosen = token_ids.gather(1, _draw(kept, points)[:, None])[:, 0].tolist()
    return [token_id if known else None for token_id, known in zip(chosen, is_enough[:, 0].tolist(), strict=True)]


def _span_sums(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as `[rows, spans, SPAN]`, and the spans' sums in double precision.

    Summed span by span: a sum over a whole row would be split among threads in a way that depends on the rows.
    """
    rows, width = weights.shape
    if width % SPAN:
        weights = F.pad(weights, (0, -width % SPAN))
    spans = weights.view(rows, -1, SPAN)
    return spans, spans.sum(-1).double()


def _draw(weights: Tensor, points: Tensor) -> Tensor:
    """Per row, the index that its point falls on when the weights lie side by side in [0, 1); never one of weight 0."""
    spans, sums = _span_sums(weights)
    ends = sums.cumsum(-1)
    target = points[:, None] * ends[:, -1:]
    span = _first_beyond(ends, target)
    inside = spans[torch.arange(spans.shape[0], device=spans.device), span[:, 0]].double().cumsum(-1)
    rest = target - F.pad(ends, (1, 0)).gather(1, span)
    return (span * SPAN + _first_beyond(inside, rest.clamp(min=0)))[:, 0]


def _first_beyond(ends: Tensor, target: Tensor) -> Tensor:
    """Index of the first end beyond the target. Rounding may put a target on the far end, where no weight follows."""
    last = torch.nextafter(ends[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(ends, torch.minimum(target, last), right=True)


def _accept(tokens: Sequence[SampledToken], drafts: Sequence[int]) -> SampledToken:
    """The first token, with those after it whose rows saw nothing but what was chosen."""
    accepted = 0
    while (
        accepted < len(drafts) and tokens[accepted].token_id == drafts[accepted] and tokens[accepted + 1].error is None
    ):
        accepted += 1
    return tokens[0]._replace(following=tuple(tokens[1 : accepted + 1])) if accepted else tokens[0]


def _count(ids: Sequence[int], counts: dict[int, int]) -> None:
    for token_id in ids:
        counts[token_id] = counts.get(token_id, 0) + 1


def _logprobs(logits: Tensor, rows: Sequence[Row], ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    """By row: log probabilities as the model gave them, before penalties and temperature."""
    counts = {
        index: row.request.params.logprobs for index, row in enumerate(rows) if row.request.params.logprobs is not None
    }
    result: dict[int, TokenLogprobs] = {}
    wanted = list(counts)
    for start in range(0, len(wanted), ROWS_AT_ONCE):
        part = wanted[start : start + ROWS_AT_ONCE]
        values = torch.log_softmax(logits[part], dim=-1)
        most = min(max(counts[index] or 0 for index in part), values.shape[1])
        top = values.topk(most)
        own = values.gather(1, torch.tensor([[ids[index]] for index in part], device=values.device))[:, 0].tolist()
        for index, logprob, top_ids, top_values in zip(
            part, own, top.indices.tolist(), top.values.tolist(), strict=True
        ):
            count = counts[index] or 0
            result[index] = TokenLogprobs(logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
    return result
