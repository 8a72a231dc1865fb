"""The OpenAI API of the engine, through the official client and as raw HTTP, over real sockets."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ValidationError

from tidegate_engine import server
from tidegate_engine.byte_tokenizer import ByteTokenizer
from tidegate_engine.engine import Engine
from tidegate_engine.live_policy import LivePolicy
from tidegate_engine.ollama import OllamaChatCall, OllamaGenerateCall
from tidegate_engine.openai import ChatCall, CompletionCall, DetokenizeCall, EmbeddingCall, TokenizeCall
from tidegate_engine.responses import ResponseCall
from tidegate_engine.serve import Process
from tidegate_engine.steptime import Profile

StartEngine = Callable[..., Awaitable[Process]]
Loops = Mapping[Process, Engine]
MakeScript = Callable[..., Any]
USER: Any = [{"role": "user", "content": "What is the tide?"}]
TOOL: Any = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def engine(start_engine: StartEngine) -> Process:
    return await start_engine()


@pytest.fixture
async def client(engine: Process) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(engine) as client:
        yield client


@pytest.fixture
async def http(engine: Process) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(engine) as http:
        yield http


def client_of(engine: Process, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{engine.api_port}/v1", api_key=key, max_retries=0)


def http_of(engine: Process) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=30)


def used_blocks(loop: Engine) -> int:
    return loop.scheduler.blocks.used


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the engine's thread changes it
            await asyncio.sleep(0.005)


async def test_a_chat_answers_with_usage_and_the_asked_length(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fast", messages=USER, max_tokens=12)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant" and choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


async def test_a_streamed_chat_adds_up_to_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="fast", messages=USER, max_tokens=20, seed=3)
    stream: Any = await client.chat.completions.create(
        model="fast",
        messages=USER,
        max_completion_tokens=20,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_a_stream_ends_with_done_and_has_no_usage_unless_asked_for(http: httpx.AsyncClient) -> None:
    body = {"model": "fast", "prompt": "x", "max_tokens": 3, "stream": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-1])


async def test_the_second_call_with_the_same_prompt_reports_cached_tokens(client: openai.AsyncOpenAI) -> None:
    prompt = "the tide " * 30
    first = await client.completions.create(model="fast", prompt=prompt, max_tokens=2)
    second = await client.completions.create(model="fast", prompt=prompt, max_tokens=2)
    assert first.usage is not None and first.usage.prompt_tokens_details is not None
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 64


@pytest.mark.parametrize(
    ("prompt", "tokens", "choices"),
    [("abcdefgh", 2, 1), ([5, 6, 7], 3, 1), (["abcd", "efghijkl"], 3, 2), ([[1, 2], [3]], 3, 2)],
)
async def test_prompts_may_be_a_text_ids_or_a_list_of_either(
    client: openai.AsyncOpenAI, prompt: Any, tokens: int, choices: int
) -> None:
    answer = await client.completions.create(model="fast", prompt=prompt, max_tokens=1)
    assert answer.usage is not None and answer.usage.prompt_tokens == tokens
    assert [choice.index for choice in answer.choices] == list(range(choices))


async def test_n_gives_choices_of_their_own_seed_and_counts_the_prompt_once(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fast", messages=USER, n=3, seed=1, max_tokens=16)
    alone = await client.chat.completions.create(model="fast", messages=USER, n=1, seed=1, max_tokens=16)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert texts[0] == alone.choices[0].message.content
    assert answer.usage is not None and alone.usage is not None
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert answer.usage.completion_tokens == 48


async def test_n_choices_stream_side_by_side(client: openai.AsyncOpenAI) -> None:
    stream: Any = await client.chat.completions.create(
        model="fast", messages=USER, n=2, seed=1, max_tokens=8, stream=True
    )
    finished = []
    texts = {0: "", 1: ""}
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finished.append(choice.index)
    assert sorted(finished) == [0, 1]
    assert all(texts.values()) and texts[0] != texts[1]


async def test_completions_carry_logprobs_with_offsets_into_the_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fast", prompt="x", max_tokens=4, logprobs=2)
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None and choice.logprobs.top_logprobs is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert [
        choice.text[offset:].startswith(token)
        for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    ] == [True] * 4
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_chats_carry_logprobs_with_bytes(client: openai.AsyncOpenAI, stream: bool) -> None:
    arguments: dict[str, Any] = {"model": "fast", "messages": USER, "max_tokens": 4, "logprobs": True}
    if stream:
        chunks = [
            chunk async for chunk in await client.chat.completions.create(**arguments, top_logprobs=3, stream=True)
        ]
        rows = [row for chunk in chunks if chunk.choices[0].logprobs for row in chunk.choices[0].logprobs.content]
    else:
        answer = await client.chat.completions.create(**arguments, top_logprobs=3)
        rows = answer.choices[0].logprobs.content
    assert len(rows) == 4
    assert all(bytes(row.bytes).decode() == row.token and len(row.top_logprobs) == 3 for row in rows)


async def test_logprobs_of_multibyte_text_keep_the_true_bytes(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    engine = await start_engine(runner=make_script("né😀 là!"))
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(model="fast", messages=USER, max_tokens=3, logprobs=True)
    rows = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert answer.choices[0].message.content == "né😀 là!"
    assert b"".join(bytes(row.bytes or []) for row in rows or []) == "né😀 là!".encode()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_answer_before_it(
    start_engine: StartEngine, make_script: MakeScript, stream: bool, loops: Loops
) -> None:
    engine = await start_engine(runner=make_script("one two STOP more and more text "))
    async with client_of(engine) as client:
        arguments: dict[str, Any] = {"model": "fast", "prompt": "x", "max_tokens": 200, "stop": ["o STO", "never"]}
        if stream:
            chunks = [chunk async for chunk in await client.completions.create(**arguments, stream=True)]
            text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
        else:
            answer = await client.completions.create(**arguments)
            text, reason = answer.choices[0].text, answer.choices[0].finish_reason
            assert answer.usage.completion_tokens == 3
    assert (text, reason) == ("one tw", "stop")
    await until(lambda: used_blocks(loops[engine]) == 0)
    async with http_of(engine) as http:
        assert 'reason="stop"} 1.0' in (await http.get("/metrics")).text


async def test_a_stop_string_within_min_tokens_is_text(start_engine: StartEngine, make_script: MakeScript) -> None:
    engine = await start_engine(runner=make_script("stop"))
    async with client_of(engine) as client:
        answer = await client.completions.create(
            model="fast", prompt="x", max_tokens=9, stop="stop", extra_body={"min_tokens": 3}
        )
    assert answer.choices[0].text == "stopstopstop"


async def test_stop_token_ids_end_the_answer_without_their_text(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    engine = await start_engine(runner=make_script("abcdefghijkl"))
    stop_id = ByteTokenizer().encode("ijkl")[0]
    async with client_of(engine) as client:
        answer = await client.completions.create(
            model="fast", prompt="x", max_tokens=9, extra_body={"stop_token_ids": [stop_id]}
        )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcdefgh", "stop")


BAD_BODIES: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    ("completions", {"prompt": "x"}, 400, "model", "invalid_value"),
    ("completions", {"model": "fast"}, 400, "prompt", "invalid_value"),
    ("completions", {"model": "other", "prompt": "x"}, 404, "model", "model_not_found"),
    ("completions", {"model": "fast", "prompt": {"a": 1}}, 400, "prompt", "invalid_value"),
    ("completions", {"model": "fast", "prompt": ""}, 400, "prompt", "invalid_value"),
    ("completions", {"model": "fast", "prompt": [-1]}, 400, "prompt", "invalid_value"),
    ("completions", {"model": "fast", "prompt": "x", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    ("completions", {"model": "fast", "prompt": "x", "temperature": 9}, 400, "temperature", "invalid_value"),
    ("completions", {"model": "fast", "prompt": "x", "n": 17}, 400, "n", "invalid_value"),
    ("completions", {"model": "fast", "prompt": "x", "stop": [1]}, 400, "stop", "invalid_value"),
    ("completions", {"model": "fast", "prompt": "x", "echo": True}, 400, "echo", "unsupported_parameter"),
    ("completions", {"model": "fast", "prompt": "x", "min_tokens": 99}, 400, "min_tokens", "invalid_value"),
    ("completions", {"model": "fast", "prompt": "x", "max_tokens": 9999}, 400, "max_tokens", "context_length_exceeded"),
    ("completions", {"model": "fast", "prompt": [1] * 512}, 400, "prompt", "context_length_exceeded"),
    ("completions", {"model": "fast", "prompt": [-1] * 512}, 400, "prompt", "context_length_exceeded"),
    ("completions", {"model": "fast", "prompt": "x", "stop_token_ids": [-1]}, 400, "stop_token_ids", "invalid_value"),
    (
        "completions",
        {"model": "fast", "prompt": "x", "stop_token_ids": [2**40]},
        400,
        "stop_token_ids",
        "invalid_value",
    ),
    ("completions", {"model": "fast", "prompt": "x", "best_of": 3}, 400, "best_of", "unsupported_parameter"),
    (
        "completions",
        {"model": "fast", "prompt": "x", "logit_bias": {str(2**40): 1}},
        400,
        "logit_bias",
        "invalid_value",
    ),
    ("completions", {"model": "fast", "prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias.a", "invalid_value"),
    ("completions", {"model": "fast", "prompt": "x", "logit_bias": {"7": 101}}, 400, "logit_bias", "invalid_value"),
    (
        "completions",
        {"model": "fast", "prompt": "x", "guided_regex": "a"},
        400,
        "guided_regex",
        "unsupported_parameter",
    ),
    (
        "completions",
        {"model": "fast", "prompt": "x", "guided_regex": "a", "guided_choice": ["a"]},
        400,
        "guided_choice",
        "invalid_value",
    ),
    (
        "chat/completions",
        {"model": "fast", "messages": USER, "response_format": {"type": "json_object"}},
        400,
        "response_format",
        "unsupported_parameter",
    ),
    (
        "chat/completions",
        {"model": "fast", "messages": USER, "response_format": {"type": "xml"}},
        400,
        "response_format.type",
        "invalid_value",
    ),
    ("chat/completions", {"model": "fast", "messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "invalid_value"),
    ("chat/completions", {"model": "fast", "messages": []}, 400, "messages", "invalid_value"),
    ("chat/completions", {"model": "fast", "messages": [{"role": "boss"}]}, 400, "messages.0.role", "invalid_value"),
    ("chat/completions", {"model": "fast", "messages": USER, "tools": [{}]}, 400, "tools.0.function", "invalid_value"),
    ("chat/completions", {"model": "fast", "messages": USER, "tools": [TOOL]}, 400, "tools", "unsupported_parameter"),
    (
        "chat/completions",
        {"model": "fast", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content",
        "invalid_value",
    ),
    *(
        ("completions", {"model": "fast", "prompt": "x", field: value}, 400, field, "invalid_value")
        for field, value in [
            ("repetition_penalty", 1e-300),
            ("repetition_penalty", 1e300),
            ("seed", 1 << 63),
            ("seed", -(1 << 70)),
            ("top_k", 1 << 64),
        ]
    ),
    ("completions", {"model": "fast", "prompt": [[1]] * 9, "n": 15}, 400, "n", "invalid_value"),
    ("completions", {"model": "fast", "prompt": "x", "priority": 1}, 400, "priority", "unsupported_parameter"),
    ("completions", {"model": "fast", "prompt": "x", "priority": 9999}, 400, "priority", "invalid_value"),
    ("embeddings", {"model": "fast", "input": "x"}, 400, "model", "unsupported_parameter"),
    ("embeddings", {"model": "fast", "input": {}}, 400, "input", "invalid_value"),
    (
        "chat/completions",
        {"model": "fast", "messages": [{"role": "user", "content": "x" * 4000}]},
        400,
        "messages",
        "context_length_exceeded",
    ),
]


DEEP: Any = json.loads("[" * 200 + "]" * 200)
DEEP_TOOL: Any = {"function": {"name": "tide", "parameters": {str(key): DEEP for key in range(100)}}}
LONG_AND_WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionCall, {"prompt": [""] * 100 + [0]}),
    (CompletionCall, {"prompt": [[""] * 100] * 50}),
    (CompletionCall, {"prompt": "x", "stop": [0] * 100}),
    (CompletionCall, {"prompt": "x", "stop_token_ids": ["a"] * 100}),
    (CompletionCall, {"prompt": "x", "guided_choice": [0] * 100}),
    (CompletionCall, {"prompt": "x", "logit_bias": {f"a{key}": 999 for key in range(2000)}}),
    (EmbeddingCall, {"input": [{}] * 100}),
    (ChatCall, {"messages": [0] * 100}),
    (ChatCall, {"messages": [{"role": "user", "content": [0] * 100}]}),
    (ChatCall, {"messages": [{"role": "assistant", "tool_calls": [0] * 100}]}),
    (ChatCall, {"messages": USER, "tools": [0] * 100}),
    (ChatCall, {"messages": USER, "tools": [DEEP_TOOL]}),
    (TokenizeCall, {"messages": [0] * 100}),
    (TokenizeCall, {"messages": USER, "tools": [0] * 100}),
    (DetokenizeCall, {"tokens": ["a"] * 100}),
    (ResponseCall, {"input": [0] * 100}),
    (ResponseCall, {"input": [{"role": "user", "content": [0] * 100}]}),
    (ResponseCall, {"input": [{"type": "function_call_output", "call_id": "a", "output": [0] * 100}]}),
    (ResponseCall, {"input": "x", "tools": [0] * 100}),
    (ResponseCall, {"input": "x", "metadata": {str(key): 0 for key in range(100)}}),
    (OllamaChatCall, {"messages": [0] * 100}),
    (OllamaChatCall, {"messages": [{"role": "user", "images": [0] * 100}]}),
    (OllamaChatCall, {"messages": USER, "format": DEEP_TOOL["function"]["parameters"]}),
    (OllamaGenerateCall, {"context": ["a"] * 100}),
]


def test_a_long_body_of_wrong_items_makes_few_errors(subtests: pytest.Subtests) -> None:
    for kind, fields in LONG_AND_WRONG:
        with subtests.test(kind=kind.__name__, fields=list(fields)):
            with pytest.raises(ValidationError) as caught:
                kind.model_validate({"model": "fast", **fields})
            assert caught.value.error_count() <= 20


async def test_bad_requests_get_openais_error_shape(http: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for path, body, status, param, code in BAD_BODIES:
        with subtests.test(path=path, body=str(body)[:80]):
            answer = await http.post(f"/v1/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
            assert set(error) == {"message", "type", "param", "code"} and error["message"]


async def test_a_request_over_the_context_is_told_both_numbers(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="fast", prompt=[1] * 400, max_tokens=200)
    assert "512" in str(caught.value) and "600" in str(caught.value)


async def test_a_prompt_larger_than_the_kv_cache_is_refused_at_once(
    start_engine: StartEngine, fast_profile: Profile
) -> None:
    engine = await start_engine(profile=replace(fast_profile, kv_blocks=9))
    async with client_of(engine) as client:
        with pytest.raises(openai.BadRequestError, match="129 tokens; the KV cache holds 128"):
            await client.completions.create(model="fast", prompt=[1] * 129, max_tokens=1, stream=True)
        assert (await client.completions.create(model="fast", prompt=[1] * 128, max_tokens=1)).choices


async def test_a_body_that_is_not_json_and_an_unknown_path_get_the_error_shape(http: httpx.AsyncClient) -> None:
    broken = await http.post("/v1/completions", content=b"{nope")
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_json"
    unknown = await http.get("/v1/nothing")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "not_found"
    method = await http.get("/v1/completions")
    assert method.status_code == 405 and "error" in method.json()


@pytest.mark.parametrize("says_its_length", [True, False])
async def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, says_its_length: bool
) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1000)
    body = json.dumps({"model": "fast", "prompt": "x" * 900, "max_tokens": 1, "user": "y" * 900}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        yield body[:700]
        yield body[700:]

    answer = await http.post("/v1/completions", content=body if says_its_length else chunks())
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


async def test_a_full_queue_answers_429_with_retry_after(start_engine: StartEngine, fast_profile: Profile) -> None:
    engine = await start_engine(
        profile=replace(fast_profile, step=replace(fast_profile.step, base_seconds=0.02)),
        policy=LivePolicy(max_num_queued_reqs=2),
    )
    assert engine.state.loaded is not None
    client = engine.state.loaded.engine
    async with http_of(engine) as http:
        body = {"model": "fast", "prompt": [1] * 100, "max_tokens": 400}
        calls = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(6)]
        await until(lambda: client.status().running > 0 and client.status().waiting >= 2)
        refused = await http.post("/v1/completions", json=body)
        for call in calls:
            call.cancel()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    async with http_of(engine) as http:
        metrics = (await http.get("/metrics")).text
    assert 'tidegate_engine_request_rejections_total{reason="queue_full"} ' in metrics


async def test_models_lists_every_served_name(client: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["fast", "also-fast"]
    assert (await client.models.retrieve("also-fast")).id == "also-fast"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_tokenize_and_detokenize_are_inverse(http: httpx.AsyncClient) -> None:
    ids = (await http.post("/tokenize", json={"prompt": "high tide"})).json()
    assert ids["count"] == 3 and ids["max_model_len"] == 512
    assert (await http.post("/detokenize", json={"tokens": ids["tokens"]})).json() == {"prompt": "high tide"}
    assert (await http.post("/tokenize", json={"messages": USER})).json()["count"] > 3
    assert (await http.post("/tokenize", json={})).status_code == 400
    strings = (await http.post("/tokenize", json={"prompt": "high tide", "return_token_strs": True})).json()
    assert strings["token_strs"] == ["high", " tid", "e"] and ids["token_strs"] is None
    bare = {"messages": USER, "add_generation_prompt": False}
    asked = (await http.post("/tokenize", json={**bare, "tools": [TOOL]})).json()
    assert asked["count"] > (await http.post("/tokenize", json=bare)).json()["count"]


async def exchange(engine: Process, *parts: bytes) -> bytes:
    """What the server answers to `parts`, sent one after the other, until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.api_port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.01)  # so that they arrive apart
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


