"""From a checked call to requests in the engine, and from tokens back to answers and streams.

Owns what a call means: prompts to ids, limits, choices, stop strings, usage. The wire's shapes are in `openai`, HTTP in
`server`. Runs on the event loop.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tidegate_engine.detokenizer import Detokenizer
from tidegate_engine.engine import Output
from tidegate_engine.engine_client import EngineClient
from tidegate_engine.openai import (
    DONE,
    ApiError,
    CallFields,
    ChatCall,
    ChatMessage,
    CompletionCall,
    Delta,
    Envelope,
    TokenEntry,
    Usage,
    event,
)
from tidegate_engine.request import FinishReason, Request, SampledToken, SamplingParams
from tidegate_engine.structured import StructureError, compile_grammar

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat may fill the context."""
INLINE_ENCODE_CHARACTERS = 4096
"""Longer texts are tokenized in a thread, so that the event loop stays free."""
RETRY_AFTER_SECONDS = 1
GRAMMAR_SECONDS = 5.0
"""How long the check of a schema or grammar may take."""


class Tokenizer(Protocol):
    """What the HTTP side needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; empty for special tokens."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation in the model's template, ending where the answer begins."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may ask for."""

    served_names: tuple[str, ...]
    max_model_len: int
    kv_tokens: int
    max_queued: int | None = None
    structured_outputs: bool = False
    """Whether the runner can hold an answer to a grammar."""


