"""Tool calls in a model's text: which formats are known, how to recognise one, and the parser that takes them out.

Text comes as it is generated; what the parser gives does not depend on how it was cut. A call is shown when it is
whole, so that a malformed one can still end as plain text. Pure; called by `completions`.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

MAX_HEADER_CHARACTERS = 160
"""Between the mark of a call and its JSON: white space, or a name."""
MAX_DEPTH = 64
"""Nesting of a call's JSON; deeper is no call."""
_OUTSIDE_STRINGS = frozenset('{}[]:,"-+.0123456789eE \t\r\ntrufalsn')
"""Every character that JSON has outside its strings: another one ends the hope for a call at once."""
_HEADER = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.:/[] \t\r\n")
_NAMED_HEADER = re.compile(r"\s*([\w.:/-]+?)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the client sees it; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls."""

    name: str
    mark: str
    """Stands before a call. Often a special token."""
    end: str = ""
    """Stands after a call; may be missing at the end of the answer."""
    separator: str = ""
    """Stands between two calls that share a mark."""
    opens_bare: bool = False
    """An answer that begins with a JSON object is a call, too."""
    names_before: bool = False
    """The name may stand before the arguments, and calls may come as a JSON list."""
    id_characters: int = 24
    argument_keys: tuple[str, ...] = ("arguments", "parameters")

    @property
    def marks(self) -> tuple[str, ...]:
        """Everything that a model may write as a special token."""
        before = ("[ARGS]", "[CALL_ID]") if self.names_before else ()
        return tuple(mark for mark in (self.mark, self.end, *before) if mark)


HERMES = ToolFormat("hermes", "<tool_call>", end="</tool_call>")
LLAMA3_JSON = ToolFormat(
    "llama3_json", "<|python_tag|>", separator=";", opens_bare=True, argument_keys=("parameters", "arguments")
)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", names_before=True, id_characters=9)
FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
}
"""By the names that users type."""


def recognise_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches; None when it teaches none that is known."""
    if template is None or "tools" not in template:
        return None
    for tool_format in (HERMES, MISTRAL, LLAMA3_JSON):
        if tool_format.mark in template:
            return tool_format
    # Llama 3's templates describe the call in words.
    return LLAMA3_JSON if '"parameters"' in template and "ipython" in template else None


class _NoCall(Exception):
    """What looked like a call is none."""


@dataclass(slots=True)
class _JsonScanner:
    """Finds the end of a JSON value as it comes; remembers how far it has looked."""

    position: int
    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def find_end(self, text: str) -> int | None:
        """Index after the value, None while it is not whole; raises _NoCall for what JSON cannot be."""
        while self.position < len(text):
            character = text[self.position]
            self.position += 1
            if self.in_string:
                if self.escaped:
                    self.escaped = False
                elif character == "\\":
                    self.escaped = True
                elif character == '"':
                    self.in_string = False
            elif character not in _OUTSIDE_STRINGS:
                raise _NoCall
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
                if self.depth > MAX_DEPTH:
                    raise _NoCall
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return self.position
        return None


@dataclass(slots=True)
class _Open:
    """A call that has begun: places in the parser's text."""

    mark_start: int
    body_start: int
    is_bare: bool
    value_start: int | None = None
    scanner: _JsonScanner = field(default_factory=lambda: _JsonScanner(0))


Part = str | ToolCall


