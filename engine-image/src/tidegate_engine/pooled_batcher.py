"""Which pooled requests (embeddings) go to the scheduler together, and when: at a number of tokens, or after a wait.

Pure: the time is an argument. The engine loop owns one; what it takes is then scheduled beside everything else.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tidegate_engine.request import Request

DEFAULT_MAX_TOKENS = 2048
DEFAULT_MAX_WAIT_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class PooledLimits:
    """So many tokens are a batch, and go at once; fewer wait for more, at most so long."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    max_wait_seconds: float = DEFAULT_MAX_WAIT_SECONDS


class PooledBatcher:
    """Holds requests in the order of their arrival."""

    def __init__(self, limits: PooledLimits) -> None:
        self._limits = limits
        self._held: dict[str, Request] = {}
        self._since = 0.0
        self.tokens = 0
        """Of the held requests."""

    @property
    def waiting(self) -> int:
        return len(self._held)

    @property
    def held(self) -> Collection[Request]:
        return self._held.values()

    @property
    def due_at(self) -> float | None:
        """When what is held goes at the latest; None = nothing is held."""
        return self._since + self._limits.max_wait_seconds if self._held else None

    def add(self, request: Request, now: float) -> None:
        if not self._held:
            self._since = now
        self._held[request.id] = request
        self.tokens += request.prompt_tokens

    def remove(self, request_id: str) -> Request | None:
        """Forget a request; returns it, None when it is not held."""
        request = self._held.pop(request_id, None)
        if request is not None:
            self.tokens -= request.prompt_tokens
        return request

    def take(self, now: float) -> list[Request]:
        """Everything that is held, if it goes now."""
        due_at = self.due_at
        if due_at is None or (now < due_at and self.tokens < self._limits.max_tokens):
            return []
        batch = list(self._held.values())
        self._held.clear()
        self.tokens = 0
        return batch
