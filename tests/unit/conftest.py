"""The engine of the unit tests: the real process object, both listeners on loopback, and a modelled GPU that is fast.

A test asks `start_engine` for one, and reaches it over HTTP as a client would.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tidegate_engine.byte_tokenizer import ByteTokenizer
from tidegate_engine.completions import Tokenizer
from tidegate_engine.engine import Engine
from tidegate_engine.engine_host import host_engine
from tidegate_engine.modelled_runner import ModelledRunner, model_info
from tidegate_engine.request import SampledToken, Step, TokenLogprobs
from tidegate_engine.runner import Runner
from tidegate_engine.serve import LoadedModel, Model, Process, ServeOptions, bind, connect, load_engine
from tidegate_engine.settings import DEFAULT_PATTERNS, BatchSettings, Envelope, SettingsFile
from tidegate_engine.steptime import TERMS, Profile, StepModel

OBJECT_UID = "6f0c5d1e-0000-4000-8000-000000000001"
KEY_ID = "current"


class StartEngine(Protocol):
    def __call__(
        self,
        *,
        profile: Profile | None = None,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> Awaitable[Process]: ...


@pytest.fixture
def fast_profile() -> Profile:
    """Two milliseconds a step, 64 blocks of 16 tokens, a context of 512."""
    terms = dict.fromkeys(TERMS, 0.0)
    return Profile(
        name="fast",
        gpu="Test GPU",
        gpus=1,
        model="test/fast",
        layers=2,
        kv_heads=2,
        head_size=16,
        vocab_size=1000,
        weight_dtype="float32",
        kv_dtype="float32",
        weight_bytes=1_000,
        kv_token_bytes=128,
        kv_blocks=65,
        block_tokens=16,
        max_model_len=512,
        start_seconds={"weights": 0.0, "warmup": 0.0},
        step=StepModel(**{**terms, "base_seconds": 0.002}),
        source=dict.fromkeys(TERMS, "made up for tests"),
    )


class ScriptedRunner(ModelledRunner):
    """Says `text` in tokens of four bytes, again and again or, if it `ends`, once; fails where it is told to."""

    def __init__(
        self,
        profile: Profile,
        text: str,
        *,
        ends: bool = False,
        structured_outputs: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        info = model_info(
            profile, block_tokens=profile.block_tokens, kv_blocks=profile.kv_blocks, max_model_len=profile.max_model_len
        )
        super().__init__(profile, replace(info, structured_outputs=structured_outputs))
        self._tokenizer = tokenizer or ByteTokenizer()
        self._ids = self._tokenizer.encode(text)
        self._ends = ends
        self.prompts: list[str] = []
        """Of the requests, in their order; as are `grammars`."""
        self.grammars: list[str | None] = []
        self.fail_steps = 0

    def run(self, step: Step) -> Mapping[str, SampledToken]:
        tokens = dict(super().run(step))
        if self.fail_steps:
            self.fail_steps -= 1
            raise RuntimeError("out of memory")
        for item in step.items:
            if item.samples:
                request = item.request
                if request.output_tokens == 0:
                    self.prompts.append(self._tokenizer.decode(request.prompt_ids))
                    self.grammars.append(request.params.grammar)
                if self._ends and request.output_tokens >= len(self._ids):
                    tokens[request.id] = SampledToken(ByteTokenizer.eos_token_ids[0], is_eos=True)
                    continue
                token_id = self._ids[request.output_tokens % len(self._ids)]
                logprobs = None if request.params.logprobs is None else TokenLogprobs(-0.5, ((token_id, -0.5),))
                error = "the logits are not numbers" if request.params.seed == 666 else None
                tokens[request.id] = SampledToken(token_id, logprobs=logprobs, error=error, is_corrupted=bool(error))
        return tokens


@pytest.fixture
def make_script(fast_profile: Profile) -> Callable[..., ScriptedRunner]:
    """Makes a runner that says a text; `profile` is the fast one unless given."""

    def make(text: str, *, profile: Profile | None = None, **options: Any) -> ScriptedRunner:
        return ScriptedRunner(profile or fast_profile, text, **options)

    return make


@pytest.fixture
def fast_profile_file(fast_profile: Profile, tmp_path: Path) -> Path:
    path = tmp_path / "fast.json"
    path.write_text(json.dumps(asdict(fast_profile)))
    return path


@pytest.fixture
def loops() -> dict[Process, Engine]:
    """The engine loop behind each process that `start_engine` started."""
    return {}


@pytest.fixture
async def start_engine(fast_profile: Profile, loops: dict[Process, Engine]) -> AsyncIterator[StartEngine]:
    """Start engines that are drained at the end of the test. Both sides run here, with the socket between them."""
    started: list[tuple[Process, asyncio.Task[int]]] = []
    hosts: list[asyncio.Task[None]] = []

    async def start(
        *,
        profile: Profile | None = None,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> Process:
        chosen = profile or fast_profile
        modelled = ModelledRunner(
            chosen,
            model_info(
                chosen,
                block_tokens=chosen.block_tokens,
                kv_blocks=chosen.kv_blocks,
                max_model_len=chosen.max_model_len,
            ),
        )
        api_socket, admin_socket = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
        settings = BatchSettings(32, 1024, 256)
        defaults = ServeOptions(
            host="127.0.0.1",
            port=0,
            admin_port=0,
            served_names=("fast", "also-fast"),
            settings=SettingsFile(1, settings, Envelope(), DEFAULT_PATTERNS),
            shutdown_timeout_seconds=5.0,
            endpoint_removal_seconds=0.0,
            stall_seconds=60.0,
            runner="modelled",
            profile=chosen.name,
            object_uid=OBJECT_UID,
        )
        chosen_options = replace(defaults, **options)
        process = Process(chosen_options, api_socket=api_socket, admin_socket=admin_socket)
        model = Model(lambda: (runner or modelled, modelled.rest), lambda: tokenizer or ByteTokenizer())
        end, engine_end = socket.socketpair()

        def load() -> Engine:
            loops[process] = load_engine(model, chosen_options)
            return loops[process]

        async def connect_here() -> LoadedModel:
            return await connect(end, model, process=None, stall_seconds=chosen_options.stall_seconds)

        hosts.append(asyncio.create_task(host_engine(engine_end, load)))
        task = asyncio.create_task(process.run(connect_here))
        started.append((process, task))
        while process.state.loaded is None and not task.done():  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0.005)
        return process

    yield start
    for process, _ in started:
        process.leave.set()
    tasks = [task for _, task in started]
    await asyncio.wait_for(asyncio.gather(*tasks, *hosts, return_exceptions=True), timeout=30)


@pytest.fixture
def admin_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def admin_keys_file(admin_key: Ed25519PrivateKey, tmp_path: Path) -> Path:
    """The JWKS that the engine is given."""
    path = tmp_path / "admin-keys.json"
    path.write_text(json.dumps({"keys": [jwk_of(admin_key)]}))
    return path


@pytest.fixture
def admin_headers(admin_key: Ed25519PrivateKey) -> Callable[[], dict[str, str]]:
    """Makes the headers with a fresh valid token."""

    def make() -> dict[str, str]:
        claims = {"aud": OBJECT_UID, "exp": int(time.time()) + 60}
        token = jwt.encode(claims, admin_key, algorithm="EdDSA", headers={"kid": KEY_ID})
        return {"authorization": f"Bearer {token}"}

    return make


@pytest.fixture
async def admin(engine: Process, admin_headers: Callable[[], dict[str, str]]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the admin port of the test's own `engine`, with a token."""
    base = f"http://127.0.0.1:{engine.admin_port}"
    async with httpx.AsyncClient(base_url=base, timeout=30, headers=admin_headers()) as client:
        yield client


@pytest.fixture
async def api(engine: Process) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API port of the test's own `engine`."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=60) as client:
        yield client


def jwk_of(key: Ed25519PrivateKey, key_id: str = KEY_ID) -> dict[str, str]:
    public = jwt.algorithms.OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {**{name: str(value) for name, value in public.items()}, "kid": key_id, "alg": "EdDSA", "use": "sig"}
