"""Ollama's API through its official client."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import ollama
import pytest

from tidegate_engine.ollama import OllamaChatCall
from tidegate_engine.serve import Process

StartEngine = Callable[..., Awaitable[Process]]
MakeScript = Callable[..., Any]
USER: Any = [{"role": "user", "content": "When is high tide?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "tide", "arguments": {"port": "Brest"}}</tool_call>'


def client_of(engine: Process) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=f"http://127.0.0.1:{engine.api_port}")


@pytest.fixture
async def client(start_engine: StartEngine, make_script: MakeScript) -> ollama.AsyncClient:
    return client_of(await start_engine(runner=make_script("High at noon.", ends=True)))


async def test_a_chat_is_answered_with_counts_and_nanoseconds(client: ollama.AsyncClient) -> None:
    answer = await client.chat(model="fast", messages=USER)
    assert answer.message.content == "High at noon."
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "stop", 5)
    assert answer.prompt_eval_count is not None and answer.prompt_eval_count > 4
    assert answer.total_duration is not None and answer.eval_duration is not None
    assert answer.prompt_eval_duration is not None
    # Two milliseconds a step are at least two million nanoseconds.
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration - 2 > 2_000_000


async def test_a_stream_is_lines_that_add_up_and_end_once(client: ollama.AsyncClient) -> None:
    parts = [part async for part in await client.chat(model="fast:latest", messages=USER, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == "High at noon."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 5 and parts[0].model == "fast:latest"


@pytest.mark.parametrize("raw", [False, True])
async def test_generate_goes_through_the_template_unless_raw(
    start_engine: StartEngine, make_script: MakeScript, raw: bool
) -> None:
    runner = make_script("noon", ends=True)
    client = client_of(await start_engine(runner=runner))
    answer = await client.generate(model="fast", prompt="When?", system="Be short.", raw=raw)
    assert answer.response == "noon" and answer.done_reason == "stop"
    assert runner.prompts == ["When?" if raw else "<system>\nBe short.\n<user>\nWhen?\n<assistant>\n"]
    parts = [part async for part in await client.generate(model="fast", prompt="When?", stream=True)]
    assert "".join(part.response or "" for part in parts) == "noon"


async def test_options_reach_the_sampler(start_engine: StartEngine, make_script: MakeScript) -> None:
    runner = make_script("one two three four ")
    client = client_of(await start_engine(runner=runner))
    cut = await client.chat(model="fast", messages=USER, options={"num_predict": 2, "num_ctx": 4096, "seed": 1})
    assert (cut.eval_count, cut.done_reason) == (2, "length")
    stopped = await client.chat(model="fast", messages=USER, options={"stop": ["three"]})
    assert stopped.message.content == "one two "
    with pytest.raises(ollama.ResponseError, match="temperature"):
        await client.chat(model="fast", messages=USER, options={"temperature": 9.0})


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_come_back_as_calls(start_engine: StartEngine, make_script: MakeScript, stream: bool) -> None:
    runner = make_script(CALL, ends=True)
    client = client_of(await start_engine(runner=runner, tool_call_parser="hermes"))
    if stream:
        parts: Any = await client.chat(model="fast", messages=USER, tools=TOOLS, stream=True)
        calls = [call async for part in parts for call in part.message.tool_calls or []]
    else:
        answer = await client.chat(model="fast", messages=USER, tools=TOOLS)
        calls = list(answer.message.tool_calls or [])
    assert [(call.function.name, dict(call.function.arguments)) for call in calls] == [("tide", {"port": "Brest"})]
    history = [*USER, {"role": "assistant", "tool_calls": [call.model_dump() for call in calls]},
               {"role": "tool", "tool_name": "tide", "content": "at noon"}]  # fmt: skip
    await client.chat(model="fast", messages=history, tools=TOOLS)
    assert "at noon" in runner.prompts[1] and '"port": "Brest"' in runner.prompts[1]


def test_calls_without_ids_get_stable_ones_that_their_answers_name() -> None:
    call: Any = {"function": {"name": "tide", "arguments": {}}}
    own: Any = {"id": "abc", **call}
    messages: Any = [
        *USER,
        {"role": "assistant", "tool_calls": [call, call]},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": "six"},
        {"role": "assistant", "tool_calls": [own]},
        {"role": "tool", "content": "late"},
        {"role": "tool", "content": "stray"},
    ]
    chat = OllamaChatCall.model_validate({"model": "fast", "messages": messages}).as_call(("fast",))
    calls = [call.id for message in chat.messages for call in message.tool_calls or ()]
    answers = [message.tool_call_id for message in chat.messages if message.role == "tool"]
    assert calls == ["000001000", "000001001", "abc"]
    assert answers == [*calls, None]


async def test_a_number_of_any_length_passes_through_a_call(start_engine: StartEngine, make_script: MakeScript) -> None:
    number = "9" * 400
    script = f'<tool_call>{{"name": "tide", "arguments": {{"port": {number}}}}}</tool_call>'
    engine = await start_engine(runner=make_script(script, ends=True), tool_call_parser="hermes")
    answer = await client_of(engine).chat(model="fast", messages=USER, tools=TOOLS)
    assert [dict(call.function.arguments) for call in answer.message.tool_calls or ()] == [{"port": int(number)}]


async def test_a_raw_prompt_without_a_limit_is_answered_to_the_end(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    script = "tide" * 40
    client = client_of(await start_engine(runner=make_script(script, ends=True)))
    answer = await client.generate(model="fast", prompt="When?", raw=True)
    assert (answer.response, answer.done_reason) == (script, "stop")


async def test_the_model_is_listed_and_shown(client: ollama.AsyncClient) -> None:
    listed = (await client.list()).models
    assert [model.model for model in listed] == ["fast", "also-fast"]
    loaded = (await client.ps()).models
    digests = [model.digest or "" for model in listed]
    assert digests == [model.digest for model in loaded]
    # Ollama's client slices the first twelve digits.
    assert len(set(digests)) == 2 and all(len(digest) == 64 for digest in digests)
    assert [(model.name, model.context_length) for model in loaded] == [("fast", 512), ("also-fast", 512)]
    shown = await client.show("fast:latest")
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo is not None and shown.modelinfo["tidegate.context_length"] == 512


async def test_a_call_that_asks_nothing_is_answered_as_loading(client: ollama.AsyncClient) -> None:
    loaded = await client.generate(model="fast", keep_alive=60)
    assert (loaded.done, loaded.done_reason) == (True, "load")


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("chat", {"model": "other", "messages": USER}, 404, "other"),
        ("generate", {"model": "other"}, 404, "other"),
        ("show", {"model": "other"}, 404, "other"),
        ("chat", {"model": "fast", "messages": USER, "think": True}, 400, "thinking"),
        ("chat", {"model": "fast", "messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, 400, "images"),
        ("chat", {"model": "fast", "messages": USER, "tools": TOOLS}, 400, "--tool-call-parser"),
        ("generate", {"model": "fast", "prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("generate", {"model": "fast", "prompt": "x", "options": {"repeat_penalty": 1e-300}}, 400, "repeat_penalty"),
        ("generate", {"model": "fast", "prompt": "x", "options": {"seed": 1 << 63}}, 400, "options.seed"),
        ("chat", {"messages": USER}, 400, "model"),
    ],
)
async def test_errors_have_ollamas_shape(
    start_engine: StartEngine, path: str, body: dict[str, Any], status: int, word: str
) -> None:
    engine = await start_engine()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}/api") as http:
        answer = await http.post(f"/{path}", json=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"] and word in answer.json()["error"]


async def test_a_failure_in_a_stream_is_a_line(start_engine: StartEngine, make_script: MakeScript) -> None:
    runner = make_script("x")
    engine = await start_engine(runner=runner)
    runner.fail_steps = 1
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}/api") as http:
        answer = await http.post("/chat", json={"model": "fast", "messages": USER})
        version = await http.get("/version")
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert "out of memory" in json.loads(answer.text.strip().splitlines()[-1])["error"]
    assert version.json()["version"]


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"port": {"type": "string"}}}])
async def test_format_holds_the_answer_to_json(start_engine: StartEngine, make_script: MakeScript, form: Any) -> None:
    runner = make_script('{"port": "Brest"}', ends=True, structured_outputs=True)
    client = client_of(await start_engine(runner=runner))
    answers = [
        (await client.chat(model="fast", messages=USER, format=form)).message.content,
        (await client.generate(model="fast", prompt="Where?", format=form)).response,
        (await client.generate(model="fast", prompt="Where?", format=form, raw=True)).response,
    ]
    assert answers == ['{"port": "Brest"}'] * 3
    assert all(('"port"' in grammar) == (form != "json") for grammar in runner.grammars)
