"""The composition root: forks the engine's process, builds the two listeners, runs them, and leaves in order.

Reads no flags and no environment (`cli` does). The admin listener is up before the model is loaded, the API afterwards.
Signals come here; the engine's process ends with this one, however that ends.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from tidegate_engine.adapters import ServedAdapters
from tidegate_engine.admin import CALL_TIMEOUT_SECONDS, AdminState, LiveBatching, Loaded, create_admin, probe_live, thaw
from tidegate_engine.admin_keys import AdminKeys
from tidegate_engine.batching import initial_state
from tidegate_engine.blocks import tokens_that_fit, windows_of
from tidegate_engine.completions import Completions, Limits, Tokenizer
from tidegate_engine.context import DEFAULT_WINDOW, NO_SLIDING_WINDOW, ContextPolicy
from tidegate_engine.drain import Drain
from tidegate_engine.engine import Engine, build_engine
from tidegate_engine.engine_client import MIN_SILENCE_SECONDS, SILENCE_SECONDS, EngineClient, EngineGone, EngineProcess
from tidegate_engine.engine_host import run_engine
from tidegate_engine.http_protocol import BoundedHttp
from tidegate_engine.live_policy import LivePolicy
from tidegate_engine.metrics import EngineMetrics, Snapshot, add_counts, render
from tidegate_engine.ngrams import NgramSpeculation
from tidegate_engine.policy_control import PolicyControl
from tidegate_engine.pooled_batcher import PooledLimits
from tidegate_engine.ranks import RankEnd, Team, start_ranks
from tidegate_engine.reasoning import FORMATS as REASONING_FORMATS
from tidegate_engine.request import Window
from tidegate_engine.resize import ResizeControl
from tidegate_engine.runner import ModelInfo, Runner
from tidegate_engine.server import ApiParts, create_api
from tidegate_engine.settings import AdmissionPolicy, BatchSettings, SettingsFile
from tidegate_engine.tool_calls import FORMATS, recognise_format
from tidegate_engine.weights import ModelError

KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of usual proxies, so that they close a connection first."""
FLUSH_SECONDS = 5
"""How long a client may take to read the end of its answer after the drain."""
EXIT_ENGINE_FAILED = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """How to load the parts of a model, each in the process that needs it.

    `load_runner` takes the other ranks, where there are `ranks` of them, and also gives what the loop calls when it has
    nothing to do. Each of these ranks is a process that runs `follow_rank`.
    """

    load_runner: Callable[..., tuple[Runner, Callable[[], None] | None]]
    load_tokenizer: Callable[[], Tokenizer]
    ranks: int = 1
    follow_rank: Callable[[RankEnd], None] | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    engine: EngineClient
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve; everything that does not concern the model itself."""

    host: str
    port: int
    admin_port: int
    served_names: tuple[str, ...]
    settings: SettingsFile
    shutdown_timeout_seconds: float
    endpoint_removal_seconds: float
    stall_seconds: float
    runner: str
    profile: str | None = None
    admin_keys: Path | None = None
    object_uid: str | None = None
    api_keys: tuple[str, ...] = ()
    policy: LivePolicy = field(default_factory=LivePolicy)
    """What an administrator may change later."""
    context_window: Window = DEFAULT_WINDOW
    """What tokens see under the policy `sliding_window`."""
    tool_call_parser: str | None = None
    """Name of a format; None = recognised from the model's chat template."""
    reasoning_parser: str | None = None
    """Name of a format; None = thoughts stay in the text."""
    template_variables: Mapping[str, object] = field(default_factory=dict)
    speculation: NgramSpeculation | None = None
    lora_root: Path | None = None
    """Where adapters that are loaded live must lie; None = adapters are off."""
    lora_modules: tuple[tuple[str, Path], ...] = ()
    """Adapters to begin with: name and folder."""
    pooled: PooledLimits = field(default_factory=PooledLimits)


