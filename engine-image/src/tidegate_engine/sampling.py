"""Chooses the next tokens from logits: a result depends on its row and seed, never on the batch.

Order: penalties, logit bias, grammar, minimum length, temperature, min-p, top-k, top-p. Randomness is one number a
token, a pure function of seed and position: a preempted request goes on as if nothing had happened, and a drafted token
is right exactly when it is the one that would have been chosen.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tidegate_engine.kernel_sampling import NOTHING, Said, adjustments_of, choice_of, randoms_of
from tidegate_engine.request import Request, SampledToken, SamplingParams, TokenLogprobs
from tidegate_kernels.reference import GREEDY_BELOW, Choice

CANDIDATES = (64, 1024)
"""Most likely tokens that are sorted at first, and then; the whole vocabulary only where top-p reaches beyond them."""
SPAN = 128
"""Tokens that a draw skips at once; the sum of so few is exact enough in single precision."""
LOGITS_AT_ONCE = 1 << 23
"""Logits that random choices are made from at once, and a row at least: bounds the memory that they take."""
MAX_KEPT_TOKENS = 16_384
"""Tokens whose plain result is made once."""
NO_DRAFTS: Mapping[int, Sequence[int]] = {}
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step, made one by one where somebody asks: most are plain."""

    requests: Sequence[Request]
    ahead: Sequence[Sequence[int]] | None
    """The drafts before each; None = no row has any."""

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> Row:
        return Row(self.requests[index], () if self.ahead is None else self.ahead[index])


@dataclass(slots=True)
class _Said:
    """What penalties need to know of a request: its prompt's tokens once each, and counts of the first `output`."""

    prompt: list[int]
    counts: dict[int, int]
    output: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """How tokens are drawn from rows of logits, none of them greedy; made by `rules_of`."""

    temperatures: Tensor
    """`[rows, 1]`, as are the others."""
    min_p: Tensor | None
    """None = no row has any."""
    top_k: Tensor
    """The size of the vocabulary = all."""
    top_p: Tensor
    cut: Sequence[int]
    """Rows of which top-k or top-p leaves a part."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What follows from who has a row in a step, kept while the same have."""

    requests: "Sequence[ref[Request]]"
    """Of each row; not kept alive."""
    changed: Sequence[int]
    """Rows whose logits are not used as they are."""
    delayed: Sequence[int]
    """Rows with a minimum length, which may not be reached."""
    drawn: Sequence[int]
    """Rows that are not greedy."""
    keys: NDArray[np.uint64]
    """Of their random numbers."""
    held: frozenset[int]
    """Rows that a grammar holds."""
    logprobs: Mapping[int, int]
    """By row: how many of the most likely ones are told."""


