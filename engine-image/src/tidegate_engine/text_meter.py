"""How much text became how many tokens, and how long that took: counted by the tokenizers, shown by the metrics.

Texts are encoded on the event loop and, long ones, in threads beside it.
"""

from threading import Lock


class TextMeter:
    """Sums over all texts that were encoded."""

    def __init__(self) -> None:
        self.characters = 0
        self.tokens = 0
        self.seconds = 0.0
        self._lock = Lock()

    def add(self, *, characters: int, tokens: int, seconds: float) -> None:
        with self._lock:
            self.characters += characters
            self.tokens += tokens
            self.seconds += seconds
