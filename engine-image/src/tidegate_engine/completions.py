"""From a checked call to requests in the engine, and from tokens back to answers and streams.

Owns what a call means: prompts to ids, limits, choices, stop strings, usage. The wire's shapes are in `openai`, HTTP in
`server`. Runs on the event loop.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from tidegate_engine.adapters import ServedAdapters
from tidegate_engine.context import NO_SLIDING_WINDOW, ContextPolicy, Fitted, fit_ids, fit_messages
from tidegate_engine.detokenizer import Detokenizer
from tidegate_engine.engine import Output
from tidegate_engine.engine_client import EngineClient
from tidegate_engine.live_policy import LivePolicy, SchedulingPolicy
from tidegate_engine.openai import (
    ApiError,
    CallFields,
    ChatCall,
    ChatMessage,
    CompletionCall,
    Delta,
    DetokenizeCall,
    Ending,
    Envelope,
    TokenEntry,
    TokenizeCall,
    Tool,
    Usage,
    model_card,
)
from tidegate_engine.reasoning import ReasoningFormat, ReasoningParser
from tidegate_engine.request import Adapter, FinishReason, Request, SampledToken, SamplingParams, Window
from tidegate_engine.structured import StructureError, compile_grammar
from tidegate_engine.text_meter import TextMeter
from tidegate_engine.tool_calls import FORMATS, LLAMA3_JSON, ToolCall, ToolCallParser, ToolFormat

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat may fill the context."""
INLINE_ENCODE_CHARACTERS = 4096
"""Longer texts are tokenized in a thread, so that the event loop stays free."""
MAX_REQUESTS_PER_CALL = 128
"""Prompts times `n`: each holds memory in both processes while it waits."""
PROMPT_END_TOKENS = 16
"""Of a prompt, looked at to see whether its template opened a thought."""
RETRY_AFTER_SECONDS = 1
GRAMMAR_SECONDS = 5.0
"""How long the check of a schema or grammar may take."""
DEFAULT_ANSWER_TOKENS = 1024
"""Room that a cut leaves for an answer whose length the client did not name; at most a quarter of the context."""


Rendered = TypeVar("Rendered", list[int], Fitted)


class Tokenizer(Protocol):
    """What the HTTP side needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def meter(self) -> TextMeter:
        """What was encoded so far."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template's source, None when the model has none."""
        ...

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; empty for special tokens."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of a conversation in the model's template, ending where the answer begins."""
        ...


class Wire(Protocol):
    """The shape of one call's answer; `id` names its requests."""

    @property
    def id(self) -> str: ...

    @property
    def media_type(self) -> str: ...

    def answer(self, choices: Sequence[Delta], ending: Ending) -> dict[str, object]:
        """The whole answer in one piece."""
        ...

    def begin(self) -> bytes:
        """The head of a stream."""
        ...

    def chunks(self, deltas: Sequence[Delta]) -> bytes: ...

    def end(self, ending: Ending) -> bytes: ...

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may ask for."""

    served_names: tuple[str, ...]
    max_model_len: int
    kv_tokens: int
    policy: LivePolicy = field(default_factory=LivePolicy)
    """What may change while the server runs."""
    tool_format: ToolFormat | None = None
    """How the model writes calls of tools; None = it cannot be offered any."""
    reasoning_format: ReasoningFormat | None = None
    """How the model marks its thoughts; None = they stay in its text."""
    template_variables: Mapping[str, object] = field(default_factory=dict)
    """Of the chat template, where a call does not say otherwise."""
    structured_outputs: bool = False
    """Whether the runner can hold an answer to a grammar."""
    window: Window | None = None
    """What tokens see under the policy `sliding_window`; None = the model's layers have windows of their own."""


@dataclass(frozen=True, slots=True)
class _CallReader:
    """What a choice needs to take calls of tools out of the text."""

    tool_format: ToolFormat
    names: frozenset[str]
    marks: Mapping[int, bytes]
    """Special tokens that stand for a mark, which would else add nothing to the text."""
    is_parallel: bool


@dataclass(frozen=True, slots=True)
class _ThoughtReader:
    """What a choice needs to take thoughts out of the text."""

    reasoning_format: ReasoningFormat
    prompt_end: str
    marks: Mapping[int, bytes]
    is_shown: bool