class Sampler:
    """Chooses tokens for one model. `masks` None = no request has a grammar.

    `kernel`: `choose_tokens` of `Operations`, which penalises and draws all rows in one launch; None = torch does.
    """

    def __init__(
        self,
        *,
        eos_ids: Sequence[int],
        entropy: bytes,
        masks: Masks | None = None,
        kernel: Callable[..., Tensor] | None = None,
    ) -> None:
        self._eos_ids = tuple(eos_ids)
        self._grammar_ends = () if masks is None else tuple(masks.eos_ids)
        self._entropy = entropy
        self._masks = masks
        self._kernel = kernel
        self._choice: Choice | None = None
        """Of the rows of `_batch`, for the kernel; None = not asked for yet."""
        self._said: WeakKeyDictionary[Request, _Said] = WeakKeyDictionary()
        self._batch = self._batch_of(())
        self._rules: dict[tuple[int, ...], Rules] = {}
        """Of rows of `_batch`."""
        self._kept: dict[int, SampledToken] = {}

    def prepare(self, requests: Iterable[Request]) -> None:
        """Begin what can be done while the step is computed."""
        if self._masks is not None:
            self._masks.prepare(requests)

    def sample(
        self, logits: Tensor, requests: Sequence[Request], drafts: Mapping[int, Sequence[int]] = NO_DRAFTS
    ) -> list[SampledToken]:
        """A token for each request, with those after it that its drafts got right.

        `logits` has one row (`[rows, vocab]`) for each request and one more for each of its drafts, which are given by
        the request's place. Whatever fails, fails for its own request.
        """
        try:
            return self._sample(logits, requests, drafts)
        except Exception:
            logger.exception("tokens cannot be chosen together; each request is tried alone")
            float(logits.max())  # a device that is lost fails here again, and with it the step
        results = []
        start = 0
        for place, request in enumerate(requests):
            own = drafts.get(place, ())
            end = start + len(own) + 1
            results.append(self._sample_alone(logits[start:end], request, own))
            start = end
        return results

    def _sample_alone(self, logits: Tensor, request: Request, drafts: Sequence[int]) -> SampledToken:
        try:
            return self._sample(logits, [request], {0: drafts} if drafts else NO_DRAFTS)[0]
        except Exception as error:
            logger.exception("no token can be chosen for %s", request.id)
            return SampledToken(-1, error=f"choosing the token failed: {type(error).__name__}: {error}")

    def _sample(
        self, logits: Tensor, requests: Sequence[Request], drafts: Mapping[int, Sequence[int]]
    ) -> list[SampledToken]:
        if not drafts:
            return self._choose_all(logits.float(), requests, None)
        rows = [
            Row(request, own[:count])
            for place, request in enumerate(requests)
            for own in (drafts.get(place, ()),)
            for count in range(len(own) + 1)
        ]
        tokens = self._choose_all(logits.float(), [row.request for row in rows], [row.drafts for row in rows])
        results = []
        start = 0
        for place in range(len(requests)):
            own = drafts.get(place, ())
            end = start + len(own) + 1
            results.append(_accept(tokens[start:end], own))
            start = end
        return results

    def _choose_all(
        self, logits: Tensor, requests: Sequence[Request], ahead: Sequence[Sequence[int]] | None
    ) -> list[SampledToken]:
        """The token of each row. `ahead`: the drafts before each, None = no row has any."""
        if [request() for request in self._batch.requests] != requests:  # by identity
            self._batch, self._rules, self._choice = self._batch_of(requests), {}, None
        batch = self._batch
        rows = _Rows(requests, ahead)
        choose_all = self._choose_by_torch if self._kernel is None else self._choose_by_kernel
        raw = logits.clone() if batch.logprobs and self._kernel is not None else logits
        ids, replaced = choose_all(logits, rows)
        logprobs = _logprobs(raw, batch.logprobs, ids) if batch.logprobs else {}
        tokens = [self._kept.get(token_id) or self._keep(token_id) for token_id in ids]
        for index, told in logprobs.items():
            tokens[index] = tokens[index]._replace(logprobs=told)
        for index in batch.held:
            if ids[index] in self._grammar_ends:
                tokens[index] = tokens[index]._replace(is_eos=True, is_final=True)
        for index, other in replaced.items():
            tokens[index] = other
        return tokens

    def _choose_by_torch(self, logits: Tensor, rows: _Rows) -> tuple[list[int], dict[int, SampledToken]]:
        """A token id of each row, and what to answer instead of some."""
        batch = self._batch
        highest, greedy = logits.max(dim=-1)
        ids: list[int] = greedy.tolist()
        replaced: dict[int, SampledToken] = {}
        if not math.isfinite(float(highest.sum())):
            finite = highest.isfinite().tolist()
            replaced = {index: NOT_FINITE for index, is_finite in enumerate(finite) if not is_finite}
        adjusted = sorted({*batch.changed, *_delayed(batch, rows)})
        changed: Tensor | None = None
        if adjusted:
            changed = logits[adjusted]
            own = [rows[index] for index in adjusted]
            for index, row in enumerate(own):
                self._penalise(changed[index], row)
            instead = self._mask(changed, own, step_rows=len(rows))
            values, best = changed.max(dim=-1)
            for index, token_id, value, other in zip(adjusted, best.tolist(), values.tolist(), instead, strict=True):
                ids[index] = token_id
                if index in replaced:
                    continue
                if other is not None or not math.isfinite(value):
                    replaced[index] = other or (NONE_LEFT if value == -math.inf else OVERFLOW)
        if batch.drawn:
            points = dict(zip(batch.drawn, _points(batch, rows).tolist(), strict=True))
            drawn = [index for index in batch.drawn if index not in replaced] if replaced else batch.drawn
            at_once = _rows_at_once(logits)
            for start in range(0, len(drawn), at_once):
                part = drawn[start : start + at_once]
                rules = self._rules_of(part, rows, logits)
                chosen = choose(_rows_of(part, logits, adjusted, changed), rules, [points[index] for index in part])
                for index, token_id in zip(part, chosen, strict=True):
                    ids[index] = token_id
        return ids, replaced

    def _choose_by_kernel(self, logits: Tensor, rows: _Rows) -> tuple[list[int], dict[int, SampledToken]]:
        """As `_choose_by_torch`, with all but masks in one launch; `logits` are changed in place."""
        assert self._kernel is not None
        batch, device, params = self._batch, logits.device, [request.params for request in rows.requests]
        highest = logits.amax(dim=-1)
        # Masks go first: what they take away no penalty brings back.
        instead: dict[int, SampledToken] = {}
        masked = sorted({*batch.held, *_delayed(batch, rows)})
        if masked:
            part = logits[masked]
            found = self._mask(part, [rows[index] for index in masked], step_rows=len(rows))
            logits[masked] = part
            instead = {index: other for index, other in zip(masked, found, strict=True) if other is not None}
        penalised = {index: self._said_before(rows[index]) for index in batch.changed}
        if self._choice is None:
            self._choice = choice_of(params, vocab=logits.shape[1], device=device)
        choice = self._choice
        if batch.drawn:
            points = randoms_of(batch.drawn, _points(batch, rows), count=len(rows), device=device)
            choice = replace(choice, randoms=points)
        tokens = self._kernel(logits, choice, adjustments_of(params, penalised, device) if penalised else None)
        chosen, tops = torch.stack((tokens.double(), highest.double())).tolist()  # one copy for both
        ids = [max(0, int(token_id)) for token_id in chosen]
        replaced: dict[int, SampledToken] = {}
        for index, (token_id, top) in enumerate(zip(chosen, tops, strict=True)):
            if not math.isfinite(top):
                replaced[index] = NOT_FINITE
            elif index in instead:
                replaced[index] = instead[index]
            elif token_id < 0:
                replaced[index] = NONE_LEFT if float(logits[index].max()) == -math.inf else OVERFLOW
        return ids, replaced

    def _keep(self, token_id: int) -> SampledToken:
        if len(self._kept) >= MAX_KEPT_TOKENS:
            self._kept.clear()
        token = self._kept[token_id] = SampledToken(token_id, token_id in self._eos_ids)
        return token

    def _batch_of(self, requests: Sequence[Request]) -> _Batch:
        params = [request.params for request in requests]
        changed = [index for index, each in enumerate(params) if not _is_plain(each)]
        drawn = [index for index, each in enumerate(params) if not is_greedy(each)]
        return _Batch(
            requests=[ref(request) for request in requests],
            changed=changed,
            delayed=[index for index, each in enumerate(params) if each.min_tokens],
            drawn=drawn,
            keys=np.array([self._key_of(requests[index]) for index in drawn], np.uint64),
            held=frozenset(index for index, each in enumerate(params) if each.grammar is not None),
            logprobs={index: each.logprobs for index, each in enumerate(params) if each.logprobs is not None},
        )

    def _key_of(self, request: Request) -> int:
        seed = request.params.seed
        return key_of(self._entropy + request.id.encode() if seed is None else b"seed %d" % seed)

    def _rules_of(self, part: Sequence[int], rows: _Rows, logits: Tensor) -> Rules:
        found = self._rules.get(key := tuple(part))
        if found is None:
            params = [rows[index].request.params for index in part]
            found = self._rules[key] = rules_of(params, vocab=logits.shape[1], device=logits.device)
        return found

    def _mask(self, logits: Tensor, rows: Sequence[Row], *, step_rows: int) -> list[SampledToken | None]:
        """Leave of each row, in place, what grammar and minimum length do; returns what to answer instead of a token.

        `step_rows`: how many rows the step has, these and plain ones.
        """
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
        """Apply penalties and biases to one row, in place."""
        params, said = row.request.params, self._said_before(row)
        if params.repetition_penalty != 1:
            seen = list({*said.prompt, *said.counts})
            values = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if said.counts:
            amounts = torch.tensor(list(said.counts.values()), dtype=torch.float32, device=logits.device)
            logits[list(said.counts)] -= params.presence_penalty + params.frequency_penalty * amounts
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            logits[list(ids)] += torch.tensor(biases, device=logits.device)

    def _said_before(self, row: Row) -> Said:
        """What the row's penalties need to know; nothing where it has none."""
        params = row.request.params
        if not (params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1):
            return NOTHING
        said = self._said_by(row.request)
        if not row.drafts:
            return Said(said.prompt, said.counts)
        counts = dict(said.counts)
        _count(row.drafts, counts)
        return Said(said.prompt, counts)

    def _said_by(self, request: Request) -> _Said:
        said = self._said.get(request)
        if said is None:
            prompt = list(set(request.prompt_ids)) if request.params.repetition_penalty != 1 else []
            said = self._said[request] = _Said(prompt, {})
        _count(request.output_ids[said.output :], said.counts)
        said.output = len(request.output_ids)
        return said


