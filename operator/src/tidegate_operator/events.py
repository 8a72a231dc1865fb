"""How many Events an object may get: a token bucket each, so that a flapping condition cannot flood the cluster.

Pure. Asked by `reconcile`; what is worth an Event stands in `status`.
"""

from tidegate_operator.resources import Key

BURST = 25
SECONDS_PER_EVENT = 300.0


class EventBudget:
    """Invariant: an object has between 0 and `BURST` Events left."""

    def __init__(self) -> None:
        self._left: dict[Key, tuple[float, float]] = {}

    def allows(self, key: Key, now: float) -> bool:
        """Take one Event from the object's budget; False when it is used up."""
        left, at = self._left.get(key, (float(BURST), now))
        left = min(float(BURST), left + max(0.0, now - at) / SECONDS_PER_EVENT)
        if left < 1.0:
            self._left[key] = (left, now)
            return False
        self._left[key] = (left - 1.0, now)
        return True

    def forget(self, key: Key) -> None:
        self._left.pop(key, None)