class Wake:
    """What the only one who reads a call's choices waits for; less than an `asyncio.Event` for each token."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until it is set, which it is not any more then."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False


class Choice:
    """One answer in the making: takes the engine's outputs, gives deltas."""

    __slots__ = (
        "_detokenizer", "_marks", "_parser", "_shows_thoughts", "_single_call", "_thinker", "_token_bytes", "_wake",
        "closed", "index", "length", "pending", "reasoning_tokens", "request", "tokens",
    )  # fmt: skip

    def __init__(
        self, index: int, request: Request, detokenizer: Detokenizer, *, tokenizer: Tokenizer, wake: Wake
    ) -> None:
        self._parser: ToolCallParser | None = None
        self._marks: Mapping[int, bytes] = {}
        self._single_call = False
        self._thinker: ReasoningParser | None = None
        self._shows_thoughts = True
        self.reasoning_tokens: int | None = None
        self.index = index
        self.request = request
        self.pending: list[Output] = []
        self.closed = False
        self.tokens = 0
        self.length = 0
        """Characters of the answer so far, those held back included only when released."""
        self._detokenizer = detokenizer
        self._token_bytes = tokenizer.token_bytes
        self._wake = wake

    def push(self, output: Output) -> None:
        if not self.closed:
            self.pending.append(output)
            self._wake.set()

    def is_due(self, interval: int) -> bool:
        """Whether there is a chunk to make: the first token, `interval` more, or the end."""
        pending = self.pending
        return bool(pending) and (len(pending) >= interval or not self.tokens or pending[-1].finish_reason is not None)

    def read_calls(self, reader: _CallReader) -> None:
        """Take calls of tools out of the text."""
        self._parser = ToolCallParser(reader.tool_format, reader.names)
        self._marks = {**self._marks, **reader.marks}
        self._single_call = not reader.is_parallel

    def read_thoughts(self, reader: _ThoughtReader) -> None:
        """Take thoughts out of the text."""
        self._thinker = ReasoningParser(reader.reasoning_format, prompt_end=reader.prompt_end)
        self._marks = {**self._marks, **reader.marks}
        self._shows_thoughts = reader.is_shown
        self.reasoning_tokens = 0

    def advance(self) -> Delta | None:
        """Everything since the last call as one delta, None when nothing can be shown; raises ApiError."""
        outputs, self.pending = self.pending, []
        text = thoughts = ""
        entries: list[TokenEntry] = []
        finish: str | None = None
        for output in outputs:
            if output.error is not None:
                self.closed = True
                raise failure_of(output)
            if output.token is not None:
                new = self._take(output.token, ends_text=output.finish_reason is FinishReason.STOP, entries=entries)
                thought, new = self._split(new, tokens=1)
                thoughts, text = thoughts + thought, text + new
            if output.finish_reason is not None:
                thought, rest = self._split(self._detokenizer.finish(), tokens=0)
                thoughts, text = thoughts + thought, text + rest
                finish = output.finish_reason.value
            if self._detokenizer.matched_stop is not None:
                finish = FinishReason.STOP.value
            if finish is not None:
                self.closed = True
                break
        if self._thinker is not None and finish is not None:
            thought, rest = self._thinker.finish()
            thoughts, text = thoughts + thought, text + rest
        delta = Delta(self.index, text, tuple(entries), finish, reasoning=thoughts if self._shows_thoughts else "")
        if self._parser is not None:
            return self._with_calls(self._parser, delta)
        self.length += len(text)
        return delta if text or entries or finish or delta.reasoning else None

    def _split(self, text: str, *, tokens: int) -> tuple[str, str]:
        """(thoughts, answer) that `text`, of so many more tokens, brings."""
        if self._thinker is None:
            return "", text
        if self._thinker.is_thinking:
            self.reasoning_tokens = (self.reasoning_tokens or 0) + tokens
        return self._thinker.push(text)

    def _with_calls(self, parser: ToolCallParser, delta: Delta) -> Delta | None:
        finish = delta.finish_reason
        parts = parser.push(delta.text)
        if finish is not None:
            parts += parser.finish()
        shown = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if calls and self._single_call:
            calls, finish, self.closed = calls[:1], FinishReason.STOP.value, True
        if finish == FinishReason.STOP.value and parser.calls:
            finish = "tool_calls"
        self.length += len(shown)
        if not (shown or delta.entries or finish or calls or delta.reasoning):
            return None
        return replace(delta, text=shown, finish_reason=finish, calls=tuple(calls))

    def _take(self, token: SampledToken, *, ends_text: bool, entries: list[TokenEntry]) -> str:
        self.tokens += 1
        data = b"" if ends_text else self._token_bytes(token.token_id) or self._marks.get(token.token_id, b"")
        if token.logprobs is not None:
            offset = self.length + sum(len(entry.data.decode(errors="replace")) for entry in entries)
            top = tuple((self._token_bytes(token_id), value) for token_id, value in token.logprobs.top)
            entries.append(TokenEntry(data, token.logprobs.logprob, top, offset))
        return self._detokenizer.push(data, may_stop=self.tokens > self.request.params.min_tokens)


