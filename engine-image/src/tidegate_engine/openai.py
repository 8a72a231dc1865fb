"""The OpenAI wire format: what requests may say, how answers, chunks and errors look, and server-sent events.

Input is checked by pydantic; output is plain dicts, since it lies on the hot path. No engine, no HTTP framework here.
Called by `completions` and `server`; `responses` and `ollama` turn their calls into these.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from tidegate_engine.context import ContextPolicy
from tidegate_engine.request import SamplingParams
from tidegate_engine.structured import JsonObject, Structure, StructureError, StructureFields
from tidegate_engine.tool_calls import ToolCall

MAX_ANSWERS = 16
"""Cap of `n`: one call may not take a whole batch."""
MAX_PROMPTS = 64
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_TOOLS = 128
MAX_EMBEDDING_INPUTS = 2048
MAX_STOP_TOKEN_IDS = 256
MAX_BIASES = 1024
MAX_TEMPLATE_VARIABLES = 64
MAX_PROMPT_IDS = 2**21
"""More than any context; what a model's own holds is checked later."""
MAX_MESSAGES = 16384
MAX_PARTS = 1024
MAX_MESSAGE_CALLS = 512
UNIONS = {
    "prompt": f"a text, token ids, or a list of up to {MAX_PROMPTS} of these",
    "stop": f"a text or a list of up to {MAX_STOPS} texts",
    "input": "a text, or a list",
    "content": "a text, or a list of parts of the type text",
    "tool_choice": "none, auto, required, or the name of a function",
}
"""What pydantic cannot say in a sentence: the fields that take several types."""
DONE = b"data: [DONE]\n\n"

CallT = TypeVar("CallT", bound=BaseModel)


def entries_up_to(limit: int) -> BeforeValidator:
    """Counts an object's entries before they are read; pydantic's own max_length does after, with an error for each."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "should have at most {limit} entries", {"limit": limit})
        return value

    return BeforeValidator(check)


Bias = Annotated[float, Field(ge=-100, le=100)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
TopK = Annotated[int, Field(ge=-1, le=(1 << 31) - 1)]
TemplateVariables = Annotated[JsonObject, entries_up_to(MAX_TEMPLATE_VARIABLES)]
StopList = str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)]


@dataclass(eq=False)
class ApiError(Exception):
    """An error as the client sees it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    include_usage: bool = False


class CallFields(StructureFields):
    """What both APIs share: OpenAI's fields, and vLLM's extra sampling ones. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    stop: StopList | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    cache_salt: str | None = None
    priority: int = Field(0, ge=-1000, le=1000)
    """Lower runs sooner."""
    max_tokens: int | None = Field(None, ge=1)
    context_policy: ContextPolicy | None = None
    """What happens to a prompt that is too long; default: the server's."""
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_BIASES), entries_up_to(MAX_BIASES)] | None = None

    def unsupported_field(self) -> str | None:
        """Name of a field that is set and would have to be ignored silently: refused instead."""
        return None

    def stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(stop for stop in stops if stop)

    def sampling(self, *, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            seed=self.seed,
            logprobs=logprobs,
            min_tokens=self.min_tokens or 0,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=tuple((self.logit_bias or {}).items()),
        )


Ids = Annotated[list[int], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)]
TokenIds = Annotated[Ids, Field(min_length=1)]


class CompletionCall(CallFields):
    """Body of `POST /v1/completions`."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None

    def unsupported_field(self) -> str | None:
        if self.echo:
            return "echo"
        if self.suffix:
            return "suffix"
        if self.best_of is not None and self.best_of != (self.n or 1):
            return "best_of"
        return super().unsupported_field()

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str | JsonObject = "{}"


class MessageToolCall(BaseModel):
    """A call that the model made earlier in the conversation."""

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


MessageToolCalls = Annotated[list[MessageToolCall], Field(max_length=MAX_MESSAGE_CALLS, fail_fast=True)]


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: MessageToolCalls | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The older name of `reasoning`."""

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def as_template_message(self) -> dict[str, object]:
        """As chat templates want it: content is text, a call's arguments an object; raises ApiError."""
        # OpenAI's new word for the system's messages: a template that does not know it would leave the message out.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, object] = {"role": role, "content": self.text()}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if thoughts := self.reasoning or self.reasoning_content:
            message["reasoning"] = message["reasoning_content"] = thoughts
        if self.tool_calls:
            message["tool_calls"] = [_template_call(call) for call in self.tool_calls]
        return message


def _template_call(call: MessageToolCall) -> dict[str, object]:
    arguments: object = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError as error:
            message = f"the arguments of the call of {call.function.name!r} are not JSON: {error}"
            raise ApiError(400, message, param="messages", code="invalid_value") from error
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


class Function(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:/-]+$")]
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"] = "function"
    function: Function

    def as_template_tool(self) -> dict[str, object]:
        function = self.function
        return {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": function.parameters or {"type": "object", "properties": {}},
            },
        }


