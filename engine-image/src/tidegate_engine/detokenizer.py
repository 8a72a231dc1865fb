"""Text out of tokens as they come: incremental UTF-8, and stop strings that may lie across tokens.

A state machine per answer; the text it releases does not depend on how the tokens were grouped. It knows bytes, not
vocabularies: its caller (`completions`) maps ids to bytes.
"""

from codecs import getincrementaldecoder

_new_decoder = getincrementaldecoder("utf-8")


class Detokenizer:
    """Feed bytes, get the text that is safe to show. Text that could begin a stop string is held back.

    The stop string that ends first wins; of those that end together, the longest.
    """

    __slots__ = ("_decoder", "_held", "_include_stop", "_stops", "matched_stop")

    def __init__(self, stops: tuple[str, ...] = (), *, include_stop: bool = False) -> None:
        self._decoder = _new_decoder("replace")
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self.matched_stop: str | None = None
        """The stop string that ended the text; no more text comes after it."""

    def push(self, data: bytes, *, may_stop: bool = True) -> str:
        """Release what is certain after `data`. With `may_stop` false stop strings in it are plain text."""
        if self.matched_stop is not None:
            return ""
        return self._release(self._decoder.decode(data), may_stop=may_stop)

    def finish(self) -> str:
        """The rest at the end of the answer: text held back, and an incomplete character as U+FFFD."""
        if self.matched_stop is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True), may_stop=True)
        text, self._held = text + self._held, ""
        return text

    def _release(self, new: str, *, may_stop: bool) -> str:
        if not self._stops:
            return new
        text = self._held + new
        if not may_stop:
            self._held = ""
            return text
        if found := self._find_stop(text):
            start, stop = found
            self.matched_stop = stop
            self._held = ""
            return text[: start + len(stop)] if self._include_stop else text[:start]
        keep = self._possible_stop_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_stop_length(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string may begin."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
