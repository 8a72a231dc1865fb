"""OpenAI's Responses API in its basic form: text and function calls, one answer, nothing stored.

A call becomes a chat call; this module owns only the shapes of `/v1/responses` and the order of its events. Called by
`server`.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from tidegate_engine.context import ContextPolicy
from tidegate_engine.openai import (
    MAX_PARTS,
    MAX_TOOLS,
    ApiError,
    ChatCall,
    Delta,
    Ending,
    Parts,
    TextPart,
    Usage,
    entries_up_to,
    validated,
)
from tidegate_engine.structured import JsonObject
from tidegate_engine.tool_calls import ToolCall

MAX_ITEMS = 4096
MAX_METADATA = 16


class MessageItem(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class CallItem(BaseModel):
    """A call that the model made."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(BaseModel):
    """What a call gave."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ThoughtPart(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning_text"]
    text: str


class ThoughtItem(BaseModel):
    """What the model thought."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]
    content: Annotated[list[ThoughtPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class ReasoningOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None


class NamedTool(BaseModel):
    type: Literal["function"]
    name: str


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    definition: JsonObject | None = Field(None, alias="schema")


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format: TextFormat | None = None


Item = MessageItem | CallItem | CallOutputItem | ThoughtItem


class ResponseCall(BaseModel):
    """Body of `POST /v1/responses`."""

    model_config = ConfigDict(extra="ignore")

    model: str
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_policy: ContextPolicy | None = None
    previous_response_id: str | None = None
    background: bool | None = False
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA), entries_up_to(MAX_METADATA)] | None = None

    def as_chat(self) -> ChatCall:
        """The same question to the chat API; raises ApiError."""
        for name in ("previous_response_id", "background"):
            if getattr(self, name):
                message = f"{name} is not supported: no response is stored here; send the whole conversation as input"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        data: dict[str, object] = {
            "model": self.model,
            "messages": self._messages(),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "context_policy": self._policy(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": self._tools(),
            "tool_choice": self._tool_choice(),
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        return validated(ChatCall, data)

    def _policy(self) -> ContextPolicy | None:
        if self.context_policy is None and self.truncation == "auto":
            return ContextPolicy.TRUNCATE_LEFT
        return self.context_policy

    def _tools(self) -> list[dict[str, object]] | None:
        if self.tools is None:
            return None
        return [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]

    def _tool_choice(self) -> object:
        if isinstance(self.tool_choice, NamedTool):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def _response_format(self) -> dict[str, object] | None:
        chosen = self.text.format if self.text is not None else None
        if chosen is None or chosen.type == "text":
            return None
        if chosen.type == "json_object":
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": chosen.name, "schema": chosen.definition or {}}}

    def _messages(self) -> list[dict[str, object]]:
        messages: list[dict[str, object]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thoughts: str | None = None
        for item in self.input:
            if isinstance(item, ThoughtItem):
                thoughts = "".join(part.text for part in item.content or ()) or None
            elif isinstance(item, MessageItem):
                messages.append({"role": item.role, "content": _text(item.content)})
                if item.role == "assistant":
                    messages[-1]["reasoning"], thoughts = thoughts, None
            elif isinstance(item, CallOutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            else:
                function = {"name": item.name, "arguments": item.arguments}
                call: dict[str, object] = {"id": item.call_id, "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": "", "reasoning": thoughts})
                    thoughts = None
                calls = messages[-1].setdefault("tool_calls", [])
                assert isinstance(calls, list)
                calls.append(call)
        return messages


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


@dataclass(slots=True)
class _Item:
    """An item of the output in the making."""

    id: str
    call: ToolCall | None = None
    text: str = ""
    is_thought: bool = False

    def as_dict(self, status: str) -> dict[str, object]:
        if self.call is not None:
            return {
                "type": "function_call",
                "id": self.id,
                "call_id": self.call.id,
                "name": self.call.name,
                "arguments": self.call.arguments if status == "completed" else "",
                "status": status,
            }
        if self.is_thought:
            content = [] if status == "in_progress" else [_thought_part(self.text)]
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {
            "type": "message",
            "id": self.id,
            "role": "assistant",
            "status": status,
            "content": [] if status == "in_progress" else [_part(self.text)],
        }


@dataclass(slots=True)
class ResponseWire:
    """The answer of one call, whole or as events."""

    call: ResponseCall
    id: str = field(default_factory=lambda: "resp_" + uuid.uuid4().hex)
    created: float = field(default_factory=lambda: int(time.time()))
    media_type: str = "text/event-stream"
    _items: list[_Item] = field(default_factory=list)
    _sequence: int = 0
    _has_open_text: bool = False
    """Whether the last item, a message or a thought, may get more text."""
    _finish_reason: str | None = None

    def answer(self, choices: Sequence[Delta], ending: Ending) -> dict[str, object]:
        choice = choices[0]
        self._finish_reason = choice.finish_reason
        if choice.reasoning:
            self._items.append(_Item(_item_id("rs"), text=choice.reasoning, is_thought=True))
        if choice.text or not (choice.calls or choice.reasoning):
            self._items.append(_Item(_item_id("msg"), text=choice.text))
        self._items += [_Item(_item_id("fc"), call) for call in choice.calls]
        return self._response(ending.usage)

    def begin(self) -> bytes:
        response = self._response(None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        events = []
        for delta in deltas:
            if delta.reasoning:
                events += self._add_thought(delta.reasoning)
            if delta.text:
                events += self._add_text(delta.text)
            for call in delta.calls:
                events += [*self._close_text(), *self._add_call(call)]
            if delta.finish_reason is not None:
                self._finish_reason = delta.finish_reason
        return b"".join(events)

    def end(self, ending: Ending) -> bytes:
        events = [] if self._items else self._add_text("")
        events += self._close_text()
        response = self._response(ending.usage)
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def error(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = {**self._response(None), "status": "failed", "error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=response)

    def _add_thought(self, text: str) -> list[bytes]:
        events = []
        if not (self._has_open_text and self._items[-1].is_thought):
            events = self._close_text()
            self._has_open_text = True
            item = _Item(_item_id("rs"), is_thought=True)
            self._items.append(item)
            events.append(
                self._event("response.output_item.added", output_index=self._place(), item=item.as_dict("in_progress"))
            )
        self._items[-1].text += text
        events.append(self._event("response.reasoning_text.delta", **self._part_place(), delta=text))
        return events

    def _add_text(self, text: str) -> list[bytes]:
        events = []
        if not self._has_open_text or self._items[-1].is_thought:
            events = self._close_text()
            self._has_open_text = True
            item = _Item(_item_id("msg"))
            self._items.append(item)
            place = self._place()
            events += [
                self._event("response.output_item.added", output_index=place, item=item.as_dict("in_progress")),
                self._event("response.content_part.added", **self._part_place(), part=_part("")),
            ]
        item = self._items[-1]
        item.text += text
        if text:
            events.append(self._event("response.output_text.delta", **self._part_place(), delta=text, logprobs=[]))
        return events

    def _close_text(self) -> list[bytes]:
        if not self._has_open_text:
            return []
        self._has_open_text = False
        item, where = self._items[-1], self._part_place()
        if item.is_thought:
            return [
                self._event("response.reasoning_text.done", **where, text=item.text),
                self._event("response.output_item.done", output_index=self._place(), item=item.as_dict("completed")),
            ]
        return [
            self._event("response.output_text.done", **where, text=item.text, logprobs=[]),
            self._event("response.content_part.done", **where, part=_part(item.text)),
            self._event(
                "response.output_item.done", output_index=self._place(), item=item.as_dict(self._item_status())
            ),
        ]

    def _add_call(self, call: ToolCall) -> list[bytes]:
        item = _Item(_item_id("fc"), call)
        self._items.append(item)
        place = self._place()
        where = {"item_id": item.id, "output_index": place}
        return [
            self._event("response.output_item.added", output_index=place, item=item.as_dict("in_progress")),
            self._event("response.function_call_arguments.delta", **where, delta=call.arguments),
            self._event("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=place, item=item.as_dict("completed")),
        ]

    def _place(self) -> int:
        return len(self._items) - 1

    def _part_place(self) -> dict[str, object]:
        return {"item_id": self._items[-1].id, "output_index": self._place(), "content_index": 0}

    def _item_status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _event(self, kind: str, **fields: object) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"

    def _response(self, usage: Usage | None) -> dict[str, object]:
        call = self.call
        is_cut = self._finish_reason == "length"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        last = len(self._items) - 1
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": call.instructions,
            "max_output_tokens": call.max_output_tokens,
            "metadata": call.metadata or {},
            "model": call.model,
            "output": [
                item.as_dict(self._item_status() if place == last and item.call is None else "completed")
                for place, item in enumerate(self._items)
            ],
            "parallel_tool_calls": call.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": call.reasoning and call.reasoning.effort, "summary": None},
            "temperature": 1.0 if call.temperature is None else call.temperature,
            "text": _text_options(call),
            "tool_choice": _choice(call),
            "tools": [tool.model_dump() for tool in call.tools or ()],
            "top_p": 1.0 if call.top_p is None else call.top_p,
            "truncation": call.truncation or "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _choice(call: ResponseCall) -> object:
    return call.tool_choice.model_dump() if isinstance(call.tool_choice, NamedTool) else call.tool_choice or "auto"


def _text_options(call: ResponseCall) -> dict[str, object]:
    chosen = (
        call.text.format if call.text is not None and call.text.format is not None else TextFormat.model_validate({})
    )
    return {"format": chosen.model_dump(by_alias=True, exclude_none=True)}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "truncated_tokens": usage.truncated_tokens,
    }


def _thought_part(text: str) -> dict[str, object]:
    return {"type": "reasoning_text", "text": text}


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