class ServeError(Exception):
    """Serving ended, or could not begin, for a reason that the user can act on: `Reason: sentence`."""

    def __init__(self, reason: str, message: str, *, exit_code: int) -> None:
        super().__init__(f"{reason}: {message}")
        self.exit_code = exit_code


def run(options: ServeOptions, model: Model) -> int:
    """Serve until told to leave; returns the exit code. Raises ModelError and ServeError."""
    with contextlib.ExitStack() as sockets:
        api_socket = sockets.enter_context(bind(options.host, options.port))
        admin_socket = sockets.enter_context(bind(options.host, options.admin_port))
        end, process = _fork_engine(options, model, foreign=(api_socket, admin_socket))
        sockets.enter_context(end)

        async def load() -> LoadedModel:
            return await connect(end, model, process=process, stall_seconds=options.stall_seconds)

        async def main() -> int:
            serving = Process(options, api_socket=api_socket, admin_socket=admin_socket)
            serving.handle_signals()
            return await serving.run(load)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(main())
        finally:
            process.kill()


def _fork_engine(
    options: ServeOptions, model: Model, *, foreign: Sequence[socket.socket]
) -> tuple[socket.socket, EngineProcess]:
    """Start the engine's process; it shares what is imported so far, and must not keep the listeners open."""
    end, engine_end = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for other in (end, *foreign):
            other.close()
        team = None
        if model.follow_rank is not None and model.ranks > 1:
            team = start_ranks(model.ranks, model.follow_rank, foreign=[engine_end])

        def load() -> Engine:
            return load_engine(model, options, team)

        run_engine(engine_end, load, parent=parent, team=team)
    engine_end.close()
    return end, EngineProcess(pid)


def load_engine(model: Model, options: ServeOptions, team: Team | None = None) -> Engine:
    runner, on_idle = model.load_runner() if team is None else model.load_runner(team)
    return build_engine(
        runner,
        options.settings,
        speculation=options.speculation,
        pooled=options.pooled,
        admission=options.policy.admission,
        on_idle=on_idle,
    )


def engine_version() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "unknown"


