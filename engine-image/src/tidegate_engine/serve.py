"""The composition root: builds runner, scheduler, engine and the two listeners, runs them, and leaves in order.

Reads no flags and no environment (`cli` does). The admin listener is up before the model is loaded, the API afterwards.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from tidegate_engine.admin import AdminState, LiveBatching, Loaded, create_admin, probe_live
from tidegate_engine.admin_keys import AdminKeys
from tidegate_engine.batching import initial_state
from tidegate_engine.blocks import BlockPool
from tidegate_engine.completions import Completions, Limits, Tokenizer
from tidegate_engine.drain import Drain
from tidegate_engine.engine import Engine
from tidegate_engine.host_pool import HostPool
from tidegate_engine.metrics import EngineMetrics, HostUse, Snapshot, host_memory_bytes
from tidegate_engine.ngrams import NgramSpeculation
from tidegate_engine.runner import ModelInfo, Runner
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.server import ApiParts, create_api
from tidegate_engine.settings import BatchSettings, SettingsFile

KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of usual proxies, so that they close a connection first."""
FLUSH_SECONDS = 5
"""How long a client may take to read the end of its answer after the drain."""
SWITCH_INTERVAL_SECONDS = 0.001
"""How long the event loop may keep the loop's thread from taking the interpreter after a step."""
EXIT_ENGINE_FAILED = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a loader gives. `on_idle` is called when the loop has nothing to do."""

    runner: Runner
    tokenizer: Tokenizer
    on_idle: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve; everything that does not concern the model itself."""

    host: str
    port: int
    admin_port: int
    served_names: tuple[str, ...]
    settings: SettingsFile
    prefix_caching: bool
    shutdown_timeout_seconds: float
    endpoint_removal_seconds: float
    stall_seconds: float
    runner: str
    profile: str | None = None
    admin_keys: Path | None = None
    object_uid: str | None = None
    api_keys: tuple[str, ...] = ()
    max_queued: int | None = None
    speculation: NgramSpeculation | None = None


class ServeError(Exception):
    """Serving ended, or could not begin, for a reason that the user can act on: `Reason: sentence`."""

    def __init__(self, reason: str, message: str, *, exit_code: int) -> None:
        super().__init__(f"{reason}: {message}")
        self.exit_code = exit_code


def run(options: ServeOptions, load: Callable[[], LoadedModel]) -> int:
    """Serve until told to leave; returns the exit code. Raises what `load` raises, and ServeError."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    with contextlib.ExitStack() as sockets:
        api_socket = sockets.enter_context(bind(options.host, options.port))
        admin_socket = sockets.enter_context(bind(options.host, options.admin_port))

        async def main() -> int:
            process = Process(options, api_socket=api_socket, admin_socket=admin_socket)
            process.handle_signals()
            return await process.run(load)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())


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
            log_config=None,
            access_log=False,
            server_header=False,
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

    async def run(self, load: Callable[[], LoadedModel]) -> int:
        """Serve until `leave`; returns the exit code. Raises what `load` raises, and ServeError."""
        admin_task = asyncio.create_task(self._admin.serve([self._admin_socket]))
        try:
            return await self._serve(await self._load(load))
        finally:
            self._admin.should_exit = True
            await admin_task

    async def _load(self, load: Callable[[], LoadedModel]) -> LoadedModel:
        """Load in a thread; told to leave meanwhile, the process ends without waiting for it."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[LoadedModel] = loop.create_future()

        def work() -> None:
            try:
                model = load()
            except Exception as error:  # noqa: BLE001  # it is raised where the future is awaited
                loop.call_soon_threadsafe(_set_if_waiting, loaded, None, error)
            else:
                loop.call_soon_threadsafe(_set_if_waiting, loaded, model, None)

        threading.Thread(target=work, name="load", daemon=True).start()
        leave = asyncio.create_task(self.leave.wait())
        try:
            await asyncio.wait((loaded, leave), return_when=asyncio.FIRST_COMPLETED)
            if loaded.done():
                return loaded.result()
        finally:
            leave.cancel()
        logger.info("told to leave while loading")
        # A thread inside native code would keep the interpreter from ending.
        logging.shutdown()
        os._exit(0)

    async def _serve(self, model: LoadedModel) -> int:
        options = self._options
        engine, batching = _build_engine(model, options)
        drain = Drain(
            lambda: engine.unfinished,
            lambda message: _abort_all(engine, message),
            endpoint_removal_seconds=options.endpoint_removal_seconds,
        )
        info = model.runner.info
        limits = Limits(
            options.served_names,
            info.max_model_len,
            engine.scheduler.blocks.usable * info.block_tokens,
            options.max_queued,
            structured_outputs=info.structured_outputs,
        )
        parts = ApiParts(
            completions=Completions(engine, model.tokenizer, limits),
            drain=drain,
            metrics=engine.metrics,
            is_healthy=lambda: probe_live(self.state)[0],
            version=engine_version(),
            created=int(time.time()),
        )
        api = _listener(create_api(parts, api_keys=options.api_keys))
        engine.start()
        api_task = asyncio.create_task(api.serve([self._api_socket]))
        while not api.started and not api_task.done():  # noqa: ASYNC110  # uvicorn offers no event
            await asyncio.sleep(0.01)
        gc.freeze()
        self.state.loaded = Loaded(
            engine,
            batching,
            drain,
            runner=options.runner,
            profile=options.profile,
            version=parts.version,
            default_drain_seconds=options.shutdown_timeout_seconds,
        )
        logger.info(
            "ready: %s on %s:%d, admin on %d",
            ", ".join(options.served_names),
            options.host,
            self.api_port,
            self.admin_port,
        )
        try:
            return await self._until_left(engine, drain, api_task)
        finally:
            api.should_exit = self._admin.should_exit = True
            await api_task
            engine.stop()

    async def _until_left(self, engine: Engine, drain: Drain, api_task: asyncio.Task[None]) -> int:
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


