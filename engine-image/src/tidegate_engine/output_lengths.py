"""How long answers are here: learnt from the requests that ended, to guess what the running ones will still need.

Pure. The scheduler tells each length and asks when it admits; a guess for a request that has come far counts only the
answers that came as far.
"""

MAX_LENGTH_BITS = 24
WINDOW_REQUESTS = 512
"""When so many are remembered, all of them lose half their weight: traffic changes."""
PRIOR_REQUESTS = 8
"""Weight of the assumption that a request takes all it may, in requests."""


class OutputLengths:
    """Weights and sums of lengths in cells of powers of two; `remaining` reads their tails."""

    def __init__(self) -> None:
        self._weights = [0.0] * (MAX_LENGTH_BITS + 1)
        self._sums = [0.0] * (MAX_LENGTH_BITS + 1)
        self._tail_weights = list(self._weights)
        self._tail_sums = list(self._sums)

    @property
    def is_experienced(self) -> bool:
        """Whether anything was learnt."""
        return self._tail_weights[0] > 0

    def learn(self, tokens: int) -> None:
        """A request ended by itself after `tokens` of output."""
        if self._tail_weights[0] >= WINDOW_REQUESTS:
            self._weights = [weight / 2 for weight in self._weights]
            self._sums = [total / 2 for total in self._sums]
        cell = _cell(tokens)
        self._weights[cell] += 1
        self._sums[cell] += tokens
        weight = total = 0.0
        for index in range(MAX_LENGTH_BITS, -1, -1):
            weight += self._weights[index]
            total += self._sums[index]
            self._tail_weights[index] = weight
            self._tail_sums[index] = total

    def remaining(self, output_tokens: int, *, limit: int) -> float:
        """Tokens that are likely still to come after `output_tokens`; `limit` while nothing is known."""
        cell = _cell(output_tokens)
        weight = self._tail_weights[cell]
        if not weight:
            return limit
        learnt = min(limit, max(0.0, self._tail_sums[cell] / weight - output_tokens))
        return (PRIOR_REQUESTS * limit + weight * learnt) / (PRIOR_REQUESTS + weight)


def _cell(tokens: int) -> int:
    return min(tokens.bit_length(), MAX_LENGTH_BITS)
