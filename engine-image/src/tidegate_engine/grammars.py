"""Which tokens continue a request's grammar: llguidance's matchers, compiled beside a step, freed with their request.

Satisfies `sampling.Masks`; called from the engine loop's thread. Checking what a client sends is `structured`'s: a
grammar that comes here has been compiled once already.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import llguidance
import torch
from torch import Tensor

from tidegate_engine.request import Request, SampledToken
from tidegate_engine.sampling import Row

MAX_VOCABULARY = 1 << 20
MAX_COMPILED = 64
"""Grammars kept for requests that bring the same again."""
PATIENCE_SECONDS = 0.02
"""How long a step that has nothing else waits for grammars that are being compiled; then the next one does."""
DEFERRED = SampledToken(-1, is_deferred=True)


class Vocabulary(Protocol):
    """What is needed of a tokenizer: its tokens' bytes, empty for special tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)
class _Held:
    """A request's matcher, and how many of its output tokens that has taken."""

    matcher: llguidance.LLMatcher
    consumed: int = 0


class Grammars:
    """The matchers of the live requests that have a grammar."""

    @classmethod
    def of(cls, vocabulary: Vocabulary, *, threads: int) -> "Grammars | None":
        """None for a vocabulary that grammars cannot do with: no token ends a text, or there are too many."""
        if not vocabulary.eos_token_ids or vocabulary.vocab_size > MAX_VOCABULARY:
            return None
        return cls(vocabulary, threads=threads)

    def __init__(self, vocabulary: Vocabulary, *, threads: int) -> None:
        self._vocabulary = vocabulary
        self.eos_ids = tuple(vocabulary.eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._executor = llguidance.LLExecutor(num_threads=threads)
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        self._pending: WeakKeyDictionary[Request, Future[llguidance.LLMatcher]] = WeakKeyDictionary()
        self._held: WeakKeyDictionary[Request, _Held] = WeakKeyDictionary()

    def prepare(self, requests: Iterable[Request]) -> None:
        """Begin to compile what is new, so that it is ready when the prompts have been computed."""
        for request in requests:
            if request.params.grammar is not None and request not in self._held:
                self._compile(request, request.params.grammar)

    def allowed(self, rows: Sequence[Row], *, may_wait: bool) -> tuple[Tensor, list[SampledToken | None]]:
        """`[rows, vocabulary]`, true for a token that continues the row's grammar; and what to answer instead.

        The rows of a request follow each other, the one without drafts first.
        """
        if may_wait:
            self._wait([row.request for row in rows])
        held = [self._advance(row.request) for row in rows]
        plain: list[tuple[llguidance.LLMatcher, int]] = []
        drafted: dict[int, tuple[llguidance.LLMatcher, int, list[int]]] = {}
        first = 0
        for index, (row, state) in enumerate(zip(rows, held, strict=True)):
            if not row.drafts:
                first = index
                if isinstance(state, _Held):
                    plain.append((state.matcher, index))
            elif isinstance(state, _Held):
                drafted[first] = (state.matcher, first, list(row.drafts))
        plain = [work for work in plain if work[1] not in drafted]
        words = -(-self._vocabulary.vocab_size // 32)
        # All ones where nothing is computed: rows after a draft that is wrong, which nobody looks at.
        bits = torch.full((len(rows), words), -1, dtype=torch.int32)
        sizes = words * 4, len(rows)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, bits.data_ptr(), *sizes)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token([*drafted.values()], bits.data_ptr(), *sizes)
        # A matcher that gives up while it computes allows the answer's end only, which would look like a whole answer.
        instead = [(_failure_of(state.matcher) if isinstance(state, _Held) else state) for state in held]
        places = torch.arange(8, dtype=torch.uint8)
        mask = ((bits.view(torch.uint8)[:, :, None] >> places) & 1).bool().view(len(rows), -1)
        return mask[:, : self._vocabulary.vocab_size], instead

    def _wait(self, requests: Sequence[Request]) -> None:
        """A short while, until one of them has its grammar."""
        if not any(request in self._held for request in requests):
            wait(
                [self._compile(request, request.params.grammar or "") for request in requests],
                PATIENCE_SECONDS,
                FIRST_COMPLETED,
            )

    def _advance(self, request: Request) -> "_Held | SampledToken":
        """The request's matcher after all its output; what to answer instead, where it is not ready or has failed."""
        held = self._held.get(request)
        if held is None:
            assert request.params.grammar is not None
            compiled = self._compile(request, request.params.grammar)
            if not compiled.done():
                return DEFERRED
            held = self._held[request] = _Held(compiled.result().deep_copy())
            del self._pending[request]
        if fresh := request.output_ids[held.consumed :]:
            held.matcher.consume_tokens(fresh)
            held.consumed += len(fresh)
        return _failure_of(held.matcher) or held

    def _compile(self, request: Request, grammar: str) -> "Future[llguidance.LLMatcher]":
        """The request keeps what it waits for, whatever is forgotten meanwhile."""
        future = self._pending.get(request)
        if future is not None:
            return future
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._compiler.submit(self._new_matcher, grammar)
            self._forget()
        self._compiled.move_to_end(grammar)
        self._pending[request] = future
        return future

    def _forget(self) -> None:
        """Drop the compiled grammars that were not wanted for longest, when there are too many."""
        excess = len(self._compiled) - MAX_COMPILED
        if excess > 0:
            done = [grammar for grammar, future in self._compiled.items() if future.done()]
            for grammar in done[:excess]:
                del self._compiled[grammar]

    def _new_matcher(self, grammar: str) -> llguidance.LLMatcher:
        """On the compiler's only thread, which also builds the tokenizer's trie on first use."""
        if self._tokenizer is None:
            table = _Table(self._vocabulary, self.eos_ids)
            self._tokenizer = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(table), n_vocab=self._vocabulary.vocab_size, eos_token=[*self.eos_ids]
            )
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)


def _failure_of(matcher: llguidance.LLMatcher) -> SampledToken | None:
    if not matcher.is_error():
        return None
    reason = matcher.get_error().partition("\n")[0][:300]
    return SampledToken(-1, error=f"the answer's grammar failed: {reason}")


class _Table:
    """A tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = eos_ids[0]
        tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.vocab_size)]
        self.special_token_ids = sorted({*eos_ids, *(index for index, data in enumerate(tokens) if not data)})
        for token_id in self.special_token_ids:
            tokens[token_id] = b"<|special %d|>" % token_id  # each needs a name of its own, which no text matches
        self.tokens = tokens

    def __call__(self, text: str | bytes) -> list[int]:
        readable = text if isinstance(text, str) else text.decode(errors="replace")
        return [token_id for token_id in self._vocabulary.encode(readable) if self._vocabulary.token_bytes(token_id)]