class Generation:
    """The choices of one call, from submission to the end. Whoever drops it early calls `abort`."""

    def __init__(
        self,
        engine: EngineClient,
        wire: Wire,
        choices: Sequence[Choice],
        *,
        wake: Wake,
        truncated_tokens: int,
        interval: int = 1,
    ) -> None:
        self.wire = wire
        self._interval = interval
        self._engine = engine
        self._choices = choices
        self._open = choices
        self._wake = wake
        self._truncated_tokens = truncated_tokens
        self._first_delta_at: float | None = None
        self.is_over = False
        """What `stream` yielded last has its end."""

    def start(self) -> None:
        for choice in self._choices:
            self._engine.submit(choice.request, choice)

    def abort(self) -> None:
        """Free what the engine still holds for this call; its stream ends."""
        for choice in self._choices:
            if not choice.closed:
                choice.closed = True
                self._engine.abort(choice.request.id)
        self._wake.set()

    async def answer(self) -> dict[str, object]:
        """The whole answer; raises ApiError."""
        gained: list[list[Delta]] = [[] for _ in self._choices]
        try:
            while deltas := await self._next():
                for delta in deltas:
                    gained[delta.index].append(delta)
        finally:
            self.abort()
        return self.wire.answer([_sum(deltas) for deltas in gained], self._ending())

    async def stream(self) -> AsyncIterator[bytes]:
        """The stream, a part for all that a step brought, the last one with the end; an error becomes a part of it."""
        wire = self.wire
        if head := wire.begin():
            yield head
        try:
            while deltas := await self._next():
                part = wire.chunks(deltas)
                if self.is_over:
                    part += wire.end(self._ending())
                if part:
                    yield part
        except ApiError as error:
            self.is_over = True
            yield wire.error(error)
        finally:
            self.abort()

    async def _next(self) -> list[Delta]:
        """What the choices gained; nothing when all have ended."""
        while self._open:
            await self._wake.wait()
            deltas = []
            for choice in self._open:
                if choice.is_due(self._interval) and (delta := choice.advance()) is not None:
                    deltas.append(delta)
                    if self._first_delta_at is None:
                        self._first_delta_at = time.monotonic()
                    if delta.finish_reason is not None and choice.request.finish_reason is None:
                        # A stop string: the engine does not know that the answer has ended.
                        self._engine.abort(choice.request.id, reason=FinishReason.STOP)
            self._open = [choice for choice in self._open if not choice.closed]
            if deltas:
                self.is_over = not self._open
                return deltas
        return []

    def _ending(self) -> Ending:
        # Choices of one prompt share its list; the first of them tells what the cache held before the call.
        prompts = {id(choice.request.prompt_ids): choice.request for choice in reversed(self._choices)}.values()
        usage = Usage(
            prompt_tokens=sum(request.prompt_tokens for request in prompts),
            completion_tokens=sum(choice.tokens for choice in self._choices),
            cached_tokens=sum(request.num_cached for request in prompts),
            truncated_tokens=self._truncated_tokens,
            reasoning_tokens=None
            if self._choices[0].reasoning_tokens is None
            else sum(choice.reasoning_tokens or 0 for choice in self._choices),
        )
        arrival, first = self._choices[0].request.arrival, self._first_delta_at
        return Ending(usage, None if first is None else first - arrival, time.monotonic() - arrival)


def _sum(deltas: Sequence[Delta]) -> Delta:
    """All that one choice gained."""
    return Delta(
        deltas[0].index,
        "".join(delta.text for delta in deltas),
        tuple(entry for delta in deltas for entry in delta.entries),
        deltas[-1].finish_reason,
        tuple(call for delta in deltas for call in delta.calls),
        "".join(delta.reasoning for delta in deltas),
    )