@pytest.mark.parametrize("head", [b"GET /" + b"a" * 70_000, b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000])
async def test_a_head_without_an_end_is_hung_up_on(start_engine: StartEngine, head: bytes) -> None:
    answer = await exchange(await start_engine(), head)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"longer than 65536 bytes" in answer


async def test_a_client_that_would_rather_speak_http_2_is_answered(start_engine: StartEngine) -> None:
    body = b'{"model": "fast", "prompt": "x", "max_tokens": 2}'
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\n"
        f"http2-settings: AAMAAABkAAQAAP__\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    engine = await start_engine()
    for cut in (0, 70, len(head) - 2, len(head) + 5):
        answer = await exchange(engine, (head.encode() + body)[:cut], (head.encode() + body)[cut:])
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'"completion_tokens":2' in answer
    assert (await exchange(engine, b"\x16\x03\x01\x02\x00")).startswith(b"HTTP/1.1 400 ")  # TLS


class ThreadNoting(ByteTokenizer):
    """Notes where the work is done: the tests' event loop runs in the main thread."""

    def __init__(self) -> None:
        super().__init__()
        self.on_main_thread: list[bool] = []

    def _note(self) -> None:
        self.on_main_thread.append(threading.current_thread() is threading.main_thread())

    def decode(self, ids: Sequence[int]) -> str:
        self._note()
        return super().decode(ids)

    def chat(self, *arguments: Any, **options: Any) -> list[int]:
        self._note()
        return super().chat(*arguments, **options)