class _Listener(uvicorn.Server):
    """uvicorn without its signal handling: leaving is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listener(app: ASGIApp) -> _Listener:
    return _Listener(
        uvicorn.Config(
            app,
            http=BoundedHttp,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
    )


class Process:
    """The life of one serving process: admin, load, API, drain, exit. The sockets are bound; it closes them."""

    def __init__(self, options: ServeOptions, *, api_socket: socket.socket, admin_socket: socket.socket) -> None:
        self.state = AdminState(stall_seconds=options.stall_seconds)
        self.leave = asyncio.Event()
        """Set it to drain and end."""
        self.api_port: int = api_socket.getsockname()[1]
        self.admin_port: int = admin_socket.getsockname()[1]
        self._options = options
        self._api_socket = api_socket
        self._admin_socket = admin_socket
        self._admin = _listener(create_admin(self.state, self._admin_keys()))
        self._exit_at_once = False

    def handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.leave.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    async def run(self, load: Callable[[], Awaitable[LoadedModel]]) -> int:
        """Serve until `leave`; returns the exit code. Raises what `load` raises, and ServeError."""
        admin_task = asyncio.create_task(self._admin.serve([self._admin_socket]))
        try:
            return await self._serve(await self._load(load))
        finally:
            self._admin.should_exit = True
            await admin_task

    async def _load(self, load: Callable[[], Awaitable[LoadedModel]]) -> LoadedModel:
        """Told to leave meanwhile, the process ends without waiting, and the engine's with it."""
        loading = asyncio.ensure_future(load())
        leave = asyncio.create_task(self.leave.wait())
        try:
            await asyncio.wait((loading, leave), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                return loading.result()
        finally:
            leave.cancel()
        logger.info("told to leave while loading")
        logging.shutdown()
        os._exit(0)

    async def _serve(self, model: LoadedModel) -> int:
        options = self._options
        engine, info = model.engine, model.engine.info
        metrics = EngineMetrics(options.settings.patterns)
        batching = LiveBatching(
            engine,
            initial_state(options.settings.settings, options.settings.generation),
            options.settings.envelope,
            counts=metrics.counts,
        )
        drain = Drain(
            lambda: engine.unfinished,
            lambda message: _abort_all(engine, message),
            endpoint_removal_seconds=options.endpoint_removal_seconds,
        )
        adapters = ServedAdapters(engine, base_names=options.served_names, root=options.lora_root)
        try:
            for name, folder in options.lora_modules:
                await adapters.load(name, folder)
        except ModelError:
            await engine.stop()
            raise
        limits = Limits(
            options.served_names,
            info.max_model_len,
            _kv_tokens(info),
            options.policy,
            tool_format=FORMATS[options.tool_call_parser]
            if options.tool_call_parser
            else recognise_format(model.tokenizer.chat_template),
            reasoning_format=REASONING_FORMATS[options.reasoning_parser] if options.reasoning_parser else None,
            template_variables=options.template_variables,
            structured_outputs=info.structured_outputs,
            window=options.context_window if info.kv_windows == (None,) else None,
        )
        if options.policy.context_policy is ContextPolicy.SLIDING_WINDOW:
            if limits.window is None:
                raise ServeError("ContextPolicyImpossible", NO_SLIDING_WINDOW, exit_code=2)
            logger.warning(
                "every token sees only the newest %d and the first %d tokens before it: models that were not trained "
                "for that forget what lies between, and may repeat themselves",
                *options.context_window,
            )

        async def render_metrics() -> bytes:
            report = await engine.report()
            meter = model.tokenizer.meter
            metrics.counts.encoded_characters = meter.characters
            metrics.counts.encoded_tokens = meter.tokens
            metrics.counts.encoding_seconds = meter.seconds
            snapshot = replace(
                _with_settings(report.snapshot, batching),
                pause_mode=drain.pause_mode,
                policy_version=policy.version,
                policy_limits=policy.limits(report.snapshot.policy_limits.get("effective", {})),
            )
            return await asyncio.to_thread(
                render,
                add_counts(report.counts, metrics.counts),
                snapshot,
                model_name=options.served_names[0],
                block_tokens=info.block_tokens,
            )

        completions = Completions(engine, model.tokenizer, limits, adapters)

        async def apply_admission(policy: AdmissionPolicy) -> None:
            await asyncio.wait_for(engine.admit_by(policy), CALL_TIMEOUT_SECONDS)

        policy = PolicyControl(
            completions,
            apply_admission=apply_admission,
            max_num_batched_tokens=options.settings.envelope.max_num_batched_tokens[1],
            counts=metrics.counts,
        )

        def on_resized() -> None:
            completions.limits = replace(completions.limits, kv_tokens=_kv_tokens(engine.info))

        resize = ResizeControl(engine, drain, on_resized=on_resized, counts=metrics.counts)
        parts = ApiParts(
            completions=completions,
            drain=drain,
            metrics=metrics,
            render_metrics=render_metrics,
            is_healthy=lambda: probe_live(self.state)[0],
            info=info,
            version=engine_version(),
            created=int(time.time()),
        )
        api = _listener(create_api(parts, api_keys=options.api_keys))
        api_task = asyncio.create_task(api.serve([self._api_socket]))
        while not api.started and not api_task.done():  # noqa: ASYNC110  # uvicorn offers no event
            await asyncio.sleep(0.01)
        gc.freeze()
        self.state.loaded = Loaded(
            engine,
            render_metrics,
            batching,
            policy,
            resize,
            drain,
            adapters,
            runner=options.runner,
            profile=options.profile,
            version=parts.version,
            default_drain_seconds=options.shutdown_timeout_seconds,
        )
        logger.info(
            "ready: %s on %s:%d, admin on %d; %d KV blocks of %d tokens in %s",
            ", ".join(options.served_names),
            options.host,
            self.api_port,
            self.admin_port,
            info.kv_blocks,
            info.block_tokens,
            info.kv_dtype,
        )
        try:
            return await self._until_left(engine, drain, api_task)
        finally:
            api.should_exit = self._admin.should_exit = True
            await api_task
            await engine.stop()

    async def _until_left(self, engine: EngineClient, drain: Drain, api_task: asyncio.Task[None]) -> int:
        leave = asyncio.create_task(self.leave.wait())
        failed = asyncio.create_task(engine.failed.wait())
        try:
            await asyncio.wait((leave, failed, api_task), return_when=asyncio.FIRST_COMPLETED)
            if api_task.done():
                raise ServeError("ListenerFailed", "the API listener ended by itself", exit_code=EXIT_ENGINE_FAILED)
            if not failed.done():
                logger.info("leaving: %d requests to end", engine.unfinished)
                options = self._options
                # A timeout that is shorter than the removal of the endpoints must not turn away who cannot know yet.
                timeout = max(options.shutdown_timeout_seconds, options.endpoint_removal_seconds)
                await thaw(engine)
                drained = drain.begin(timeout, at_once=self._exit_at_once, is_final=True)
                await asyncio.wait((drained, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise ServeError("EngineFailed", engine.failure or "unknown", exit_code=EXIT_ENGINE_FAILED)
        finally:
            leave.cancel()
            failed.cancel()
        logger.info("drained")
        return 0

    def _interrupt(self) -> None:
        """Ctrl-C: nobody routes to us, so refuse at once; a second one ends at once."""
        if self._exit_at_once:
            logging.shutdown()
            os._exit(130)
        self._exit_at_once = True
        self.leave.set()

    def _admin_keys(self) -> AdminKeys | None:
        options = self._options
        if options.admin_keys is None:
            return None
        if not options.object_uid:
            logger.warning(
                "the admin API is off: TIDEGATE_OBJECT_UID is not set, so no token's audience can be checked"
            )
            return None
        return AdminKeys(options.admin_keys, options.object_uid)


def _kv_tokens(info: ModelInfo) -> int:
    """Tokens that a request alone may have in the KV cache."""
    return tokens_that_fit(info.group_blocks - 1, info.block_tokens, windows_of(info.kv_windows))


def _with_settings(snapshot: Snapshot, batching: LiveBatching) -> Snapshot:
    """What the engine reported, with the settings that were asked for and their bounds."""
    state, envelope = batching.state, batching.envelope
    return replace(
        snapshot,
        spec=state.spec,
        capacity=BatchSettings(
            envelope.max_num_seqs[1], envelope.max_num_batched_tokens[1], envelope.long_prefill_token_threshold[1]
        ),
        settings_generation=state.generation,
    )


async def connect(
    end: socket.socket, model: Model, *, process: EngineProcess | None, stall_seconds: float
) -> LoadedModel:
    """The tokenizer, read here, and the engine that another process loads meanwhile."""
    silence_seconds = min(SILENCE_SECONDS, max(MIN_SILENCE_SECONDS, stall_seconds))
    try:
        engine, tokenizer = await asyncio.gather(
            EngineClient.connect(end, process=process, silence_seconds=silence_seconds),
            asyncio.to_thread(model.load_tokenizer),
        )
    except EngineGone as error:
        raise ServeError("EngineFailed", str(error), exit_code=EXIT_ENGINE_FAILED) from error
    return LoadedModel(engine, tokenizer)


def _abort_all(engine: EngineClient, message: str) -> None:
    for request in engine.live_requests():
        engine.abort(request.id, error=message)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port is known before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ServeError("PortUnavailable", f"{host}:{port} cannot be used: {error.strerror}", exit_code=2) from error
    return bound