class Completions:
    """Turns calls into generations."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, limits: Limits, adapters: ServedAdapters) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self._adapters = adapters

    async def begin_completion(
        self,
        call: CompletionCall,
        *,
        arrival: float,
        make_wire: Callable[[], Wire] | None = None,
        default_tokens: int | None = DEFAULT_COMPLETION_TOKENS,
    ) -> Generation:
        """`default_tokens` is for a call that names no max_tokens; None = up to the end of the context."""
        self._check(call)
        asked = call.prompts()
        if len(asked) * (call.n or 1) > MAX_REQUESTS_PER_CALL:
            message = (
                f"{len(asked)} prompts with n = {call.n} are more than {MAX_REQUESTS_PER_CALL} answers in one call"
            )
            raise ApiError(400, message, param="n", code="invalid_value")
        params = await self._params(call, logprobs=call.logprobs)
        default = default_tokens or self.limits.policy.default_max_tokens
        wanted = default if call.max_tokens is None else call.max_tokens
        plan = _Plan(params, arrival, max_tokens=wanted, param="prompt", default=call.max_tokens is None)
        policy = self._policy_of(call)
        prompts = []
        for prompt in asked:
            ids = prompt if isinstance(prompt, list) else await self.encode(prompt)
            has_bos = bool(ids) and isinstance(prompt, str) and not self.tokenizer.token_bytes(ids[0])
            prompts.append(fit_ids(ids, room=plan.prompt_room(self.limits), policy=policy, has_bos=has_bos))
        wire = make_wire() if make_wire else _envelope(call, with_logprobs=params.logprobs is not None, is_chat=False)
        return self._begin(call, prompts, plan, wire=wire)

    async def begin_chat(
        self, call: ChatCall, *, arrival: float, make_wire: Callable[[], Wire] | None = None
    ) -> Generation:
        self._check(call)
        if call.top_logprobs and not call.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
        logprobs = (call.top_logprobs or 0) if call.logprobs else None
        params = await self._params(call, logprobs=logprobs)
        max_tokens = call.max_completion_tokens or call.max_tokens
        wanted = max_tokens or self.limits.policy.default_max_tokens
        plan = _Plan(params, arrival, max_tokens=wanted, param="messages", default=not max_tokens)
        tools = call.offered_tools()
        reader = self._call_reader(call) if tools else None
        prompt = await self._fit_chat(call, tools, room=plan.prompt_room(self.limits))
        wire = make_wire() if make_wire else _envelope(call, with_logprobs=logprobs is not None, is_chat=True)
        # An answer that a grammar holds has no thoughts.
        thoughts = self._thought_reader(call, prompt.ids) if params.grammar is None else None
        return self._begin(call, [prompt], plan, wire=wire, reader=reader, thoughts=thoughts)

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        if len(text) <= INLINE_ENCODE_CHARACTERS:
            return self.tokenizer.encode(text, add_special=add_special)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special=add_special)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        rendered = [tool.as_template_tool() for tool in tools] or None
        plain = [message.as_template_message() for message in messages]
        variables = {**self.limits.template_variables, **(variables or {})}
        return await self._in_template(
            lambda: self.tokenizer.chat(
                plain, tools=rendered, add_generation_prompt=add_generation_prompt, variables=variables
            ),
            characters=_characters(messages, tools),
        )

    async def tokenize(self, call: TokenizeCall) -> dict[str, object]:
        """The answer of `/tokenize`; raises ApiError."""
        self.check_model(call.model)
        if (call.prompt is None) == (call.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
        if call.messages is not None:
            ids = await self.encode_chat(
                call.messages,
                call.tools or (),
                add_generation_prompt=call.add_generation_prompt,
                variables=call.chat_template_kwargs,
            )
        else:
            ids = await self.encode(call.prompt or "", add_special=call.add_special_tokens is not False)
        strings = None
        if call.return_token_strs:
            self._check_decodable(ids, param="return_token_strs")
            strings = await asyncio.to_thread(lambda: [self.tokenizer.decode([token_id]) for token_id in ids])
        max_model_len = self.limits.max_model_len
        return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}

    async def detokenize(self, call: DetokenizeCall) -> dict[str, object]:
        """The answer of `/detokenize`; raises ApiError."""
        self.check_model(call.model)
        self._check_decodable(call.tokens, param="tokens")
        self.check_ids(call.tokens, param="tokens")
        return {"prompt": await asyncio.to_thread(self.tokenizer.decode, call.tokens)}

    def _check_decodable(self, ids: Sequence[int], *, param: str) -> None:
        limit = self.limits.max_model_len
        if len(ids) > limit:
            message = f"{param}: there are {len(ids)} tokens; at most {limit}, what the context holds, become text"
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    async def _fit_chat(self, call: ChatCall, tools: Sequence[Tool], *, room: int) -> Fitted:
        rendered = [tool.as_template_tool() for tool in tools] or None
        plain = [message.as_template_message() for message in call.messages]
        tokenizer = self.tokenizer
        policy = self._policy_of(call)
        variables = {**self.limits.template_variables, **call.template_variables()}

        def token_lengths(text: str) -> list[int]:
            return [len(tokenizer.token_bytes(token_id)) for token_id in tokenizer.encode(text, add_special=False)]

        return await self._in_template(
            lambda: fit_messages(
                plain,
                lambda kept: tokenizer.chat(kept, tools=rendered, variables=variables),
                room=room,
                policy=policy,
                token_lengths=token_lengths,
            ),
            characters=_characters(call.messages, tools),
        )

    async def _in_template(self, render: Callable[[], Rendered], *, characters: int) -> Rendered:
        """Run `render`, in a thread when it takes long; what the template refuses is the client's error."""
        try:
            return render() if characters <= INLINE_ENCODE_CHARACTERS else await asyncio.to_thread(render)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the model's chat template refuses the messages: {error}", param="messages") from error

    def _call_reader(self, call: ChatCall) -> _CallReader:
        names = frozenset(tool.function.name for tool in call.tools or ())
        tool_format = self.limits.tool_format
        if call.must_call:
            # The answer's grammar is the call as bare JSON, whatever the model's own format is; but the template, which
            # reads the call in the next turn, may want ids of its own form.
            id_characters = (tool_format or LLAMA3_JSON).id_characters
            return _CallReader(replace(LLAMA3_JSON, id_characters=id_characters), names, {}, is_parallel=False)
        if tool_format is None:
            raise ApiError(
                400,
                "tools are not supported here: the model's chat template has no known format of tool calls; "
                f"the server can be told one with --tool-call-parser ({', '.join(FORMATS)})",
                param="tools",
                code="unsupported_parameter",
            )
        marks = self._special_marks(tool_format.marks)
        return _CallReader(tool_format, names, marks, is_parallel=call.parallel_tool_calls is not False)

    def served_names(self) -> tuple[str, ...]:
        """What a call may name as its model: the model's names, and those of the adapters that are loaded."""
        return (*self.limits.served_names, *self._adapters.served)

    def model_cards(self, *, created: int) -> list[dict[str, object]]:
        """The served models and adapters as `/v1/models` shows them."""
        length, names = self.limits.max_model_len, self.limits.served_names
        cards = [model_card(name, created=created, root=names[0], max_model_len=length) for name in names]
        return cards + [
            model_card(name, created=adapter.loaded_at, root=name, parent=names[0], max_model_len=length)
            for name, adapter in self._adapters.served.items()
        ]

    def _thought_reader(self, call: ChatCall, prompt: Sequence[int]) -> _ThoughtReader | None:
        reasoning_format = self.limits.reasoning_format
        if reasoning_format is None:
            return None
        marks = self._special_marks(reasoning_format.marks)
        tail = prompt[-PROMPT_END_TOKENS:]
        end = b"".join(self.tokenizer.token_bytes(token_id) or marks.get(token_id, b"") for token_id in tail)
        return _ThoughtReader(reasoning_format, end.decode(errors="replace"), marks, is_shown=call.include_reasoning)

    def _special_marks(self, marks: Iterable[str]) -> dict[int, bytes]:
        """Those of `marks` that are special tokens, which would else add nothing to the text."""
        found = {}
        for mark in marks:
            last = self.tokenizer.encode(mark, add_special=False)[-1]
            if not self.tokenizer.token_bytes(last):
                found[last] = mark.encode()
        return found

    def check_model(self, name: str | None) -> None:
        if name is not None:
            self.adapter_of(name)

    def adapter_of(self, name: str) -> Adapter | None:
        """The adapter that a call names, None for the model itself; raises ApiError when it is neither."""
        if name in self.limits.served_names:
            return None
        if name in self._adapters.served:
            return self._adapters.served[name].key
        served = ", ".join(self.limits.served_names)
        adapters = f"; {self._adapters.describe()}" if self._adapters.are_on else ""
        message = f"the model {name!r:.160} does not exist; served here: {served}{adapters}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def check_ids(self, ids: Collection[int], *, param: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.tokenizer.vocab_size:
            raise ApiError(
                400,
                f"{param} holds a token id outside of 0 to {self.tokenizer.vocab_size - 1}",
                param=param,
                code="invalid_value",
            )

    def _check(self, call: CallFields) -> None:
        self.check_model(call.model)
        if name := call.unsupported_field():
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
        if self._policy_of(call) is ContextPolicy.SLIDING_WINDOW and self.limits.window is None:
            message = f"context_policy {NO_SLIDING_WINDOW}"
            raise ApiError(400, message, param="context_policy", code="unsupported_parameter")
        self.check_priority(call.priority)
        self.check_ids(call.stop_token_ids or (), param="stop_token_ids")
        self.check_ids(call.logit_bias or (), param="logit_bias")

    def check_priority(self, priority: int) -> None:
        if priority and self.limits.policy.scheduling_policy is not SchedulingPolicy.PRIORITY:
            message = "priority is not honoured here: the server runs requests in the order of their arrival"
            raise ApiError(400, message, param="priority", code="unsupported_parameter")

    async def _params(self, call: CallFields, *, logprobs: int | None) -> SamplingParams:
        """How the call's tokens are chosen; a schema or grammar is checked in a thread, since it may take long."""
        params = call.sampling(logprobs=logprobs)
        try:
            structure = call.structure()
            if structure is None:
                return params
            if not self.limits.structured_outputs:
                raise ApiError(
                    400,
                    f"{structure.param} is not supported here: this engine makes up its text and follows no grammar",
                    param=structure.param,
                    code="unsupported_parameter",
                )
            grammar = await asyncio.wait_for(asyncio.to_thread(compile_grammar, structure), GRAMMAR_SECONDS)
        except StructureError as error:
            raise ApiError(400, str(error), param=error.param, code="invalid_value") from error
        except TimeoutError as error:
            message = f"the schema or grammar is too complex: checking it takes over {GRAMMAR_SECONDS:.0f} seconds"
            raise ApiError(400, message, code="invalid_value") from error
        return replace(params, grammar=grammar)

    def _policy_of(self, call: CallFields) -> ContextPolicy:
        return call.context_policy or self.limits.policy.context_policy

    def _begin(
        self,
        call: CallFields,
        fitted: list[Fitted],
        plan: "_Plan",
        *,
        wire: Wire,
        reader: _CallReader | None = None,
        thoughts: _ThoughtReader | None = None,
    ) -> Generation:
        count = call.n or 1
        most = self.limits.policy.max_n
        if count > most:
            raise ApiError(400, f"n is {count}; this server allows {most}", param="n", code="invalid_value")
        prompts = [prompt.ids for prompt in fitted]
        self.check_queue(count * len(prompts))
        window = self.limits.window if self._policy_of(call) is ContextPolicy.SLIDING_WINDOW else None
        limits = [plan.output_limit(len(prompt), self.limits, window) for prompt in prompts]
        for prompt in prompts:
            self.check_ids(prompt, param=plan.param)
        # Asked again: an adapter may have gone while the prompt was made ready.
        adapter = self.adapter_of(call.model)
        wake = Wake()
        stops = call.stops()
        choices = [
            Choice(
                index,
                Request(
                    id=f"{wire.id}-{index}",
                    prompt_tokens=len(prompts[index // count]),
                    max_tokens=limits[index // count],
                    arrival=plan.arrival,
                    prompt_ids=prompts[index // count],
                    params=plan.params_of(index % count),
                    priority=call.priority,
                    cache_salt=call.cache_salt or "",
                    adapter=adapter,
                    # Where a window holds everything it changes nothing, and what others computed can be shared.
                    window=window
                    if window is not None and len(prompts[index // count]) + limits[index // count] > window.tokens
                    else None,
                ),
                Detokenizer(stops, include_stop=call.include_stop_str_in_output),
                tokenizer=self.tokenizer,
                wake=wake,
            )
            for index in range(count * len(prompts))
        ]
        for choice in choices:
            if reader is not None:
                choice.read_calls(reader)
            if thoughts is not None:
                choice.read_thoughts(thoughts)
        truncated = sum(prompt.truncated_tokens for prompt in fitted)
        return Generation(
            self.engine,
            wire,
            choices,
            wake=wake,
            truncated_tokens=truncated,
            interval=self.limits.policy.stream_interval if call.stream else 1,
        )

    def check_queue(self, count: int) -> None:
        """Raise ApiError when the queue has no place for `count` more requests."""
        policy = self.limits.policy
        limit, token_limit = policy.max_num_queued_reqs, policy.max_num_queued_tokens
        if limit is None and token_limit is None:
            return
        status = self.engine.status()
        full: str | None = None
        if limit is not None and status.waiting + count > limit:
            full = f"{limit} requests may wait"
        elif token_limit is not None and status.waiting_tokens >= token_limit:
            full = f"prompts of {status.waiting_tokens} tokens wait, and {token_limit} may"
        if full is not None:
            raise ApiError(
                429,
                f"the queue is full: {full}",
                type="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(RETRY_AFTER_SECONDS)},
            )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all requests of a call share. `default` = the client named no max_tokens, so it may be cut to what fits."""

    params: SamplingParams
    arrival: float
    max_tokens: int | None
    param: str
    default: bool

    def params_of(self, copy: int) -> SamplingParams:
        """Copies of one prompt differ in their seed only."""
        if copy == 0 or self.params.seed is None:
            return self.params
        return replace(self.params, seed=self.params.seed + copy)

    def prompt_room(self, limits: Limits) -> int:
        """Tokens that the prompt may have where a context policy may cut it; below 1 when the answer fills it all."""
        context = min(limits.max_model_len, limits.kv_tokens)
        if self.max_tokens is not None and not self.default:
            return context - self.max_tokens
        return context - min(self.max_tokens or DEFAULT_ANSWER_TOKENS, context // 4)

    def output_limit(self, prompt_tokens: int, limits: Limits, window: Window | None) -> int:
        """max_tokens of a request with such a prompt; raises ApiError when it can never fit."""
        room = limits.max_model_len - prompt_tokens
        if prompt_tokens == 0:
            raise ApiError(400, f"{self.param} is empty", param=self.param, code="invalid_value")
        if room < (1 if self.default else (self.max_tokens or 1)):
            output = 1 if self.default else self.max_tokens or 1
            asks_too_much = output >= limits.max_model_len
            advice = "ask for fewer" if asks_too_much else f"shorten the {self.param}, or let context_policy do that"
            raise ApiError(
                400,
                f"this model's context holds {limits.max_model_len} tokens; {prompt_tokens} in the {self.param} "
                f"and {output} of output are {prompt_tokens + output}: {advice}",
                param="max_tokens" if asks_too_much else self.param,
                code="context_length_exceeded",
            )
        if window is None and prompt_tokens > limits.kv_tokens:
            raise ApiError(
                400,
                f"the {self.param} has {prompt_tokens} tokens; the KV cache holds {limits.kv_tokens}",
                param=self.param,
                code="context_length_exceeded",
            )
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        if self.params.min_tokens > max_tokens:
            raise ApiError(
                400,
                f"min_tokens is {self.params.min_tokens}; at most {max_tokens} tokens are generated",
                param="min_tokens",
                code="invalid_value",
            )
        return max_tokens


def _envelope(call: CallFields, *, with_logprobs: bool, is_chat: bool) -> Envelope:
    return Envelope(
        id=("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex,
        created=int(time.time()),
        model=call.model,
        is_chat=is_chat,
        with_logprobs=with_logprobs,
        with_usage=call.stream_options is not None and call.stream_options.include_usage,
    )


def _characters(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> int:
    """About what the template makes of them, calls and the tools' schemas included."""
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    return (
        sum(len(message.text()) for message in messages)
        + sum(len(str(call.arguments)) for call in calls)
        + sum(len(tool.function.description or "") + len(str(tool.function.parameters)) for tool in tools)
    )


def failure_of(output: Output) -> ApiError:
    """The engine's word as the client sees it."""
    message = output.error or "the request failed"
    if output.is_refusal:
        return ApiError(400, message, code="context_length_exceeded")
    if output.finish_reason is FinishReason.ABORT:
        return ApiError(
            503,
            message,
            type="server_error",
            code="aborted",
            headers={"retry-after": str(RETRY_AFTER_SECONDS)},
        )
    return ApiError(500, message, type="server_error", code="internal_error")