class ToolCallParser:
    """Feed text, get text and calls in their order. Only calls of the offered `names` are calls."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        self._format = tool_format
        self._names = frozenset(names)
        self._text = ""
        self._open: _Open | None = None
        self._at_start = True
        """Nothing but white space has come, so a bare object would be a call."""
        self._after_call = False
        """A call has ended; its end mark or a separator may come."""
        self._skips_space = False
        self.calls = 0

    def push(self, text: str) -> list[Part]:
        self._text += text
        return _joined(self._parts(is_final=False))

    def finish(self) -> list[Part]:
        """The rest at the end of the answer; an unfinished call is text."""
        return _joined(self._parts(is_final=True))

    def _parts(self, *, is_final: bool) -> Iterator[Part]:
        while self._text:
            before = self._progress()
            try:
                yield from self._advance(is_final=is_final)
            except _NoCall:
                yield self._give_up()
            if self._progress() == before:
                break
        if is_final and self._text:
            rest, self._text = self._text, ""
            if not (self.calls and rest.isspace()):
                yield rest

    def _progress(self) -> tuple[int, bool, bool, bool]:
        return len(self._text), self._open is None, self._after_call, self._skips_space

    def _advance(self, *, is_final: bool) -> Iterator[Part]:
        if self._open is not None:
            yield from self._read_call(self._open, is_final=is_final)
        elif self._after_call:
            self._skip_end(is_final=is_final)
        elif self._skips_space:
            self._text = self._text.lstrip()
            self._skips_space = not self._text
        else:
            yield from self._read_text(is_final=is_final)

    def _read_text(self, *, is_final: bool) -> Iterator[Part]:
        """Release text until a call begins; what could begin one, and white space before it, is held."""
        text, mark = self._text, self._format.mark
        stripped = text.lstrip()
        if self._at_start and self._format.opens_bare and stripped.startswith("{"):
            start = len(text) - len(stripped)
            self._open = _Open(mark_start=0, body_start=start, is_bare=True)
            return
        found = text.find(mark)
        if found >= 0:
            head = text[:found].rstrip()
            self._text = text[len(head) :]
            self._open = _Open(0, found - len(head) + len(mark), is_bare=False)
            if head:
                self._at_start = False
                yield head
            return
        if is_final:
            return
        keep = overlap(text, mark)
        head = text[: len(text) - keep].rstrip()
        self._text = text[len(head) :]
        if head:
            self._at_start = False
            yield head

    def _read_call(self, opened: _Open, *, is_final: bool) -> Iterator[Part]:
        if opened.value_start is None:
            opened.value_start = self._find_value(opened)
            if opened.value_start is None:
                if is_final:
                    raise _NoCall
                return
            opened.scanner.position = opened.value_start
        end = opened.scanner.find_end(self._text)
        if end is None:
            if is_final:
                raise _NoCall
            return
        header = self._text[opened.body_start : opened.value_start]
        calls = self._calls(header, self._text[opened.value_start : end])
        self._text = self._text[end:]
        self._open, self._at_start, self._after_call = None, False, True
        self.calls += len(calls)
        yield from calls

    def _find_value(self, opened: _Open) -> int | None:
        """Where the JSON of the call begins; None while that is open, raises _NoCall when it cannot begin any more."""
        names_before = self._format.names_before
        for place in range(opened.body_start, len(self._text)):
            character = self._text[place]
            header = self._text[opened.body_start : place]
            if character == "{" or (character == "[" and names_before and not header.strip()):
                if header.strip() and not (names_before and _NAMED_HEADER.fullmatch(header)):
                    raise _NoCall
                return place
            is_allowed = character in _HEADER if names_before else character.isspace()
            if not is_allowed or len(header) >= MAX_HEADER_CHARACTERS:
                raise _NoCall
        return None

    def _calls(self, header: str, value: str) -> list[ToolCall]:
        try:
            data = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise _NoCall from error
        named = _NAMED_HEADER.fullmatch(header) if header.strip() else None
        if named is not None:
            return [self._call(named[1], data)]
        rows = data if isinstance(data, list) else [data]
        if not rows:
            raise _NoCall
        calls = []
        for row in rows:
            if not isinstance(row, dict):
                raise _NoCall
            keys = [key for key in self._format.argument_keys if key in row]
            calls.append(self._call(row.get("name"), row[keys[0]] if keys else {}))
        return calls

    def _call(self, name: object, arguments: object) -> ToolCall:
        if isinstance(arguments, str):  # some models write the arguments as text
            try:
                arguments = json.loads(arguments, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise _NoCall from error
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            raise _NoCall
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (ValueError, RecursionError) as error:
            # Half of a surrogate pair, and a number too large for a float, cannot be sent.
            raise _NoCall from error
        return ToolCall(_new_id(self._format.id_characters), name, text)

    def _give_up(self) -> str:
        """The mark is text after all; what stands behind it is looked at again."""
        opened = self._open
        assert opened is not None
        end = opened.body_start + 1 if opened.is_bare else opened.body_start
        text, self._text = self._text[:end], self._text[end:]
        self._open, self._at_start = None, False
        return text

    def _skip_end(self, *, is_final: bool) -> None:
        """Drop what only closes the call before, and open the next one behind a separator."""
        stripped = self._text.lstrip()
        end, separator = self._format.end, self._format.separator
        if end and stripped.startswith(end):
            self._text, self._after_call, self._skips_space = stripped[len(end) :], False, True
            return
        if separator and stripped.startswith(separator):
            following = stripped[len(separator) :].lstrip()
            if following.startswith("{"):
                self._text, self._after_call = stripped, False
                self._open = _Open(0, len(stripped) - len(following), is_bare=True)
                return
            is_open = not following
        else:
            is_open = not stripped or bool(end and end.startswith(stripped))
        if is_open and not is_final:
            return
        self._text, self._after_call = stripped, False


def _joined(parts: Iterator[Part]) -> list[Part]:
    """Neighbouring texts as one."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part:
            joined.append(part)
    return joined


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` with which the mark may begin."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _new_id(characters: int) -> str:
    """Mistral's templates want nine letters and digits; others take what OpenAI has."""
    return secrets.token_hex(5)[:9] if characters == 9 else "call_" + secrets.token_hex(characters // 2)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
