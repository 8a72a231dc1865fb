"""What a model thinks before it answers: the known formats, and the parser that takes thoughts out of the text.

Text comes as it is generated; what the parser gives does not depend on how it was cut. Thoughts that never end are
thoughts. Pure; called by `completions`, before calls of tools are looked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from tidegate_engine.tool_calls import overlap


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its thoughts."""

    start: str = "<think>"
    end: str = "</think>"
    always_thinks: bool = False
    """The answer begins with a thought also where neither prompt nor answer has the mark."""

    @property
    def marks(self) -> tuple[str, str]:
        return self.start, self.end


_THINK = ReasoningFormat()
FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(always_thinks=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "qwen3": _THINK,
}
"""By vLLM's names."""


class _State(Enum):
    UNDECIDED = auto()
    """The start's mark may come."""
    OPENING = auto()
    """A thought, before which the mark may still come."""
    THINKING = auto()
    THOUGHT = auto()
    """White space between the thought and the answer."""
    ANSWERING = auto()


class ReasoningParser:
    """Feed text, get thoughts and answer. White space around the thoughts is in neither.

    `prompt_end` is the prompt's last text: a template may have opened the thought there, or closed an empty one.
    """

    __slots__ = ("_format", "_has_thought", "_held", "_state")

    def __init__(self, reasoning_format: ReasoningFormat, *, prompt_end: str = "") -> None:
        self._format = reasoning_format
        self._held = ""
        self._has_thought = False
        stripped = prompt_end.rstrip()
        if stripped.endswith(reasoning_format.end):
            self._state = _State.ANSWERING
        elif stripped.endswith(reasoning_format.start) or reasoning_format.always_thinks:
            self._state = _State.OPENING
        else:
            self._state = _State.UNDECIDED

    @property
    def is_thinking(self) -> bool:
        return self._state in (_State.OPENING, _State.THINKING)

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that are certain after `text`."""
        self._held += text
        self._open()
        thoughts = self._think() if self._state is _State.THINKING else ""
        if self._state is _State.THOUGHT:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.ANSWERING
        answer = ""
        if self._state is _State.ANSWERING:
            answer, self._held = self._held, ""
        return thoughts, answer

    def finish(self) -> tuple[str, str]:
        """The rest at the end of the answer."""
        rest, self._held = self._held, ""
        if self._state is _State.UNDECIDED:
            return "", rest
        return (rest.strip() if not self._has_thought else rest.rstrip(), "") if self.is_thinking else ("", "")

    def _open(self) -> None:
        """Find out whether a thought begins."""
        if self._state not in (_State.UNDECIDED, _State.OPENING):
            return
        stripped, start = self._held.lstrip(), self._format.start
        if stripped.startswith(start):
            self._state, self._held = _State.THINKING, stripped[len(start) :]
        elif not start.startswith(stripped):
            self._state = _State.ANSWERING if self._state is _State.UNDECIDED else _State.THINKING

    def _think(self) -> str:
        end = self._format.end
        if not self._has_thought:
            self._held = self._held.lstrip()
        place = self._held.find(end)
        if place >= 0:
            thoughts, self._held = self._held[:place].rstrip(), self._held[place + len(end) :]
            self._state = _State.THOUGHT
            return thoughts
        # What could begin the mark is held, and white space before it.
        thoughts = self._held[: len(self._held) - overlap(self._held, end)].rstrip()
        self._held = self._held[len(thoughts) :]
        self._has_thought = self._has_thought or bool(thoughts)
        return thoughts
