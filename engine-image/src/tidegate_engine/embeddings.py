"""From a checked embedding call to pooled requests in the engine, and from their vectors to the answer.

Owns what the call means: inputs to ids, limits, dimensions, encodings, usage. A few inputs of a call are in the engine
at a time, so that a long list neither fills its queue nor its memory. HTTP is in `server`; runs on the event loop.
"""

import asyncio
import base64
import math
import struct
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from tidegate_engine.completions import INLINE_ENCODE_CHARACTERS, Completions, failure_of
from tidegate_engine.engine import Output
from tidegate_engine.openai import ApiError, EmbeddingCall
from tidegate_engine.request import Request
from tidegate_engine.runner import ModelInfo

MAX_IN_FLIGHT = 64
"""Inputs of one call that the engine holds."""
FLOAT_BYTES = 4

Answer = Callable[[Sequence[bytes], int], Mapping[str, object]]
"""The answer's shape, of the encoded vectors as JSON and the number of prompt tokens."""


@dataclass(frozen=True, slots=True)
class _Encoding:
    """How a vector is shown."""

    as_base64: bool
    dimensions: int | None
    is_normalised: bool

    def encode(self, vector: bytes) -> bytes:
        """`vector` (float32, little-endian) as JSON."""
        if self.dimensions is not None:
            vector = self._cut(vector, self.dimensions)
        if self.as_base64:
            return b'"' + base64.b64encode(vector) + b'"'
        return orjson.dumps(_numbers(vector))

    def _cut(self, vector: bytes, dimensions: int) -> bytes:
        """The first `dimensions`, as Matryoshka models mean it: of the length one again, where the whole is."""
        numbers = _numbers(vector[: dimensions * FLOAT_BYTES])
        length = math.sqrt(sum(number * number for number in numbers)) if self.is_normalised else 1.0
        return struct.pack(f"<{dimensions}f", *(number / (length or 1.0) for number in numbers))


class _Slot:
    """Where the output of one input goes."""

    __slots__ = ("_call", "_index")

    def __init__(self, call: "EmbeddingWork", index: int) -> None:
        self._call = call
        self._index = index

    def push(self, output: Output) -> None:
        self._call.take(self._index, output)


class EmbeddingWork:
    """The inputs of one call, from submission to the answer. Whoever drops it early calls `abort`."""

    def __init__(
        self,
        completions: Completions,
        prompts: Sequence[list[int]],
        *,
        encoding: _Encoding,
        make_answer: Answer,
        make_request: Callable[[int, list[int]], Request],
    ) -> None:
        self._engine = completions.engine
        self._prompts = prompts
        self._encoding = encoding
        self._make_answer = make_answer
        self._make_request = make_request
        self._vectors: list[bytes] = [b""] * len(prompts)
        self._in_flight: dict[int, Request] = {}
        self._submitted = 0
        self._error: ApiError | None = None
        self._changed = asyncio.Event()
        self._is_closed = False

    def start(self) -> None:
        while self._submitted < len(self._prompts) and len(self._in_flight) < MAX_IN_FLIGHT:
            index = self._submitted
            self._submitted += 1
            request = self._in_flight[index] = self._make_request(index, self._prompts[index])
            self._engine.submit(request, _Slot(self, index))

    def take(self, index: int, output: Output) -> None:
        if self._is_closed:
            return
        self._in_flight.pop(index, None)
        if output.error is not None or output.token is None or output.token.embedding is None:
            self._error = failure_of(output)
        else:
            self._vectors[index] = self._encoding.encode(output.token.embedding)
            self.start()
        self._changed.set()

    def abort(self) -> None:
        """Free what the engine still holds for this call."""
        self._is_closed = True
        for request in self._in_flight.values():
            self._engine.abort(request.id)
        self._in_flight.clear()

    async def answer(self) -> Mapping[str, object]:
        """The whole answer; raises ApiError."""
        try:
            while self._error is None and (self._in_flight or self._submitted < len(self._prompts)):
                await self._changed.wait()
                self._changed.clear()
            if self._error is not None:
                raise self._error
            return self._make_answer(self._vectors, sum(map(len, self._prompts)))
        finally:
            self.abort()


async def begin_embedding(
    completions: Completions, call: EmbeddingCall, info: ModelInfo, *, arrival: float, make_answer: Answer | None = None
) -> EmbeddingWork:
    """Check the call and tokenize its inputs; raises ApiError."""
    completions.check_model(call.model)
    adapter = None if call.model is None else completions.adapter_of(call.model)
    size, pooling = info.embedding_size, info.pooling
    if size is None or pooling is None:
        raise ApiError(
            400,
            "this engine makes up its text and computes no embeddings; they need --runner torch",
            param="model",
            code="unsupported_parameter",
        )
    if call.dimensions is not None and call.dimensions > size:
        message = f"dimensions is {call.dimensions}; the model's embeddings have {size}, of which the first are given"
        raise ApiError(400, message, param="dimensions", code="invalid_value")
    prompts = await _prompts(completions, call)
    completions.check_queue(min(len(prompts), MAX_IN_FLIGHT))
    name = f"embd-{uuid.uuid4().hex}"

    def make_request(index: int, ids: list[int]) -> Request:
        return Request(
            id=f"{name}-{index}",
            prompt_tokens=len(ids),
            max_tokens=1,
            arrival=arrival,
            prompt_ids=ids,
            priority=call.priority,
            cache_salt=call.cache_salt or "",
            adapter=adapter,
            pooling=pooling,
        )

    return EmbeddingWork(
        completions,
        prompts,
        encoding=_Encoding(call.encoding_format == "base64", call.dimensions, info.embedding_normalised),
        make_answer=make_answer or _openai_answer(call, name),
        make_request=make_request,
    )


async def _prompts(completions: Completions, call: EmbeddingCall) -> list[list[int]]:
    """The inputs' ids, each within the context."""
    limits = completions.limits
    room = min(limits.max_model_len, limits.kv_tokens)
    completions.check_priority(call.priority)
    prompts = []
    for place, ids in enumerate(await _encoded(completions, call.inputs())):
        if call.truncate_prompt_tokens is not None:
            kept = room if call.truncate_prompt_tokens == -1 else min(room, call.truncate_prompt_tokens)
            ids = ids[max(0, len(ids) - kept) :]
        if not 0 < len(ids) <= room:
            message = (
                f"input {place} is empty"
                if not ids
                else f"input {place} has {len(ids)} tokens; this model's context holds {room}"
            )
            raise ApiError(400, message, param="input", code="context_length_exceeded" if ids else "invalid_value")
        completions.check_ids(ids, param="input")
        prompts.append(ids)
    return prompts


async def _encoded(completions: Completions, inputs: Sequence[str | list[int]]) -> list[list[int]]:
    """Ids of the inputs; many texts are tokenized in a thread, so that the event loop stays free."""
    encode = completions.tokenizer.encode

    def encode_all() -> list[list[int]]:
        return [each if isinstance(each, list) else encode(each) for each in inputs]

    characters = sum(len(each) for each in inputs if isinstance(each, str))
    return encode_all() if characters <= INLINE_ENCODE_CHARACTERS else await asyncio.to_thread(encode_all)


def _openai_answer(call: EmbeddingCall, name: str) -> Answer:
    created = int(time.time())

    def answer(vectors: Sequence[bytes], tokens: int) -> Mapping[str, object]:
        return {
            "id": name,
            "object": "list",
            "created": created,
            "data": [
                {"object": "embedding", "index": index, "embedding": orjson.Fragment(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": call.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    return answer


def _numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // FLOAT_BYTES}f", vector)