def _delayed(batch: _Batch, rows: _Rows) -> list[int]:
    """Rows whose minimum length is not reached."""
    return [index for index in batch.delayed if rows[index].output_tokens < rows[index].request.params.min_tokens]


def _points(batch: _Batch, rows: _Rows) -> NDArray[np.float64]:
    """The random numbers of the rows that draw."""
    return uniforms(batch.keys, np.array([rows[index].output_tokens for index in batch.drawn]))


def _rows_at_once(logits: Tensor) -> int:
    return max(1, LOGITS_AT_ONCE // logits.shape[1])


def _rows_of(part: Sequence[int], logits: Tensor, adjusted: Sequence[int], changed: Tensor | None) -> Tensor:
    """A copy of the rows `part`, each as it was adjusted."""
    rows = logits[part]
    if changed is not None:
        place_of = {index: place for place, index in enumerate(adjusted)}
        if moved := [at for at, index in enumerate(part) if index in place_of]:
            rows[moved] = changed[[place_of[part[at]] for at in moved]]
    return rows


def key_of(seed: bytes) -> int:
    """Of the sequence of random numbers that a seed stands for."""
    return int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "big")


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each key its number at a position, in [0, 1): that of SplitMix64, which was begun with the key."""
    mixed = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: NDArray[np.float64] = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) / float(1 << 53)
    return found


def is_greedy(params: SamplingParams) -> bool:
    """Only the most likely token can be chosen."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1


