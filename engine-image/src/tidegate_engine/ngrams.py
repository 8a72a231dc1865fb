"""Guesses at the tokens to come, by prompt lookup: what followed the last few tokens when they stood there before.

Pure, and no model: a guess costs a look-up and a row more in the step that checks it. The scheduler keeps an index for
each decoding request; the sampler accepts what it would have chosen itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_COMPARED = 8
"""Earlier places that are compared for the longest match, the latest first."""


@dataclass(frozen=True, slots=True)
class NgramSpeculation:
    """How far to guess, and how many tokens must have stood there before. Names and defaults are vLLM's."""

    num_speculative_tokens: int
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, not {self.num_speculative_tokens}")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, "
                f"not {self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )


def parse_speculative_config(data: object) -> NgramSpeculation:
    """Read vLLM's `--speculative-config`, as JSON has it; raises ValueError saying what is wrong."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a JSON object was expected, not {data!r}")
    if data.get("method") != "ngram":
        raise ValueError(f"the method is {data.get('method')!r}; supported is 'ngram'")
    if unknown := sorted(set(data) - {"method", *_FIELDS}):
        raise ValueError(f"{', '.join(unknown)} is not known; beside method there are {', '.join(_FIELDS)}")
    values: dict[str, int] = {}
    for name in _FIELDS:
        value = data.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} must be a whole number, not {value!r}")
        values[name] = value
    if "num_speculative_tokens" not in values:
        raise ValueError("num_speculative_tokens is missing: how many tokens to guess at most")
    for name, other in (("prompt_lookup_min", "prompt_lookup_max"), ("prompt_lookup_max", "prompt_lookup_min")):
        if other in values:
            values.setdefault(name, values[other])
    return NgramSpeculation(**values)


_FIELDS = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


class NgramIndex:
    """The known tokens of one request and where each n-gram of them ended last. Grows by one entry a token."""

    __slots__ = ("_before", "_ids", "_last", "_speculation", "limit")

    def __init__(self, speculation: NgramSpeculation, ids: Sequence[int]) -> None:
        self.limit = speculation.num_speculative_tokens
        """Tokens to guess at most now: few after wrong guesses, which cost their rows in vain."""
        self._speculation = speculation
        self._ids: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []
        """For each position, where the n-gram that ends there ended before; 0 = nowhere."""
        self.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        size = self._speculation.prompt_lookup_min
        known, last, before = self._ids, self._last, self._before
        for token_id in ids:
            known.append(token_id)
            end = len(known)
            gram = tuple(known[end - size :]) if end >= size else ()
            before.append(last.get(gram, 0) if gram else 0)
            last[gram] = end

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next; empty where the last tokens stood nowhere before."""
        ids = self._ids
        end = len(ids)
        count = min(most, self.limit)
        place = self._before[-1] if ids else 0
        if count < 1 or not place:
            return []
        best, longest = place, 0
        for _ in range(MAX_COMPARED):
            length = self._match_length(place)
            if length > longest:
                best, longest = place, length
            place = self._before[place - 1]
            if not place or longest == self._speculation.prompt_lookup_max:
                break
        distance = end - best
        # Beyond the known end the guess goes on as it repeats itself.
        return [ids[best + step % distance] for step in range(count)]

    def learn(self, *, proposed: int, accepted: int) -> None:
        """Guess further after a guess that was right throughout, less far after a wrong one."""
        if accepted == proposed:
            self.limit = min(self._speculation.num_speculative_tokens, 2 * proposed)
        else:
            self.limit = max(1, accepted)

    def _match_length(self, place: int) -> int:
        """Tokens before `place` that equal the last ones, `prompt_lookup_max` at most."""
        ids = self._ids
        length = self._speculation.prompt_lookup_min
        limit = min(self._speculation.prompt_lookup_max, place)
        while length < limit and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        return length