async def test_long_tools_and_calls_and_texts_of_tokens_leave_the_event_loop_free(start_engine: StartEngine) -> None:
    tokenizer = ThreadNoting()
    long = "word " * 1000
    tool = {"function": {**TOOL["function"], "parameters": {"description": long}}}
    call = {"function": {"name": "tide", "arguments": json.dumps({"port": long})}}
    async with http_of(await start_engine(tokenizer=tokenizer)) as http:
        await http.post("/tokenize", json={"messages": USER, "tools": [tool]})
        await http.post("/tokenize", json={"messages": [{"role": "assistant", "tool_calls": [call]}]})
        await http.post("/tokenize", json={"prompt": "high tide", "return_token_strs": True})
        await http.post("/detokenize", json={"tokens": [1, 2, 3]})
    assert tokenizer.on_main_thread == [False] * (2 + 3 + 1)


async def test_more_tokens_than_the_context_holds_are_not_made_text(http: httpx.AsyncClient) -> None:
    strings = await http.post("/tokenize", json={"prompt": "tide" * 513, "return_token_strs": True})
    text = await http.post("/detokenize", json={"tokens": [-1] * 513})
    assert [answer.json()["error"]["code"] for answer in (strings, text)] == ["context_length_exceeded"] * 2
    assert (await http.post("/tokenize", json={"prompt": "tide" * 513})).json()["count"] == 513