def _is_plain(params: SamplingParams) -> bool:
    """The logits are used as they are, once the minimum length is reached."""
    return (
        params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and not params.logit_bias
        and params.grammar is None
    )


def rules_of(params: Sequence[SamplingParams], *, vocab: int, device: torch.device) -> Rules:
    """What `choose` needs to know of rows with such parameters."""
    top_k = [row.top_k if 0 < row.top_k < vocab else vocab for row in params]
    return Rules(
        temperatures=torch.tensor([[row.temperature] for row in params], device=device),
        min_p=torch.tensor([[row.min_p] for row in params], device=device)
        if any(row.min_p for row in params)
        else None,
        top_k=torch.tensor([[most] for most in top_k], device=device),
        top_p=torch.tensor([[row.top_p] for row in params], dtype=torch.float64, device=device),
        cut=[index for index, row in enumerate(params) if top_k[index] < vocab or row.top_p < 1],
    )


def choose(logits: Tensor, rules: Rules, randoms: Sequence[float]) -> list[int]:
    """The token of each row that its number in [0, 1) falls on among those that its rules leave.

    `logits` fp32 `[rows, vocab]`, changed in place. Rows do not influence each other.
    """
    weights = logits.sub_(logits.amax(-1, keepdim=True)).div_(rules.temperatures).exp_()  # the largest is 1
    if rules.min_p is not None:
        weights.masked_fill_(weights < rules.min_p, 0)
    points = torch.tensor(randoms, dtype=torch.float64, device=logits.device)
    vocab, cut = weights.shape[1], rules.cut
    if not cut:
        chosen: list[int] = _draw(weights, points).tolist()
        return chosen
    ids = [0] * len(randoms)
    free = sorted(set(range(len(randoms))).difference(cut))
    if free:
        for index, token_id in zip(free, _draw(weights[free], points[free]).tolist(), strict=True):
            ids[index] = token_id
    for size in (*(size for size in CANDIDATES if size < vocab), vocab):
        found = _draw_among(weights[cut], points[cut], rules.top_k[cut], rules.top_p[cut], size=size)
        for index, token_id in zip(cut, found, strict=True):
            if token_id is not None:
                ids[index] = token_id
        cut = [index for index, token_id in zip(cut, found, strict=True) if token_id is None]
        if not cut:
            break
    return ids


def _draw_among(weights: Tensor, points: Tensor, top_k: Tensor, top_p: Tensor, *, size: int) -> list[int | None]:
    """Draw by top-k and top-p among the `size` most likely; None where more of them have to be known."""
    device, vocab = weights.device, weights.shape[1]
    values, token_ids = weights.topk(size)
    kept = values.double()
    kept[torch.arange(size, device=device) >= top_k] = 0
    ends = kept.cumsum(-1)
    total = torch.where(top_k < vocab, ends[:, -1:], _span_sums(weights)[1].sum(-1, keepdim=True))
    limit = top_p * total
    is_enough = (top_k <= size) | ((top_k == vocab) & (ends[:, -1:] >= limit)) | (size == vocab)
    kept[:, 1:][ends[:, :-1] >= limit] = 0
    # In the order of their numbers, as where nothing is cut.
    token_ids, order = token_ids.sort(dim=-1)
    chosen = token_ids.gather(1, _draw(kept.gather(1, order), points)[:, None])[:, 0].tolist()
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


def _logprobs(logits: Tensor, counts: Mapping[int, int], ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    """By row of `counts`: log probabilities as the model gave them, before penalties and temperature."""
    result: dict[int, TokenLogprobs] = {}
    wanted, at_once = list(counts), _rows_at_once(logits)
    for start in range(0, len(wanted), at_once):
        part = wanted[start : start + at_once]
        values = torch.log_softmax(logits[part], dim=-1)
        most = min(max(counts[index] for index in part), values.shape[1])
        top = values.topk(most)
        own = values.gather(1, torch.tensor([[ids[index]] for index in part], device=values.device))[:, 0].tolist()
        for index, logprob, top_ids, top_values in zip(
            part, own, top.indices.tolist(), top.values.tolist(), strict=True
        ):
            count = counts[index]
            result[index] = TokenLogprobs(logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
    return result