Messages = Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatCall(CallFields):
    """Body of `POST /v1/chat/completions`."""

    chat_template_kwargs: TemplateVariables | None = None
    """More variables of the model's chat template, such as `enable_thinking`."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the template; `none` also sets `enable_thinking` to false."""
    include_reasoning: bool = True
    """Whether thoughts that a reasoning parser took out of the text are shown."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True

    def template_variables(self) -> dict[str, object]:
        effort = self.reasoning_effort
        variables: dict[str, object] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            variables["enable_thinking"] = False
        return variables | (self.chat_template_kwargs or {})

    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of; raises ApiError when the choice names none of them."""
        tools = self.tools or []
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            tools = [tool for tool in tools if tool.function.name == wanted]
        elif self.tool_choice != "required":
            return tools
        if not tools:
            raise ApiError(400, "tool_choice asks for a tool that is not in tools", param="tool_choice")
        return tools

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call of a tool."""
        return self.tool_choice is not None and self.tool_choice not in ("none", "auto")

    def structure(self) -> Structure | None:
        """The form of the answer; a call that must be made is one of its own."""
        asked = super().structure()
        if not self.must_call:
            return asked
        if asked is not None:
            raise StructureError(f"{asked.param} and a call that must be made exclude each other", param=asked.param)
        return _call_structure(self.offered_tools())


def _call_structure(tools: Sequence[Tool]) -> Structure:
    """A call of one of `tools` as JSON. Definitions move to the root, where the references to them point."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        schema: dict[str, Any] = {"type": "object", **(tool.function.parameters or {})}
        own = schema.pop("$defs", None)
        for name, definition in own.items() if isinstance(own, dict) else ():
            if definitions.setdefault(name, definition) != definition:
                raise StructureError(f"two tools define {name!r} differently", param="tools")
        properties = {"name": {"const": tool.function.name}, "arguments": schema}
        calls.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    root = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return Structure("json", json.dumps({**root, "$defs": definitions} if definitions else root), "tool_choice")


class TokenizeCall(BaseModel):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    """Default: for a text yes, for a conversation no, since its template has them."""
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = False


class DetokenizeCall(BaseModel):
    model: str | None = None
    tokens: Ids


class EmbeddingCall(BaseModel):
    """Body of `POST /v1/embeddings`."""

    model_config = ConfigDict(extra="ignore")

    model: str
    input: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_EMBEDDING_INPUTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_EMBEDDING_INPUTS, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1)
    """The first so many of the model's own; of the length one again."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep an input's last so many tokens; -1 = what the context holds."""
    priority: int = Field(0, ge=-1000, le=1000)
    cache_salt: str | None = None

    def inputs(self) -> list[str | list[int]]:
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return list(self.input)


def parse(kind: type[CallT], body: bytes) -> CallT:
    """Read a JSON body; raises ApiError (400) that names the first wrong field."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    return validated(kind, data)


def validated(kind: type[CallT], data: object) -> CallT:
    """Read a call from JSON data; raises ApiError (400) that names the first wrong field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # Every list stops at its first wrong item, so there are a few errors for each field, however long the body is.
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        first = errors[0]
        path = [part for part in first["loc"] if isinstance(part, int) or _is_field(part)]
        where = ".".join(map(str, path)) or None
        name = next((part for part in first["loc"] if part in UNIONS), None)
        if name is not None and len(errors) > 1:
            path = path[: path.index(name) + 1]
            where, first["msg"] = ".".join(map(str, path)), f"must be {UNIONS[str(name)]}"
        raise ApiError(400, f"{where or 'body'}: {first['msg']}", param=where, code="invalid_value") from error


def _is_field(part: str) -> bool:
    """False for the branches of a union (`str`, `list[str]`, `Tool`, ...), which pydantic also puts into the path."""
    return part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool")


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    truncated_tokens: int = 0
    """Of the prompt, cut by the context policy; not in `prompt_tokens`."""
    reasoning_tokens: int | None = None
    """Of the completion's; None = nothing tells thoughts from the answer."""

    def as_dict(self) -> dict[str, object]:
        thought = self.reasoning_tokens
        details = {} if thought is None else {"completion_tokens_details": {"reasoning_tokens": thought}}
        return {
            **details,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "truncated_tokens": self.truncated_tokens,
        }


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known when all choices have ended. Times count from the arrival."""

    usage: Usage
    first_token_seconds: float | None
    total_seconds: float


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token with its log probability; `offset` counts characters of the answer before it."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained: text, tokens' log probabilities, calls of tools, its thoughts, its end."""

    index: int
    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: str | None = None
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    @property
    def is_text_only(self) -> bool:
        """It has a text, and nothing else."""
        return bool(self.text) and not (self.entries or self.finish_reason or self.calls or self.reasoning)


