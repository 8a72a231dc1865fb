"""A small OpenAI completions server around engines that have none which batches: transformers and llama.cpp.

Requests that are waiting together are one static batch, greedy, streamed token by token; the next batch begins when the
last has ended. Runs in the peer's own environment, so it needs nothing but the standard library and the peer.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

GATHER_SECONDS = 0.02
"""How long a batch waits for others that come at the same moment."""
Emit = Callable[[int, str], None]
"""Called with the place in the batch and the text of its next token."""


class Backend(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def generate(self, prompts: Sequence[list[int]], tokens: int, emit: Emit) -> None:
        """Exactly `tokens` tokens after each prompt."""
        ...


class Transformers:
    """A folder of safetensors, in fp32."""

    def __init__(self, path: str, *, slots: int, context: int, threads: int) -> None:
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def generate(self, prompts: Sequence[list[int]], tokens: int, emit: Emit) -> None:
        torch, longest = self._torch, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

        def watch(so_far: Any, scores: Any, **_: Any) -> Any:
            for place, token in enumerate(so_far[:, -1].tolist()):
                emit(place, self._tokenizer.decode([token]))
            return torch.zeros(len(prompts), dtype=torch.bool)

        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0,
                stopping_criteria=[watch],
            )  # fmt: skip


class LlamaCpp:
    """A GGUF file, through llama.cpp's own batches."""

    BATCH = 2048

    def __init__(self, path: str, *, slots: int, context: int, threads: int) -> None:
        import llama_cpp
        import numpy

        self._lib, self._numpy = llama_cpp, numpy
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = slots * context, slots, self.BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        ids = (self._lib.llama_token * (len(data) + 8))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])

    def generate(self, prompts: Sequence[list[int]], tokens: int, emit: Emit) -> None:
        lib = self._lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        work = [
            (token, position, place, position == len(prompt) - 1)
            for place, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for step in range(tokens):
            chosen = self._decode(work)
            for place, token in sorted(chosen.items()):
                emit(place, self._piece(token))
            work = [(chosen[place], len(prompt) + step, place, True) for place, prompt in enumerate(prompts)]

    def _decode(self, work: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """The most likely token at each position that asks for one, by place."""
        chosen: dict[int, int] = {}
        batch = self._batch
        for start in range(0, len(work), self.BATCH):
            part = work[start : start + self.BATCH]
            batch.n_tokens = len(part)
            for row, (token, position, place, is_wanted) in enumerate(part):
                batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
                batch.seq_id[row][0], batch.logits[row] = place, is_wanted
            if self._lib.llama_decode(self._context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for row, (_, _, place, is_wanted) in enumerate(part):
                if is_wanted:
                    logits = self._lib.llama_get_logits_ith(self._context, row)
                    chosen[place] = int(self._numpy.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        return chosen

    def _piece(self, token: int) -> str:
        import ctypes

        buffer = ctypes.create_string_buffer(64)
        size = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[: max(0, size)].decode(errors="replace")


class Call:
    """A request that waits for its place in a batch."""

    def __init__(self, prompt: list[int], tokens: int) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.texts: asyncio.Queue[str | None] = asyncio.Queue()


class Server:
    def __init__(self, backend: Backend, *, slots: int) -> None:
        self._backend = backend
        self._slots = slots
        self._waiting: asyncio.Queue[Call] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1)

    async def batch(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            calls = [await self._waiting.get()]
            await asyncio.sleep(GATHER_SECONDS)
            while len(calls) < self._slots and not self._waiting.empty():
                calls.append(self._waiting.get_nowait())
            sent = [0] * len(calls)

            def emit(place: int, text: str, calls: list[Call] = calls, sent: list[int] = sent) -> None:
                if sent[place] < calls[place].tokens:
                    sent[place] += 1
                    loop.call_soon_threadsafe(calls[place].texts.put_nowait, text)

            prompts, tokens = [call.prompt for call in calls], max(call.tokens for call in calls)
            try:
                await loop.run_in_executor(self._thread, self._backend.generate, prompts, tokens, emit)
            finally:
                for call in calls:
                    call.texts.put_nowait(None)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        is_stream = "/completions" in head.partition("\r\n")[0]
        kind = "text/event-stream" if is_stream else "application/json"
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode())
        if is_stream:
            await self._stream(body, writer)
        else:
            writer.write(json.dumps({"object": "list", "data": [{"id": "peer", "object": "model"}]}).encode())
        await writer.drain()
        writer.close()

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        call = Call(self._backend.encode(body["prompt"]), int(body["max_tokens"]))
        self._waiting.put_nowait(call)
        count = 0
        while (text := await call.texts.get()) is not None:
            count += 1
            writer.write(_event({"choices": [{"index": 0, "text": text, "finish_reason": None}]}))
            await writer.drain()
        usage = {"prompt_tokens": len(call.prompt), "completion_tokens": count}
        writer.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


BACKENDS: dict[str, type[Transformers] | type[LlamaCpp]] = {"transformers": Transformers, "llama.cpp": LlamaCpp}


async def serve(backend: Backend, *, port: int, slots: int) -> None:
    server = Server(backend, slots=slots)
    listener = await asyncio.start_server(server.answer, "127.0.0.1", port)
    async with listener:
        await server.batch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=sorted(BACKENDS), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each slot")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    backend = BACKENDS[arguments.backend](
        arguments.model, slots=arguments.slots, context=arguments.context, threads=arguments.threads
    )
    print("loaded", file=sys.stderr, flush=True)
    asyncio.run(serve(backend, port=arguments.port, slots=arguments.slots))


if __name__ == "__main__":
    main()