async def test_a_developers_message_reaches_the_template_as_the_systems(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    runner = make_script("noon", ends=True)
    async with client_of(await start_engine(runner=runner)) as client:
        messages: Any = [{"role": "developer", "content": "Be short."}, *USER]
        await client.chat.completions.create(model="fast", messages=messages)
        await client.responses.create(model="fast", input=messages)
    assert runner.prompts == ["<system>\nBe short.\n<user>\nWhat is the tide?\n<assistant>\n"] * 2


async def test_arguments_nested_too_deep_for_a_template_are_the_clients_error(http: httpx.AsyncClient) -> None:
    arguments = '{"a":' + "[" * 1000 + "]" * 1000 + "}"
    call = {"id": "1", "function": {"name": "tide", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    answer = await http.post("/v1/chat/completions", json={"model": "fast", "messages": messages})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


async def test_plain_routes_answer(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ping")).status_code == 200
    assert "version" in (await http.get("/version")).json()
    assert (await http.get("/load")).json()["server_load"] == 0


async def test_with_an_api_key_everything_but_health_and_metrics_needs_it(start_engine: StartEngine) -> None:
    engine = await start_engine(api_keys=("first", "second"))
    async with http_of(engine) as http:
        for path in ("/v1/models", "/version", "/load", "/tokenize", "/anything"):
            answer = await http.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await http.get("/v1/models", headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
    async with client_of(engine, key="second") as client:
        assert (await client.models.list()).data


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_go_away_free_their_blocks(start_engine: StartEngine, stream: bool, loops: Loops) -> None:
    engine = await start_engine()
    scheduler, counts = loops[engine].scheduler, loops[engine].metrics.counts
    body = json.dumps({"model": "fast", "prompt": [7] * 64, "max_tokens": 400, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def leave_early(arrived: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.api_port)
        writer.write(head + body)
        await (reader.read(1) if stream else until(lambda: sum(counts.arrived) == arrived))
        writer.close()

    for number in range(5):
        await asyncio.gather(*(leave_early(4 * number + 4) for _ in range(4)))
    await until(lambda: sum(counts.arrived) == 20 and not scheduler.has_work)
    async with http_of(engine) as http:
        metrics = (await http.get("/metrics")).text
    assert 'tidegate_engine_kv_blocks{state="used"} 0.0' in metrics
    assert "tidegate_engine_requests_running 0.0" in metrics
    aborted = sum(
        float(line.split()[-1])
        for line in metrics.splitlines()
        if 'reason="abort"' in line and line.startswith("tidegate")
    )
    assert aborted == 20
    scheduler.check_integrity()


async def test_one_bad_request_fails_alone(start_engine: StartEngine, make_script: MakeScript) -> None:
    engine = await start_engine(runner=make_script("good"))
    async with client_of(engine) as client:
        good = asyncio.create_task(client.completions.create(model="fast", prompt="x", max_tokens=50))
        with pytest.raises(openai.InternalServerError, match="not numbers"):
            await client.completions.create(model="fast", prompt="x", max_tokens=5, seed=666)
        async with http_of(engine) as http:
            metrics = (await http.get("/metrics")).text
        assert "\ntidegate_engine_corrupted_requests_total 1.0" in metrics
        assert 'vllm:corrupted_requests_total{engine="0",model_name="fast"} 1.0' in metrics
        assert (await good).usage.completion_tokens == 50  # type: ignore[union-attr]


async def test_an_error_inside_a_stream_is_an_event_before_done(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    engine = await start_engine(runner=make_script("good"))
    async with http_of(engine) as http:
        body = {"model": "fast", "prompt": "x", "max_tokens": 5, "seed": 666, "stream": True}
        events = (await http.post("/v1/completions", json=body)).text.strip().split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert events[-1] == "data: [DONE]"


async def test_a_failed_step_fails_its_requests_and_keeps_the_engine(
    start_engine: StartEngine, make_script: MakeScript, loops: Loops
) -> None:
    runner = make_script("good")
    engine = await start_engine(runner=runner)
    async with client_of(engine) as client:
        runner.fail_steps = 1
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await client.completions.create(model="fast", prompt="x", max_tokens=5)
        assert (await client.completions.create(model="fast", prompt="x", max_tokens=5)).choices[0].text
    assert used_blocks(loops[engine]) == 0


async def test_requests_that_together_need_more_than_the_kv_cache_all_finish(
    start_engine: StartEngine, fast_profile: Profile, loops: Loops
) -> None:
    engine = await start_engine(profile=replace(fast_profile, kv_blocks=17))
    async with client_of(engine) as client:
        calls = [client.completions.create(model="fast", prompt=[index + 1] * 50, max_tokens=100) for index in range(8)]
        answers = await asyncio.gather(*calls)
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [100] * 8
    loops[engine].scheduler.check_integrity()


async def test_requests_that_are_turned_away_are_counted_by_reason(start_engine: StartEngine) -> None:
    engine = await start_engine(api_keys=("key",))
    good = {"authorization": "Bearer key"}
    async with http_of(engine) as http:
        for body in ({"model": "fast"}, {"model": "no", "prompt": "x"}, {"model": "fast", "prompt": [1] * 600}):
            await http.post("/v1/completions", json=body, headers=good)
        await http.post("/v1/completions", json={})
        assert (await http.post("/v1/completions", json={"model": "fast", "prompt": "x"}, headers=good)).is_success
        lines = (await http.get("/metrics")).text.splitlines()
    counts = {
        line.partition('reason="')[2].partition('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("tidegate_engine_request_rejections_total{")
    }
    assert {reason for reason, count in counts.items() if count == 1} == {
        "invalid", "unknown_model", "context_length", "unauthorized",
    }  # fmt: skip
    assert any(line.startswith("vllm:admission_rejections_total{") for line in lines)
