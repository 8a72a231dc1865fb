"""LoRA adapters over HTTP: models of their own for clients, loaded and unloaded by administrators while it serves."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate_engine import admin as admin_module
from tidegate_engine.cli import main
from tidegate_engine.engine import Engine, Output
from tidegate_engine.lora import LoraLimits
from tidegate_engine.request import Adapter, Request, SampledToken, Step
from tidegate_engine.serve import Process
from tidegate_engine.tokenizer import load_tokenizer
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.weights import ModelError

StartEngine = Callable[..., Awaitable[Process]]
MakeAdapter = Callable[..., Path]
MakeHeaders = Callable[[], dict[str, str]]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class HeldRunner(TorchRunner):
    """Begins no step while its gate is closed."""

    def __init__(self, model: Path, options: TorchOptions) -> None:
        self.gate = threading.Event()
        self.gate.set()
        super().__init__(model, options=options)

    def run(self, step: Step) -> Mapping[str, SampledToken]:
        assert self.gate.wait(timeout=60)
        return super().run(step)


@pytest.fixture
def runner(tiny_model: Path) -> HeldRunner:
    return HeldRunner(tiny_model, TorchOptions(kv_blocks=200, block_tokens=4, threads=1, lora=LoraLimits(2, 8)))


@pytest.fixture
async def engine(
    start_engine: StartEngine, runner: HeldRunner, tiny_model: Path, make_adapter: MakeAdapter, admin_keys_file: Path
) -> Process:
    """The tiny model as `tiny`, the adapter `sql`, and room for one more."""
    sql = make_adapter("sql", seed=1)
    return await start_engine(
        runner=runner,
        tokenizer=load_tokenizer(tiny_model),
        served_names=("tiny",),
        admin_keys=admin_keys_file,
        lora_root=sql.parent,
        lora_modules=(("sql", sql),),
    )


@pytest.fixture
async def client(engine: Process) -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"http://127.0.0.1:{engine.api_port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the engine's thread changes it
            await asyncio.sleep(0.005)


async def complete(client: openai.AsyncOpenAI, model: str, *, max_tokens: int = 12) -> str:
    answer = await client.completions.create(
        model=model,
        prompt="the tide comes in the",
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.model == model
    return answer.choices[0].text


async def test_a_session_of_the_official_client_with_adapters_that_come_and_go(
    engine: Process, client: openai.AsyncOpenAI, admin: httpx.AsyncClient, make_adapter: MakeAdapter
) -> None:
    assert [(model.id, model.parent) async for model in client.models.list()] == [  # type: ignore[attr-defined]
        ("tiny", None), ("sql", "tiny")
    ]  # fmt: skip
    plain, sql = await complete(client, "tiny"), await complete(client, "sql")
    assert plain != sql
    make_adapter("chat", seed=2, rank=8)
    answer = await admin.post(LOAD, json={"lora_name": "chat", "lora_path": "chat"})
    assert (answer.status_code, answer.json()["rank"]) == (200, 8)
    assert (await client.models.retrieve("chat")).id == "chat"
    chat = await complete(client, "chat")
    assert len({plain, sql, chat}) == 3
    mixed = ("sql", "tiny", "chat", "chat", "tiny", "sql")
    answers = await asyncio.gather(*(complete(client, name) for name in mixed))
    assert list(answers) == [{"sql": sql, "tiny": plain, "chat": chat}[name] for name in mixed]
    turn = await client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "the tide"}], max_tokens=4
    )
    assert turn.model == "chat"
    answer = await admin.post(UNLOAD, json={"lora_name": "sql"})
    assert (answer.status_code, answer.json()) == (200, {"name": "sql", "unloaded": True, "requests_left": 0})
    with pytest.raises(
        openai.NotFoundError, match="the model 'sql' does not exist; served here: tiny; LoRA adapters: chat"
    ):
        await complete(client, "sql")
    assert [model.id async for model in client.models.list()] == ["tiny", "chat"]
    assert await complete(client, "chat") == chat
    # The same name with another content: nothing of the old one's cache may be found.
    make_adapter("sql", seed=5)
    assert (await admin.post(LOAD, json={"lora_name": "sql", "lora_path": "sql"})).status_code == 200
    assert await complete(client, "sql") not in (plain, sql, chat)
    info = (await admin.get("/admin/v1/info")).json()
    assert [(adapter["name"], adapter["rank"]) for adapter in info["adapters"]] == [("chat", 8), ("sql", 4)]


async def test_orders_about_adapters_need_a_token_and_are_not_on_the_api_port(engine: Process) -> None:
    for port, status in ((engine.admin_port, 401), (engine.api_port, 404)):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as stranger:
            for path in (LOAD, UNLOAD):
                answer = await stranger.post(path, json={"lora_name": "sql", "lora_path": "sql"})
                assert answer.status_code == status, (port, path)


async def test_orders_that_cannot_be_followed_say_why_and_change_nothing(
    client: openai.AsyncOpenAI, admin: httpx.AsyncClient, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    root = make_adapter("chat", seed=2).parent
    make_adapter("large", rank=16)
    outside = make_adapter("../outside")
    (root / "link").symlink_to(outside)
    (root / "half").mkdir()
    (root / "half" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (root / "half" / "adapter_model.safetensors").write_bytes(b"")
    refused: list[tuple[dict[str, object], int, str]] = [
        ({"lora_name": "x", "lora_path": "../outside"}, 403, "is not below"),
        ({"lora_name": "x", "lora_path": str(outside)}, 403, "is not below"),
        ({"lora_name": "x", "lora_path": "link"}, 403, "is not below"),
        ({"lora_name": "x", "lora_path": "half"}, 403, "is not below"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 403, "cannot be followed"),
        ({"lora_name": "x", "lora_path": "nowhere"}, 404, "does not exist"),
        ({"lora_name": "x", "lora_path": "large"}, 422, "has the rank 16, and --max-lora-rank is 8"),
        ({"lora_name": "sql", "lora_path": "chat"}, 409, "an adapter 'sql' is loaded already"),
        ({"lora_name": "tiny", "lora_path": "chat"}, 409, "is the name of the model itself"),
        ({"lora_name": 'a,b"', "lora_path": "chat"}, 422, "is no name for an adapter"),
        ({"lora_name": "x"}, 422, "lora_name and lora_path"),
        ({"lora_name": "x", "lora_path": ["chat"]}, 422, "lora_name and lora_path"),
        ({"lora_name": "sql", "lora_path": "chat", "load_inplace": True}, 422, "load_inplace"),
    ]
    for body, status, expected in refused:
        answer = await admin.post(LOAD, json=body)
        assert answer.status_code == status, (body, answer.text)
        assert expected in answer.json()["error"]["message"], body
    answer = await admin.post(UNLOAD, json={"lora_name": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "AdapterUnknown")
    assert answer.json()["error"]["message"] == "no adapter 'x' is loaded; LoRA adapters: sql"
    assert (await admin.post(LOAD, json={"lora_name": "chat", "lora_path": str(root / "chat")})).status_code == 200
    answer = await admin.post(LOAD, json={"lora_name": "third", "lora_path": "chat"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "AdapterLimit")
    assert "2 adapters are loaded (chat, sql) and --max-loras is 2" in answer.json()["error"]["message"]
    assert [model.id async for model in client.models.list()] == ["tiny", "sql", "chat"]


async def test_unloading_serves_the_name_no_more_and_waits_for_who_has_begun(
    engine: Process,
    loops: Mapping[Process, Engine],
    runner: HeldRunner,
    client: openai.AsyncOpenAI,
    admin: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = await complete(client, "sql", max_tokens=40)
    runner.gate.clear()
    answer = asyncio.create_task(complete(client, "sql", max_tokens=40))
    assert engine.state.loaded is not None
    loop = loops[engine]
    await until(lambda: loop.scheduler.running == 1)
    monkeypatch.setattr(admin_module, "CALL_TIMEOUT_SECONDS", 0.0)
    early = await admin.post(UNLOAD, json={"lora_name": "sql"})
    assert (early.status_code, early.json()) == (202, {"name": "sql", "unloaded": False, "requests_left": 1})
    with pytest.raises(openai.NotFoundError, match="served here: tiny; LoRA adapters: none"):
        await complete(client, "sql")
    again = await admin.post(LOAD, json={"lora_name": "sql", "lora_path": "sql"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "AdapterInUse")
    forced = asyncio.create_task(engine.state.loaded.engine.unload_adapter("sql"))
    await until(lambda: not loop._mailbox.empty())
    runner.gate.set()
    with pytest.raises(ModelError, match="AdapterInUse: 1 requests are answered with the adapter 'sql'"):
        await forced
    assert await answer == whole
    monkeypatch.setattr(admin_module, "CALL_TIMEOUT_SECONDS", 30.0)
    late = await admin.post(UNLOAD, json={"lora_name": "sql"})
    assert late.status_code in (200, 404)  # 404: it had gone before it was asked for again
    assert (await admin.post(UNLOAD, json={"lora_name": "sql"})).status_code == 404
    again = await admin.post(LOAD, json={"lora_name": "sql", "lora_path": "sql"})
    assert again.status_code == 200
    assert await complete(client, "sql", max_tokens=40) == whole


class Outputs:
    """Takes what the engine gives."""

    def __init__(self) -> None:
        self.found: asyncio.Queue[Output] = asyncio.Queue()

    def push(self, output: Output) -> None:
        self.found.put_nowait(output)


async def test_a_request_of_an_adapter_that_the_engine_does_not_hold_fails_alone(
    engine: Process, client: openai.AsyncOpenAI
) -> None:
    assert engine.state.loaded is not None
    outputs = Outputs()
    for adapter in (Adapter("ghost", "0"), Adapter("sql", "of other files")):
        request = Request(adapter.name, 3, 5, time.monotonic(), prompt_ids=[4, 5, 6], adapter=adapter)
        engine.state.loaded.engine.submit(request, outputs)
        output = await asyncio.wait_for(outputs.found.get(), 20)
        assert (output.error, output.is_refusal) == (f"the adapter {adapter.name!r} is not loaded", True)
    assert await complete(client, "sql")


async def samples(engine: Process) -> dict[str, list[tuple[dict[str, str], float]]]:
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"http://127.0.0.1:{engine.api_port}/metrics")).text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_metrics_tell_which_adapters_have_requests_and_what_they_take(
    engine: Process, client: openai.AsyncOpenAI
) -> None:
    idle = await samples(engine)
    assert idle["tidegate_engine_lora_requests"] == [
        ({"adapter": "sql", "state": "running"}, 0.0), ({"adapter": "sql", "state": "waiting"}, 0.0)
    ]  # fmt: skip
    (taken,) = [value for labels, value in idle["tidegate_engine_memory_bytes"] if labels["kind"] == "lora"]
    assert taken == 4 * 4 * 984 * 2
    before = time.time()
    stream = await client.completions.create(
        model="sql", prompt="the", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    ((labels, at),) = (await samples(engine))["vllm:lora_requests_info"]
    assert labels == {"max_lora": "2", "running_lora_adapters": "sql", "waiting_lora_adapters": ""}
    assert before <= at <= time.time()
    await stream.close()


async def test_the_other_apis_know_the_adapters_too(engine: Process) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=30) as http:
        tags = (await http.get("/api/tags")).json()
        assert [model["name"] for model in tags["models"]] == ["tiny", "sql"]
        body = {"model": "sql:latest", "messages": [{"role": "user", "content": "the"}], "stream": False}
        answer = await http.post("/api/chat", json={**body, "options": {"num_predict": 3}})
        assert answer.status_code == 200
        answer = await http.post("/v1/responses", json={"model": "sql", "input": "the", "max_output_tokens": 3})
        assert (answer.status_code, answer.json()["model"]) == (200, "sql")
        assert (await http.post("/tokenize", json={"model": "sql", "prompt": "the"})).status_code == 200
        document = (await http.get("/openapi.json")).json()
        named = document["components"]["schemas"]["ChatCall"]["properties"]["model"]["enum"]
        assert named == ["tiny", "sql"]


async def test_without_the_flag_adapters_are_off(
    start_engine: StartEngine, admin_keys_file: Path, admin_headers: MakeHeaders
) -> None:
    engine = await start_engine(admin_keys=admin_keys_file)
    async with httpx.AsyncClient(headers=admin_headers()) as http:
        answer = await http.post(
            f"http://127.0.0.1:{engine.admin_port}{LOAD}", json={"lora_name": "a", "lora_path": "a"}
        )
        page = (await http.get(f"http://127.0.0.1:{engine.api_port}/metrics")).text
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        409, "LoRA adapters are off; start the engine with --enable-lora"
    )  # fmt: skip
    assert "lora" not in page


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lora-modules", "a=/a"], "--lora-modules needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "must be NAME=PATH, not a"),
        (
            ["--enable-lora", "--max-loras", "1", "--lora-modules", "a=/a", "b=/b"],
            "names 2 adapters, and --max-loras is 1",
        ),
        (["--enable-lora", "--max-cpu-loras", "4"], "use --max-loras"),
    ],
    ids=str,
)
def test_flags_that_contradict_each_other_are_refused(
    flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "/no/model.gguf", *flags]) == 2
    assert expected in capsys.readouterr().err


def test_an_adapter_of_the_command_line_that_cannot_be_loaded_ends_the_start(
    tiny_model: Path, make_adapter: MakeAdapter, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_adapter("bad", use_dora=True)
    ports = ["--port", "0", "--admin-port", "0", "--host", "127.0.0.1", "--num-gpu-blocks-override", "20"]
    code = main(["serve", "--model", str(tiny_model), "--enable-lora", "--lora-modules", f"bad={folder}", *ports])
    assert code == 3
    assert (
        f"ModelInvalid: {folder}/adapter_config.json uses 'use_dora', which is not supported" in capfd.readouterr().err
    )
