"""Ollama's API, so that its clients work: `/api/chat`, `/api/generate`, and what they ask about the model.

Calls become OpenAI calls; this module owns only Ollama's shapes: streams of JSON lines, durations in nanoseconds,
options. Called by `server`.
"""

import hashlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from tidegate_engine.openai import (
    MAX_EMBEDDING_INPUTS,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    ApiError,
    ChatCall,
    CompletionCall,
    Delta,
    EmbeddingCall,
    Ending,
    Ids,
    MessageToolCalls,
    RepetitionPenalty,
    Seed,
    StopList,
    TokenEntry,
    Tools,
    TopK,
    validated,
)
from tidegate_engine.runner import ModelInfo
from tidegate_engine.structured import JsonObject
from tidegate_engine.tool_calls import ToolCall

EMULATED_VERSION = "0.12.0"
"""Clients ask whether the server is new enough for what they want: tools, logprobs."""
DEFAULT_TAG = ":latest"
DEFAULT_TEMPERATURE, DEFAULT_TOP_K, DEFAULT_TOP_P = 0.8, 40, 0.9
"""Ollama's own defaults: its users did not choose OpenAI's."""
NANOSECONDS = 1_000_000_000
MAX_IMAGES = 64
"""All are refused; this bounds what is read before."""

Images = Annotated[list[str], Field(max_length=MAX_IMAGES, fail_fast=True)]


class Options(BaseModel):
    """The options that mean something here; those of loading and of samplers that are not built in are ignored."""

    model_config = ConfigDict(extra="ignore")

    num_predict: int | None = None
    """Below 1 = until the model ends or the context is full."""
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: TopK | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Seed | None = None
    stop: StopList | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)

    def as_fields(self) -> dict[str, object]:
        """The same for an OpenAI call."""
        return {
            "max_tokens": self.num_predict if self.num_predict is not None and self.num_predict > 0 else None,
            "temperature": DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            "top_k": DEFAULT_TOP_K if self.top_k is None else self.top_k,
            "top_p": DEFAULT_TOP_P if self.top_p is None else self.top_p,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": self.stop,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }


class OllamaFields(BaseModel):
    """What both calls share."""

    model_config = ConfigDict(extra="ignore")

    model: str
    stream: bool | None = True
    options: Options | None = None
    format: Literal["", "json"] | JsonObject | None = None
    think: bool | str | None = None
    truncate: bool | None = None
    keep_alive: str | float | None = None
    """Ignored: a model stays loaded for the life of the server."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def asks_nothing(self) -> bool:
        """Clients send this to load or unload the model."""
        raise NotImplementedError

    def as_call(self, served_names: Sequence[str]) -> ChatCall | CompletionCall:
        """The same question to OpenAI's API; raises ApiError."""
        raise NotImplementedError

    def thinking_fields(self) -> dict[str, object]:
        """Of a chat call; the template's variable and, for a word such as `high`, the effort."""
        if self.think is None:
            return {}
        variables: dict[str, object] = {"enable_thinking": bool(self.think)}
        if isinstance(self.think, str):
            variables["reasoning_effort"] = self.think
        return {"chat_template_kwargs": variables}

    def common_fields(self, served_names: Sequence[str]) -> dict[str, object]:
        return {
            "model": resolve_name(self.model, served_names),
            **(self.options or Options.model_validate({})).as_fields(),
            "context_policy": "truncate_left" if self.truncate else None,
            "response_format": _response_format(self.format),
        }


class OllamaMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Images | None = None
    tool_calls: MessageToolCalls | None = None
    thinking: str | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_message(self) -> dict[str, object]:
        _refuse_images(self.images)
        return {
            "role": self.role,
            "content": self.content,
            "tool_calls": [call.model_dump() for call in self.tool_calls or ()],
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
            "reasoning": self.thinking,
        }


def _with_call_ids(messages: Sequence[OllamaMessage]) -> list[dict[str, object]]:
    """Messages for a chat call. Ollama's clients give calls no ids, and templates that want some want nine digits."""
    rows = []
    waiting: deque[str] = deque()
    for number, message in enumerate(messages):
        row = message.as_message()
        calls = row["tool_calls"]
        assert isinstance(calls, list)
        for place, call in enumerate(calls):
            call["id"] = call["id"] or f"{number:06d}{place:03d}"
        if calls:
            waiting = deque(call["id"] for call in calls)
        if message.role == "tool" and waiting:
            answered = waiting.popleft()
            row["tool_call_id"] = message.tool_call_id or answered
        rows.append(row)
    return rows


class OllamaChatCall(OllamaFields):
    """Body of `POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] = []
    tools: Tools | None = None

    def asks_nothing(self) -> bool:
        return not self.messages

    def as_call(self, served_names: Sequence[str]) -> ChatCall:
        data = {
            **self.common_fields(served_names),
            **self.thinking_fields(),
            "messages": _with_call_ids(self.messages),
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
        }
        return validated(ChatCall, data)


class OllamaGenerateCall(OllamaFields):
    """Body of `POST /api/generate`."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: Ids | None = None
    images: Images | None = None

    def asks_nothing(self) -> bool:
        return not self.prompt

    def as_call(self, served_names: Sequence[str]) -> ChatCall | CompletionCall:
        """A raw prompt is completed as it stands; another goes through the model's chat template."""
        _refuse_images(self.images)
        for name in ("suffix", "template", "context"):
            if getattr(self, name):
                message = f"{name} is not supported; use /api/chat with the whole conversation, or raw"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        data = self.common_fields(served_names)
        if self.raw:
            logprobs = (self.top_logprobs or 0) if self.logprobs else None
            return validated(CompletionCall, {**data, "prompt": self.prompt, "logprobs": logprobs})
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        chat: dict[str, object] = {"messages": messages, "logprobs": self.logprobs}
        if self.logprobs:
            chat["top_logprobs"] = self.top_logprobs
        return validated(ChatCall, {**data, **self.thinking_fields(), **chat})


class OllamaEmbedCall(BaseModel):
    """Body of `POST /api/embed`."""

    model_config = ConfigDict(extra="ignore")

    model: str
    input: str | Annotated[list[str], Field(max_length=MAX_EMBEDDING_INPUTS, fail_fast=True)] = ""
    truncate: bool | None = True
    dimensions: int | None = Field(None, ge=1)

    def as_call(self, served_names: Sequence[str]) -> EmbeddingCall:
        data = {
            "model": resolve_name(self.model, served_names),
            "input": self.input,
            "dimensions": self.dimensions,
            "truncate_prompt_tokens": None if self.truncate is False else -1,
        }
        return validated(EmbeddingCall, data)

    def make_answer(self, arrival: float) -> Callable[[Sequence[bytes], int], dict[str, object]]:
        def answer(vectors: Sequence[bytes], tokens: int) -> dict[str, object]:
            return {
                "model": self.model,
                "embeddings": [orjson.Fragment(vector) for vector in vectors],
                "total_duration": _nanoseconds(time.monotonic() - arrival),
                "load_duration": 0,
                "prompt_eval_count": tokens,
            }

        return answer


class ShowCall(BaseModel):
    """Body of `POST /api/show`; older clients say `name`."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    name: str | None = None


def resolve_name(name: str, served_names: Sequence[str]) -> str:
    """Ollama's clients add a tag to a name that has none."""
    return name if name in served_names else name.removesuffix(DEFAULT_TAG)


def _refuse_images(images: Sequence[str] | None) -> None:
    if images:
        raise ApiError(400, "images are not supported: the model reads text", param="images")


def _response_format(wanted: str | JsonObject | None) -> dict[str, object] | None:
    if not wanted:
        return None
    if isinstance(wanted, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}


@dataclass(slots=True)
class OllamaWire:
    """The answer of one call, whole or as JSON lines."""

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: "ollama-" + uuid.uuid4().hex)
    media_type: str = "application/x-ndjson"
    with_logprobs: bool = False
    _finish_reason: str | None = None

    def answer(self, choices: Sequence[Delta], ending: Ending) -> dict[str, object]:
        choice = choices[0]
        self._finish_reason = choice.finish_reason
        return {**self._line(choice), **self._ending(ending)}

    def begin(self) -> bytes:
        return b""

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        lines = []
        for delta in deltas:
            self._finish_reason = delta.finish_reason
            if delta.text or delta.calls or delta.entries or delta.reasoning:
                lines.append(orjson.dumps({**self._line(delta), "done": False}, option=orjson.OPT_APPEND_NEWLINE))
        return b"".join(lines)

    def end(self, ending: Ending) -> bytes:
        line = {**self._line(Delta(0, "")), **self._ending(ending)}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    def error(self, error: ApiError) -> bytes:
        return orjson.dumps(error_body(error), option=orjson.OPT_APPEND_NEWLINE)

    def loaded(self) -> dict[str, object]:
        """The answer to a call that asks nothing."""
        return {**self._line(Delta(0, "")), "done": True, "done_reason": "load"}

    def _line(self, delta: Delta) -> dict[str, object]:
        line: dict[str, object] = {"model": self.model, "created_at": _now()}
        if self.is_chat:
            message: dict[str, object] = {"role": "assistant", "content": delta.text}
            if delta.reasoning:
                message["thinking"] = delta.reasoning
            if delta.calls:
                message["tool_calls"] = [_call(call) for call in delta.calls]
            line["message"] = message
        else:
            line["response"] = delta.text
            if delta.reasoning:
                line["thinking"] = delta.reasoning
        if self.with_logprobs and delta.entries:
            line["logprobs"] = [_logprob(entry) for entry in delta.entries]
        return line

    def _ending(self, ending: Ending) -> dict[str, object]:
        prompt_seconds = ending.total_seconds if ending.first_token_seconds is None else ending.first_token_seconds
        return {
            "done": True,
            "done_reason": "length" if self._finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(ending.total_seconds),
            "load_duration": 0,
            "prompt_eval_count": ending.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(prompt_seconds),
            "eval_count": ending.usage.completion_tokens,
            "eval_duration": _nanoseconds(ending.total_seconds - prompt_seconds),
            "truncated_tokens": ending.usage.truncated_tokens,
        }


def error_body(error: ApiError) -> dict[str, object]:
    return {"error": error.message}


@dataclass(frozen=True, slots=True)
class Served:
    """What Ollama's clients ask about the model."""

    names: Callable[[], Sequence[str]]
    info: ModelInfo
    created: int
    template: str | None
    has_tools: bool
    has_thoughts: bool

    def tags(self) -> dict[str, object]:
        """Answer of `GET /api/tags`."""
        return {
            "models": [
                {
                    "name": name,
                    "model": name,
                    "modified_at": self._created(),
                    "size": self.info.weight_bytes,
                    "digest": _digest(name),
                    "details": self._details(),
                }
                for name in self.names()
            ]
        }

    def running(self) -> dict[str, object]:
        """Answer of `GET /api/ps`: the model never goes away by itself."""
        never = "2318-01-01T00:00:00Z"
        return {
            "models": [
                {
                    "name": name,
                    "model": name,
                    "size": self.info.weight_bytes,
                    "size_vram": self.info.weight_bytes if self.info.gpu_count else 0,
                    "digest": _digest(name),
                    "expires_at": never,
                    "context_length": self.info.max_model_len,
                    "details": self._details(),
                }
                for name in self.names()
            ]
        }

    def show(self) -> dict[str, object]:
        """Answer of `POST /api/show`."""
        info: dict[str, Any] = {
            "general.architecture": "tidegate",
            "tidegate.context_length": self.info.max_model_len,
            "tidegate.block_count": self.info.layers,
            "tidegate.attention.head_count_kv": self.info.kv_heads,
        }
        return {
            "modelfile": "",
            "parameters": "",
            "template": self.template or "",
            "modified_at": self._created(),
            "details": self._details(),
            "model_info": info,
            "capabilities": self._capabilities(),
        }

    def _capabilities(self) -> list[str]:
        has = {
            "completion": True,
            "tools": self.has_tools,
            "thinking": self.has_thoughts,
            "embedding": self.info.embedding_size is not None,
        }
        return [name for name, is_there in has.items() if is_there]

    def _created(self) -> str:
        return datetime.fromtimestamp(self.created, UTC).isoformat()

    def _details(self) -> dict[str, object]:
        return {
            "parent_model": "",
            "format": "",
            "family": "tidegate",
            "families": ["tidegate"],
            "parameter_size": "",
            "quantization_level": self.info.weight_dtype,
        }


def _digest(name: str) -> str:
    """Of no file, since a model is many; Ollama's own client prints its first twelve digits and needs that many."""
    return hashlib.sha256(name.encode()).hexdigest()


def _call(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "function": {"name": call.name, "arguments": orjson.Fragment(call.arguments)}}


def _logprob(entry: TokenEntry) -> dict[str, object]:
    def row(data: bytes, logprob: float) -> dict[str, object]:
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    return {**row(entry.data, entry.logprob), "top_logprobs": [row(data, value) for data, value in entry.top]}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(max(0.0, seconds) * NANOSECONDS)