def _build_engine(model: LoadedModel, options: ServeOptions) -> tuple[Engine, LiveBatching]:
    info = model.runner.info
    file = options.settings
    host = HostPool(info.host_blocks) if info.host_blocks and options.prefix_caching else None
    pool = BlockPool(info.kv_blocks, info.block_tokens, prefix_caching=options.prefix_caching, host=host)
    scheduler = Scheduler(file.settings, pool, max_model_len=info.max_model_len, speculation=options.speculation)
    metrics = EngineMetrics(
        options.served_names[0],
        patterns=file.patterns,
        block_tokens=info.block_tokens,
        snapshot=lambda: _snapshot(engine, batching),
    )
    engine = Engine(model.runner, scheduler, metrics=metrics, on_idle=model.on_idle)
    batching = LiveBatching(engine, initial_state(file.settings, file.generation), file.envelope)
    return engine, batching


def _snapshot(engine: Engine, batching: LiveBatching) -> Snapshot:
    scheduler, runner = engine.scheduler, engine.runner
    pool, info, state = scheduler.blocks, runner.info, batching.state
    host = host_memory_bytes()
    memory = {"weights": info.weight_bytes, "kv": info.kv_token_bytes * info.block_tokens * info.kv_blocks}
    return Snapshot(
        running=scheduler.running,
        waiting=scheduler.waiting,
        waiting_prompt_tokens=scheduler.waiting_prompt_tokens,
        running_context_tokens=scheduler.running_context_tokens,
        running_output_past_edges=scheduler.running_output_past_edges,
        kv_used=pool.used,
        kv_cached=pool.cached,
        kv_free=pool.free,
        preemptions=scheduler.preemptions,
        spec=state.spec,
        effective=scheduler.settings,
        capacity=BatchSettings(
            batching.envelope.max_num_seqs[1],
            batching.envelope.max_num_batched_tokens[1],
            batching.envelope.long_prefill_token_threshold[1],
        ),
        settings_generation=state.generation,
        step_model=runner.step_model or engine.fit.model,
        step_model_residual_ratio=engine.fit.residual_ratio,
        step_model_samples=engine.fit.samples,
        memory_bytes=memory if host is None else {**memory, "host": host},
        start_seconds=runner.start_seconds,
        drafted_tokens=scheduler.drafted_tokens,
        accepted_tokens=scheduler.accepted_tokens,
        host=None if pool.host is None else _host_use(pool.host, info),
    )


def _host_use(host: HostPool, info: ModelInfo) -> HostUse:
    return HostUse(
        slots=host.slots,
        used=host.used,
        stored_blocks=host.stored_blocks,
        loaded_blocks=host.loaded_blocks,
        block_tokens=info.block_tokens,
        block_bytes=info.block_tokens * info.kv_token_bytes,
    )


def _abort_all(engine: Engine, message: str) -> None:
    for request in engine.scheduler.live_requests():
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


def _set_if_waiting(future: "asyncio.Future[LoadedModel]", model: LoadedModel | None, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    elif model is not None:
        future.set_result(model)