class Choice:
    """One answer in the making: takes the engine's outputs, gives deltas."""

    __slots__ = ("_detokenizer", "_token_bytes", "_wake", "closed", "index", "length", "pending", "request", "tokens")

    def __init__(
        self, index: int, request: Request, detokenizer: Detokenizer, *, tokenizer: Tokenizer, wake: asyncio.Event
    ) -> None:
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

    def advance(self) -> Delta | None:
        """Everything since the last call as one delta, None when nothing can be shown; raises ApiError."""
        outputs, self.pending = self.pending, []
        text = ""
        entries: list[TokenEntry] = []
        finish: str | None = None
        for output in outputs:
            if output.error is not None:
                self.closed = True
                raise _failure(output)
            if output.token is not None:
                text += self._take(output.token, ends_text=output.finish_reason is FinishReason.STOP, entries=entries)
            if output.finish_reason is not None:
                text += self._detokenizer.finish()
                finish = output.finish_reason.value
            if self._detokenizer.matched_stop is not None:
                finish = FinishReason.STOP.value
            if finish is not None:
                self.closed = True
                break
        self.length += len(text)
        if not (text or entries or finish):
            return None
        return Delta(self.index, text, tuple(entries), finish)

    def _take(self, token: SampledToken, *, ends_text: bool, entries: list[TokenEntry]) -> str:
        self.tokens += 1
        data = b"" if ends_text else self._token_bytes(token.token_id)
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
        envelope: Envelope,
        choices: Sequence[Choice],
        *,
        wake: asyncio.Event,
        with_usage: bool,
    ) -> None:
        self.envelope = envelope
        self._engine = engine
        self._choices = choices
        self._wake = wake
        self._with_usage = with_usage

    def start(self) -> None:
        for choice in self._choices:
            self._engine.submit(choice.request, choice)

    def abort(self) -> None:
        """Free what the engine still holds for this call."""
        for choice in self._choices:
            if not choice.closed:
                choice.closed = True
                self._engine.abort(choice.request.id)

    async def answer(self) -> dict[str, object]:
        """The whole answer; raises ApiError."""
        texts: list[list[str]] = [[] for _ in self._choices]
        entries: list[list[TokenEntry]] = [[] for _ in self._choices]
        reasons: list[str | None] = [None for _ in self._choices]
        async for deltas in self._deltas():
            for delta in deltas:
                texts[delta.index].append(delta.text)
                entries[delta.index].extend(delta.entries)
                reasons[delta.index] = delta.finish_reason
        choices = [
            Delta(choice.index, "".join(texts[choice.index]), tuple(entries[choice.index]), reasons[choice.index])
            for choice in self._choices
        ]
        return self.envelope.answer(choices, self._usage())

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events, one write for all that a step brought; an error becomes an event."""
        envelope = self.envelope
        begun: set[int] = set()
        try:
            async for deltas in self._deltas():
                parts = []
                for delta in deltas:
                    if envelope.is_chat and delta.index not in begun:
                        begun.add(delta.index)
                        parts.append(event(envelope.chunk([envelope.role(delta.index)])))
                    parts.append(event(envelope.chunk([envelope.delta(delta)])))
                yield b"".join(parts)
        except ApiError as error:
            yield event(error.body()) + DONE
            return
        end = event(envelope.chunk([], usage=self._usage().as_dict())) if self._with_usage else b""
        yield end + DONE

    async def _deltas(self) -> AsyncIterator[list[Delta]]:
        open_choices = list(self._choices)
        try:
            while open_choices:
                await self._wake.wait()
                self._wake.clear()
                deltas = []
                for choice in open_choices:
                    if choice.pending and (delta := choice.advance()) is not None:
                        deltas.append(delta)
                        if delta.finish_reason is not None and choice.request.finish_reason is None:
                            # A stop string: the engine does not know that the answer has ended.
                            self._engine.abort(choice.request.id, reason=FinishReason.STOP)
                if deltas:
                    open_choices = [choice for choice in open_choices if not choice.closed]
                    yield deltas
        finally:
            self.abort()

    def _usage(self) -> Usage:
        # Choices of one prompt share its list; the first of them tells what the cache held before the call.
        prompts = {id(choice.request.prompt_ids): choice.request for choice in reversed(self._choices)}.values()
        return Usage(
            prompt_tokens=sum(request.prompt_tokens for request in prompts),
            completion_tokens=sum(choice.tokens for choice in self._choices),
            cached_tokens=sum(request.num_cached for request in prompts),
        )


class Completions:
    """Turns calls into generations."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, limits: Limits) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits

    async def begin_completion(self, call: CompletionCall, *, arrival: float) -> Generation:
        self._check(call)
        prompts = [prompt if isinstance(prompt, list) else await self.encode(prompt) for prompt in call.prompts()]
        params = await self._params(call, logprobs=call.logprobs)
        wanted = DEFAULT_COMPLETION_TOKENS if call.max_tokens is None else call.max_tokens
        plan = _Plan(params, arrival, max_tokens=wanted, param="prompt", default=call.max_tokens is None)
        return self._begin(call, prompts, plan, is_chat=False)

    async def begin_chat(self, call: ChatCall, *, arrival: float) -> Generation:
        self._check(call)
        if call.top_logprobs and not call.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
        prompt = await self.encode_chat(call.messages)
        params = await self._params(call, logprobs=(call.top_logprobs or 0) if call.logprobs else None)
        max_tokens = call.max_completion_tokens or call.max_tokens
        plan = _Plan(params, arrival, max_tokens=max_tokens, param="messages", default=not max_tokens)
        return self._begin(call, [prompt], plan, is_chat=True)

    async def encode(self, text: str) -> list[int]:
        if len(text) <= INLINE_ENCODE_CHARACTERS:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        plain = [{"role": message.role, "content": message.text()} for message in messages]
        try:
            if sum(len(message["content"]) for message in plain) <= INLINE_ENCODE_CHARACTERS:
                return self.tokenizer.chat(plain)
            return await asyncio.to_thread(self.tokenizer.chat, plain)
        except ValueError as error:
            raise ApiError(400, f"the model's chat template refuses the messages: {error}", param="messages") from error

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.limits.served_names:
            served = ", ".join(self.limits.served_names)
            raise ApiError(
                404, f"the model {name!r} does not exist; served here: {served}", param="model", code="model_not_found"
            )

    def check_ids(self, ids: Iterable[int], *, param: str) -> None:
        if any(not 0 <= token_id < self.tokenizer.vocab_size for token_id in ids):
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
        self.check_ids(call.stop_token_ids or (), param="stop_token_ids")
        self.check_ids(call.logit_bias or (), param="logit_bias")

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

    def _begin(self, call: CallFields, prompts: list[list[int]], plan: "_Plan", *, is_chat: bool) -> Generation:
        count = call.n or 1
        self._check_queue(count * len(prompts))
        for prompt in prompts:
            self.check_ids(prompt, param=plan.param)
        limits = [plan.output_limit(len(prompt), self.limits) for prompt in prompts]
        envelope = Envelope(
            id=("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex,
            created=int(time.time()),
            model=call.model,
            is_chat=is_chat,
            with_logprobs=plan.params.logprobs is not None,
        )
        wake = asyncio.Event()
        stops = call.stops()
        choices = [
            Choice(
                index,
                Request(
                    id=f"{envelope.id}-{index}",
                    prompt_tokens=len(prompts[index // count]),
                    max_tokens=limits[index // count],
                    arrival=plan.arrival,
                    prompt_ids=prompts[index // count],
                    params=plan.params_of(index % count),
                    cache_salt=call.cache_salt or "",
                ),
                Detokenizer(stops, include_stop=call.include_stop_str_in_output),
                tokenizer=self.tokenizer,
                wake=wake,
            )
            for index in range(count * len(prompts))
        ]
        with_usage = call.stream_options is not None and call.stream_options.include_usage
        return Generation(self.engine, envelope, choices, wake=wake, with_usage=with_usage)

    def _check_queue(self, count: int) -> None:
        limit = self.limits.max_queued
        if limit is not None and self.engine.status().waiting + count > limit:
            raise ApiError(
                429,
                f"the queue is full: {limit} requests may wait",
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

    def output_limit(self, prompt_tokens: int, limits: Limits) -> int:
        """max_tokens of a request with such a prompt; raises ApiError when it can never fit."""
        room = limits.max_model_len - prompt_tokens
        if prompt_tokens == 0:
            raise ApiError(400, f"{self.param} is empty", param=self.param, code="invalid_value")
        if room < (1 if self.default else (self.max_tokens or 1)):
            output = 1 if self.default else self.max_tokens
            raise ApiError(
                400,
                f"this model's context holds {limits.max_model_len} tokens; {prompt_tokens} in the {self.param} "
                f"and {output} of output are {prompt_tokens + (output or 0)}",
                param=self.param,
                code="context_length_exceeded",
            )
        if prompt_tokens > limits.kv_tokens:
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


def _failure(output: Output) -> ApiError:
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