@dataclass(slots=True)
class Envelope:
    """What stands around the choices of every answer and chunk of one call: the wire of OpenAI's older two APIs."""

    id: str
    created: int
    model: str
    is_chat: bool
    with_logprobs: bool
    with_usage: bool = False
    """Whether a stream ends with a chunk of usage."""
    media_type: str = "text/event-stream"
    _calls_begun: dict[int, int] = field(default_factory=dict)
    """Choices whose stream has begun, with their number of tool calls so far."""
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """By choice: what stands before and behind the text in the event of a chunk that has nothing else."""

    def answer(self, choices: Sequence[Delta], ending: Ending) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(choice) for choice in choices],
            "usage": ending.usage.as_dict(),
        }

    def begin(self) -> bytes:
        return b""

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The events of what a step brought."""
        if len(deltas) == 1 and deltas[0].is_text_only and deltas[0].index in self._frames:  # as nearly all are
            before, behind = self._frames[deltas[0].index]
            return before + orjson.dumps(deltas[0].text) + behind
        parts = []
        for delta in deltas:
            if delta.index not in self._frames:
                self._frames[delta.index] = self._frame(delta.index)
            if self.is_chat and delta.index not in self._calls_begun:
                self._calls_begun[delta.index] = 0
                parts.append(self._role(delta.index))
            parts += self._call_chunks(delta) if delta.calls else [self._delta(delta)]
        return b"".join(event(self._chunk([part])) for part in parts)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        text = f"{self.id} {self.model}"  # that no other field has
        before, quoted, behind = event(self._chunk([self._delta(Delta(index, text))])).partition(orjson.dumps(text))
        assert quoted
        return before, behind

    def end(self, ending: Ending) -> bytes:
        usage = event(self._chunk([], usage=ending.usage.as_dict())) if self.with_usage else b""
        return usage + DONE

    def error(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _chunk(self, choices: list[dict[str, object]], *, usage: dict[str, object] | None = None) -> dict[str, object]:
        chunk: dict[str, object] = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None:
            chunk["usage"] = usage
        return chunk

    def _delta(self, delta: Delta) -> dict[str, object]:
        """The choice of a chunk."""
        if not self.is_chat:
            return self._choice(delta)
        return {
            "index": delta.index,
            "delta": _gained(delta),
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish_reason,
        }

    def _role(self, index: int) -> dict[str, object]:
        """The first choice chunk of a chat stream."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def _call_chunks(self, delta: Delta) -> list[dict[str, object]]:
        """Text, then for each call its name and its arguments, then the end."""
        chunks = []
        if delta.text or delta.entries or delta.reasoning:
            chunks.append(self._delta(Delta(delta.index, delta.text, delta.entries, reasoning=delta.reasoning)))
        for call in delta.calls:
            place = self._calls_begun[delta.index]
            self._calls_begun[delta.index] = place + 1
            head = {"index": place, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            rest = {"index": place, "function": {"arguments": call.arguments}}
            chunks += [
                {"index": delta.index, "delta": {"tool_calls": [part]}, "logprobs": None, "finish_reason": None}
                for part in (head, rest)
            ]
        if delta.finish_reason is not None:
            chunks.append(self._delta(Delta(delta.index, "", (), delta.finish_reason)))
        return chunks

    def _choice(self, delta: Delta) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": delta.index,
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish_reason,
        }
        if self.is_chat:
            choice["message"] = _message(delta)
        else:
            choice["text"] = delta.text
        return choice

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, object] | None:
        if not self.with_logprobs:
            return None
        return _chat_logprobs(entries) if self.is_chat else _completion_logprobs(entries)


def _gained(delta: Delta) -> dict[str, object]:
    """The `delta` of a chat's chunk."""
    if delta.reasoning:
        return {**_thoughts(delta), **({"content": delta.text} if delta.text else {})}
    return {"content": delta.text} if delta.text or not delta.finish_reason else {}


def _thoughts(delta: Delta) -> dict[str, object]:
    """Under the name that vLLM's clients read now, and the one that they read before."""
    return {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}


def _message(delta: Delta) -> dict[str, object]:
    has_more = delta.calls or delta.reasoning
    message: dict[str, object] = {
        "role": "assistant",
        "content": delta.text or None if has_more else delta.text,
        "refusal": None,
    }
    if delta.reasoning:
        message |= _thoughts(delta)
    if delta.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in delta.calls
        ]
    return message


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _chat_logprobs(entries: Sequence[TokenEntry]) -> dict[str, object]:
    def row(data: bytes, logprob: float) -> dict[str, object]:
        return {"token": _text(data), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            {**row(entry.data, entry.logprob), "top_logprobs": [row(data, value) for data, value in entry.top]}
            for entry in entries
        ]
    }


def _completion_logprobs(entries: Sequence[TokenEntry]) -> dict[str, object]:
    return {
        "tokens": [_text(entry.data) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{_text(data): value for data, value in entry.top} for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def model_card(
    name: str, *, created: int, root: str, parent: str | None = None, max_model_len: int
) -> dict[str, object]:
    """A model as `/v1/models` shows it. An adapter's parent is the model that it changes."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tidegate",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }
