"""The OpenAI wire format: what requests may say, how answers, chunks and errors look, and server-sent events.

Input is checked by pydantic; output is plain dicts, since it lies on the hot path. No engine, no HTTP framework here.
Called by `completions` and `server`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidegate_engine.request import SamplingParams
from tidegate_engine.structured import StructureFields

MAX_CHOICES = 16
"""Cap of `n`: one call may not take a whole batch."""
MAX_PROMPTS = 64
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_BIASES = 1024
UNIONS = {
    "prompt": f"a text, token ids, or a list of up to {MAX_PROMPTS} of these",
    "stop": f"a text or a list of up to {MAX_STOPS} texts",
}
"""What pydantic cannot say in a sentence: the fields that take several types."""
DONE = b"data: [DONE]\n\n"

CallT = TypeVar("CallT", bound=BaseModel)
Bias = Annotated[float, Field(ge=-100, le=100)]
StopList = str | Annotated[list[str], Field(max_length=MAX_STOPS)]


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
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: StopList | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    cache_salt: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_BIASES)] | None = None

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


TokenIds = Annotated[list[int], Field(min_length=1)]


class CompletionCall(CallFields):
    """Body of `POST /v1/completions`."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
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
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatCall(CallFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Any] | None = None

    def unsupported_field(self) -> str | None:
        if self.tools:
            return "tools"
        return super().unsupported_field()


class TokenizeCall(BaseModel):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


class DetokenizeCall(BaseModel):
    model: str | None = None
    tokens: list[int]


def parse(kind: type[CallT], body: bytes) -> CallT:
    """Read a JSON body; raises ApiError (400) that names the first wrong field."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        first = errors[0]
        path = [part for part in first["loc"] if isinstance(part, int) or _is_field(part)]
        where = ".".join(map(str, path)) or None
        name = str(first["loc"][0]) if first["loc"] else ""
        if name in UNIONS and len(errors) > 1:
            where, first["msg"] = name, f"must be {UNIONS[name]}"
        raise ApiError(400, f"{where or 'body'}: {first['msg']}", param=where, code="invalid_value") from error


def _is_field(part: str) -> bool:
    """False for the branches of a union (`str`, `list[str]`, ...), which pydantic also puts into the path."""
    return part.isidentifier() and part not in ("str", "int", "float", "bool")


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token with its log probability; `offset` counts characters of the answer before it."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained: text, tokens' log probabilities, its end."""

    index: int
    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands around the choices of every answer and chunk of one call."""

    id: str
    created: int
    model: str
    is_chat: bool
    with_logprobs: bool

    def answer(self, choices: Sequence[Delta], usage: Usage) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage.as_dict(),
        }

    def chunk(self, choices: list[dict[str, object]], *, usage: dict[str, object] | None = None) -> dict[str, object]:
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

    def delta(self, delta: Delta) -> dict[str, object]:
        """The choice of a chunk."""
        if not self.is_chat:
            return self._choice(delta)
        return {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish_reason,
        }

    def role(self, index: int) -> dict[str, object]:
        """The first choice chunk of a chat stream."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def _choice(self, delta: Delta) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": delta.index,
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish_reason,
        }
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": delta.text, "refusal": None}
        else:
            choice["text"] = delta.text
        return choice

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, object] | None:
        if not self.with_logprobs:
            return None
        return _chat_logprobs(entries) if self.is_chat else _completion_logprobs(entries)


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


def model_list(names: Sequence[str], *, created: int, max_model_len: int) -> dict[str, object]:
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "tidegate",
                "root": names[0],
                "max_model_len": max_model_len,
            }
            for name in names
        ],
    }
