"""Which tokens continue a request's grammar: llguidance's matchers, compiled beside a step, freed with their request.

Satisfies `sampling.Masks`; called from the engine loop's thread. Checking what a client sends is `structured`'s: a
grammar that comes here has been compiled once already.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import llguidance
import torch
from torch import Tensor

from tidegate_engine.request import Request
from tidegate_engine.sampling import Row

MAX_VOCABULARY = 1 << 20
MAX_COMPILED = 64
"""Grammars kept for requests that bring the same again."""


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
    error: str | None = None


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
        self._eos_ids = list(vocabulary.eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._executor = llguidance.LLExecutor(num_threads=threads)
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        self._held: WeakKeyDictionary[Request, _Held] = WeakKeyDictionary()

    def prepare(self, requests: Iterable[Request]) -> None:
        """Begin to compile what is new, so that it is ready when the prompts have been computed."""
        for request in requests:
            if request.params.grammar is not None and request not in self._held:
                self._compile(request.params.grammar)

    def allowed(self, rows: Sequence[Row]) -> tuple[Tensor, list[str | None]]:
        """`[rows, vocabulary]`, true for a token that continues the row's grammar, and what is wrong with which row.

        The rows of a request follow each other, the one without drafts first.
        """
        held = [self._advance(row.request) for row in rows]
        plain: list[tuple[llguidance.LLMatcher, int]] = []
        drafted: dict[int, tuple[llguidance.LLMatcher, int, list[int]]] = {}
        first = 0
        for index, (row, state) in enumerate(zip(rows, held, strict=True)):
            if not row.drafts:
                first = index
                if state.error is None:
                    plain.append((state.matcher, index))
            elif state.error is None:
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
        places = torch.arange(8, dtype=torch.uint8)
        mask = ((bits.view(torch.uint8)[:, :, None] >> places) & 1).bool().view(len(rows), -1)
        return mask[:, : self._vocabulary.vocab_size], [_error_of(state) for state in held]

    def _advance(self, request: Request) -> _Held:
        """The request's matcher after all its output."""
        held = self._held.get(request)
        if held is None:
            assert request.params.grammar is not None
            held = self._held[request] = _Held(self._compile(request.params.grammar).result().deep_copy())
        fresh = request.output_ids[held.consumed :]
        if fresh and held.error is None:
            held.matcher.consume_tokens(fresh)
            held.consumed += len(fresh)
        held.error = _error_of(held)
        return held

    def _compile(self, grammar: str) -> "Future[llguidance.LLMatcher]":
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._compiler.submit(self._new_matcher, grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return future

    def _new_matcher(self, grammar: str) -> llguidance.LLMatcher:
        """On the compiler's only thread, which also builds the tokenizer's trie on first use."""
        if self._tokenizer is None:
            table = _Table(self._vocabulary, self._eos_ids)
            self._tokenizer = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(table), n_vocab=self._vocabulary.vocab_size, eos_token=self._eos_ids
            )
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)


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


def _error_of(held: _Held) -> str | None:
    if held.error is None and held.matcher.is_error():
        return f"the answer's grammar failed: {held.matcher.get_error().partition(chr(10))[0][:300]}"
    return held.error
