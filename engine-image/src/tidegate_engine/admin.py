"""The admin listener (port 8001): probes and metrics for everybody, `/admin/v1` for holders of the operator's token.

It is up before the model is loaded, so that probes get an answer. Default deny: what is not a probe needs a token.
Built by `serve`; the rules of batch settings are in `batching`, those of leaving in `drain`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate_engine.adapters import ServedAdapters
from tidegate_engine.admin_keys import AdminKeys, TokenRefused
from tidegate_engine.batching import BatchingState, Conflict, apply_change, expire, parse_change
from tidegate_engine.drain import PAUSE_MODES, Drain, DrainPhase
from tidegate_engine.engine_client import EngineClient, EngineGone
from tidegate_engine.metrics import CONTENT_TYPE, Counts
from tidegate_engine.policy_control import PolicyControl
from tidegate_engine.resize import ResizeControl, ResizePhase
from tidegate_engine.server import JsonResponse, metrics_page
from tidegate_engine.settings import SETTING_NAMES, BatchSettings, Envelope, Violation
from tidegate_engine.weights import ModelError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/metrics"})
CALL_TIMEOUT_SECONDS = 30.0
"""How long an order may wait for the step in flight."""

ADAPTER_STATUS = {
    "AdaptersOff": 409,
    "AdapterExists": 409,
    "AdapterLimit": 409,
    "AdapterInUse": 409,
    "AdapterPathRefused": 403,
    "AdapterUnknown": 404,
    "ModelNotFound": 404,
}
"""By the reason of a refusal; any other is about what the files hold."""
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
AUDIT_NOTE = "tidegate.audit"
"""Key of the request's scope under which a route says what its order did."""

logger = logging.getLogger(__name__)
audit_logger = logging.getLogger("tidegate_engine.audit")
Result = TypeVar("Result")


class LiveBatching:
    """The batch settings of a running engine: one writer at a time, applied between two steps."""

    def __init__(
        self,
        engine: EngineClient,
        state: BatchingState,
        envelope: Envelope,
        *,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.envelope = envelope
        self._engine = engine
        self._counts = counts
        self._clock = clock
        self._lock = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None

    @property
    def effective(self) -> BatchSettings:
        return self._engine.status().settings

    async def patch(self, data: object, *, if_match: str | None, dry_run: bool) -> Response:
        """Apply a PATCH body; the answer is the HTTP response."""
        change = parse_change(data, if_match=if_match)
        if isinstance(change, Violation):
            return self._refuse(change)
        async with self._lock:
            state = apply_change(self.state, change, self.envelope, now=self._clock())
            if isinstance(state, Conflict | Violation):
                return self._refuse(state)
            warnings = self._warnings(state.spec)
            step_id = self._engine.status().health.step_id + 1
            if not dry_run:
                step_id = await self._set(state)
                self._counts.settings_changes["applied"] += 1
        return JsonResponse(
            {
                "version": state.version,
                "generation": state.generation,
                "applied_at_step": step_id,
                "effective": state.spec.as_dict(),
                "warnings": warnings,
            },
            headers={"etag": f'"{state.version}"'},
        )

    def describe(self) -> Response:
        state, status = self.state, self._engine.status()
        body = {
            "version": state.version,
            "generation": state.generation,
            "spec": state.spec.as_dict(),
            "effective": status.settings.as_dict(),
            "envelope": {name: list(self.envelope.bounds(name)) for name in SETTING_NAMES},
            "status": {
                "running": status.running,
                "over_cap": status.over_cap,
                "draining_to": status.settings.max_num_seqs if status.over_cap else None,
            },
        }
        return JsonResponse(body, headers={"etag": f'"{state.version}"'})

    async def _set(self, state: BatchingState) -> int:
        """Make `state` the acting one; returns the first step that is planned under it."""
        step_id = await _call(self._engine.apply(state.spec))
        if state.spec != self.state.spec or state.generation != self.state.generation:
            logger.info("batch settings of generation %d act from step %d: %s", state.generation, step_id, state.spec)
        self.state = state
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if state.expires_at is not None:
            self._expire_after(max(0.0, state.expires_at - self._clock()))
        return step_id

    def _expire_after(self, seconds: float) -> None:
        self._expiry = asyncio.get_running_loop().call_later(seconds, self._start_expiry)

    def _start_expiry(self) -> None:
        self._expiring = asyncio.ensure_future(self._expire())

    async def _expire(self) -> None:
        async with self._lock:
            state = expire(self.state, self._clock())
            if state is self.state:
                return
            logger.warning("nobody renewed the batch settings of generation %d in time", self.state.generation)
            try:
                await self._set(state)
            except TimeoutError:
                self._expire_after(0)  # the step in flight is a long one: wait again
            except EngineGone:
                return
            else:
                self._counts.settings_changes["reverted"] += 1

    def _warnings(self, spec: BatchSettings) -> list[str]:
        over = self._engine.status().running - spec.max_num_seqs
        if over <= 0:
            return []
        return [f"{over} running requests are above max_num_seqs {spec.max_num_seqs}; they end, none is cut"]

    def _refuse(self, reason: Conflict | Violation) -> Response:
        self._counts.settings_changes["rejected"] += 1
        if isinstance(reason, Conflict):
            body = {
                "code": reason.code,
                "message": reason.message,
                "version": self.state.version,
                "generation": self.state.generation,
            }
            return JsonResponse({"error": body}, 409)
        error = {"field": reason.field, "allowed": reason.allowed and list(reason.allowed), "reason": reason.reason}
        return JsonResponse({"error": error}, 422)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What exists once the model is loaded."""

    engine: EngineClient
    render_metrics: Callable[[], Awaitable[bytes]]
    batching: LiveBatching
    policy: PolicyControl
    resize: ResizeControl
    drain: Drain
    adapters: ServedAdapters
    runner: str
    profile: str | None
    version: str
    default_drain_seconds: float


@dataclass(slots=True)
class AdminState:
    """`loaded` is None while the model is loading."""

    stall_seconds: float
    loaded: Loaded | None = None


def probe_live(state: AdminState) -> tuple[bool, str]:
    """Whether the process is worth keeping. Loading and idling are; work without progress is not, for too long."""
    if state.loaded is None:
        return True, "loading"
    health = state.loaded.engine.health()
    if not health.alive:
        return False, health.failure or "the engine loop has ended"
    if health.stalled_seconds > state.stall_seconds:
        return False, f"no progress for {health.stalled_seconds:.0f} s at step {health.step_id}"
    return True, "ok"


def probe_ready(state: AdminState) -> tuple[bool, str]:
    """Whether new requests should come here. Stalls count after half the time that liveness gives them."""
    loaded = state.loaded
    if loaded is None:
        return False, "loading"
    if loaded.drain.phase is not DrainPhase.SERVING:
        return False, f"draining: {loaded.drain.phase}"
    if loaded.drain.is_paused:
        return False, "paused"
    if loaded.resize.phase is not ResizePhase.IDLE:
        return False, f"the KV cache is resized: {loaded.resize.phase}"
    health = loaded.engine.health()
    if not health.alive:
        return False, health.failure or "the engine loop has ended"
    if loaded.engine.is_silent:
        return False, f"the engine's process has not said anything for {health.silent_seconds:.0f} s"
    if health.stalled_seconds > state.stall_seconds / 2:
        return False, f"no progress for {health.stalled_seconds:.0f} s at step {health.step_id}"
    return True, "ok"


class TokenGuard:
    """Default deny, before any route; and a line in the audit log for every order, whatever route takes it."""

    def __init__(self, app: ASGIApp, keys: AdminKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        who = self._identify(scope)
        if isinstance(who, Response):
            await who(scope, receive, send)
        elif scope["method"] in READING_METHODS:
            await self._app(scope, receive, send)
        else:
            await self._run_order(who, scope, receive, send)

    async def _run_order(self, who: str, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            address = scope["client"][0] if scope.get("client") else "unknown"
            note = scope.get(AUDIT_NOTE, "")
            audit_logger.info(
                "%s %s by %r from %s: %d%s", scope["method"], scope["path"], who, address, status, note and f", {note}"
            )

    def _identify(self, scope: Scope) -> str | Response:
        """Who asks, or the refusal."""
        if self._keys is None:
            return _error(403, "admin_off", "the admin API is off: no admin keys were given")
        headers: dict[bytes, bytes] = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        try:
            if scheme.lower() != "bearer" or not token:
                raise TokenRefused("a bearer token is needed")
            return self._keys.check(token.strip())
        except TokenRefused as error:
            return _error(401, "unauthorized", str(error), headers={"www-authenticate": "Bearer"})


def create_admin(state: AdminState, keys: AdminKeys | None) -> ASGIApp:
    """The ASGI app of port 8001."""
    app = FastAPI(title="Tidegate engine admin", openapi_url=None, docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(TimeoutError, _on_timeout)
    app.add_exception_handler(EngineGone, _on_engine_gone)
    app.add_exception_handler(ModelError, _on_refused_adapter)
    _add_probes(app, state)
    _add_batching(app, state)
    _add_resize(app, state)
    _add_drain(app, state)
    _add_orders(app, state)
    _add_adapters(app, state)
    return TokenGuard(app, keys)


def _add_probes(app: FastAPI, state: AdminState) -> None:
    @app.get("/livez")
    async def livez() -> Response:
        return _probe(*probe_live(state))

    @app.get("/readyz")
    async def readyz() -> Response:
        return _probe(*probe_ready(state))

    @app.get("/startupz")
    async def startupz() -> Response:
        return _probe(state.loaded is not None, "ok" if state.loaded is not None else "loading")

    @app.get("/metrics")
    async def metrics() -> Response:
        if state.loaded is None:
            return Response(b"", media_type=CONTENT_TYPE)
        return await metrics_page(state.loaded.render_metrics)


def _add_batching(app: FastAPI, state: AdminState) -> None:
    @app.get("/admin/v1/batching")
    async def get_batching() -> Response:
        return _loaded(state).batching.describe()

    @app.patch("/admin/v1/batching")
    async def patch_batching(request: Request) -> Response:
        loaded = _loaded(state)
        if loaded.drain.phase is not DrainPhase.SERVING:
            return _error(409, "draining", "the settings of a draining replica are not changed")
        data = await _json(request)
        return await loaded.batching.patch(data, if_match=request.headers.get("if-match"), dry_run=_is_dry(request))

    @app.get("/admin/v1/policy")
    async def get_policy() -> Response:
        return _loaded(state).policy.describe()

    @app.patch("/admin/v1/policy")
    async def patch_policy(request: Request) -> Response:
        loaded = _loaded(state)
        if loaded.drain.phase is not DrainPhase.SERVING:
            return _error(409, "draining", "the policy of a draining replica is not changed")
        data = await _json(request)
        return await loaded.policy.patch(data, if_match=request.headers.get("if-match"), dry_run=_is_dry(request))


def _add_resize(app: FastAPI, state: AdminState) -> None:
    @app.post("/admin/v1/resize")
    async def resize(request: Request) -> Response:
        loaded = _loaded(state)
        data = await _json(request)
        request.scope[AUDIT_NOTE] = f"of {loaded.engine.info.kv_blocks} KV blocks: {data!r:.200}"
        return await loaded.resize.begin(data, dry_run=_is_dry(request))

    @app.get("/admin/v1/resize")
    async def get_resize() -> Response:
        return JsonResponse(await _loaded(state).resize.describe())

    @app.delete("/admin/v1/resize")
    async def cancel_resize() -> Response:
        return await _loaded(state).resize.cancel()


def _is_dry(request: Request) -> bool:
    return request.query_params.get("dryRun", "false").lower() in ("true", "1", "all")


def _add_drain(app: FastAPI, state: AdminState) -> None:
    @app.post("/admin/v1/drain")
    async def start_drain(request: Request) -> Response:
        loaded = _loaded(state)
        data = await _json(request)
        timeout = data.get("timeout_seconds", loaded.default_drain_seconds) if isinstance(data, Mapping) else None
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0:
            error = {"field": "timeout_seconds", "allowed": None, "reason": "timeout_seconds must be 0 or more"}
            return JsonResponse({"error": error}, 422)
        logger.info("drain asked for, %s s", timeout)
        await thaw(loaded.engine)
        loaded.drain.begin(float(timeout))
        return JsonResponse(_describe_drain(loaded), 202)

    @app.get("/admin/v1/drain")
    async def get_drain() -> Response:
        return JsonResponse(_describe_drain(_loaded(state)))

    @app.delete("/admin/v1/drain")
    async def cancel_drain() -> Response:
        loaded = _loaded(state)
        if loaded.drain.cancel():
            logger.info("drain cancelled")
        return JsonResponse(_describe_drain(loaded))


def _add_orders(app: FastAPI, state: AdminState) -> None:
    @app.get("/admin/v1/info")
    async def info() -> Response:
        return JsonResponse(await _describe(_loaded(state)))

    @app.post("/admin/v1/abort")
    async def abort(request: Request) -> Response:
        loaded = _loaded(state)
        data = await _json(request)
        wanted = data.get("request_id") if isinstance(data, Mapping) else None
        is_all = isinstance(data, Mapping) and data.get("all") is True
        if is_all == (isinstance(wanted, str) and bool(wanted)):
            error = {"field": "request_id", "allowed": None, "reason": "give request_id as a text, or all as true"}
            return JsonResponse({"error": error}, 422)
        aborted = _abort(loaded.engine, None if is_all else str(wanted))
        request.scope[AUDIT_NOTE] = f"{len(aborted)} requests aborted"
        return JsonResponse({"aborted": aborted}, 200 if aborted or is_all else 404)

    @app.post("/admin/v1/cache/flush")
    async def flush(request: Request) -> Response:
        flushed = await _call(_loaded(state).engine.flush_cache())
        request.scope[AUDIT_NOTE] = f"{flushed} blocks flushed"
        return JsonResponse({"flushed_blocks": flushed})

    @app.post("/admin/v1/pause")
    async def pause(request: Request) -> Response:
        loaded = _loaded(state)
        data = await _json(request)
        mode = data.get("mode", "wait") if isinstance(data, Mapping) else None
        if mode not in PAUSE_MODES:
            reason = f"mode must be {' or '.join(PAUSE_MODES)}"
            error = {"field": "mode", "allowed": list(PAUSE_MODES), "reason": reason}
            return JsonResponse({"error": error}, 422)
        if mode == "keep" and loaded.drain.phase is not DrainPhase.SERVING:
            return _error(409, "draining", "a draining replica ends its requests and cannot keep them")
        loaded.drain.pause_mode = mode
        aborted = _abort(loaded.engine, None) if mode == "abort" else []
        await _call(loaded.engine.freeze(mode == "keep"))
        request.scope[AUDIT_NOTE] = f"{len(aborted)} requests aborted"
        return JsonResponse({**_describe_pause(loaded), "aborted": aborted})

    @app.get("/admin/v1/pause")
    async def get_pause() -> Response:
        return JsonResponse(_describe_pause(_loaded(state)))

    @app.post("/admin/v1/resume")
    async def resume() -> Response:
        loaded = _loaded(state)
        await _call(loaded.engine.freeze(False))
        loaded.drain.pause_mode = None
        return JsonResponse(_describe_pause(loaded))


def _add_adapters(app: FastAPI, state: AdminState) -> None:
    """vLLM's paths and bodies, so that what manages its adapters manages ours."""

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        adapters = _loaded(state).adapters
        name, path = await _texts(request, "lora_name", "lora_path")
        info = await adapters.load_below_root(name, path)
        request.scope[AUDIT_NOTE] = f"adapter {name!r} loaded"
        return JsonResponse(asdict(info))

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        adapters = _loaded(state).adapters
        (name,) = await _texts(request, "lora_name")
        is_gone = await adapters.unload(name, wait_seconds=CALL_TIMEOUT_SECONDS)
        request.scope[AUDIT_NOTE] = f"adapter {name!r} unloaded"
        body = {"name": name, "unloaded": is_gone, "requests_left": adapters.running(name)}
        return JsonResponse(body, 200 if is_gone else 202)


async def _texts(request: Request, *names: str) -> list[str]:
    """These fields of the body; raises HTTPException."""
    data = await _json(request)
    fields = data if isinstance(data, Mapping) else {}
    if any(fields.get(name) for name in ("load_inplace", "is_3d_lora_weight")):
        raise HTTPException(
            422, "load_inplace and is_3d_lora_weight are not supported; unload an adapter, then load it"
        )
    values = [fields.get(name) for name in names]
    if not all(isinstance(value, str) and value for value in values):
        raise HTTPException(422, f"the body must be an object with the texts {' and '.join(names)}")
    return [str(value) for value in values]


def _abort(engine: EngineClient, wanted: str | None) -> list[str]:
    """Abort the requests of the call `wanted`, or all; returns their ids."""
    live = [request.id for request in engine.live_requests()]
    # A call's id stands for all its choices.
    aborted = [
        request_id
        for request_id in live
        if wanted is None or request_id == wanted or request_id.rpartition("-")[0] == wanted
    ]
    for request_id in aborted:
        engine.abort(request_id, error="the request was aborted by an administrator")
    return aborted


def _describe_pause(loaded: Loaded) -> dict[str, object]:
    status = loaded.engine.status()
    return {
        "paused": loaded.drain.is_paused,
        "mode": loaded.drain.pause_mode,
        "frozen": status.is_frozen,
        "running": status.running,
        "waiting": status.waiting,
    }


async def thaw(engine: EngineClient) -> None:
    """Let frozen requests go on, since whoever leaves ends them first; an engine that does not answer is left alone."""
    if engine.status().is_frozen:
        with suppress(TimeoutError, EngineGone):
            await _call(engine.freeze(False))


async def _call(answer: Awaitable[Result]) -> Result:
    return await asyncio.wait_for(answer, CALL_TIMEOUT_SECONDS)


def _describe_drain(loaded: Loaded) -> dict[str, object]:
    engine = loaded.engine
    status = engine.status()
    remaining = [request.max_tokens - request.output_tokens for request in engine.live_requests()]
    return {
        "phase": loaded.drain.phase.value,
        "running": status.running,
        "waiting": status.waiting,
        "longest_remaining_tokens": max(remaining, default=0),
        "cached_tokens": status.cached_blocks * engine.info.block_tokens // len(engine.info.kv_windows),
        "seconds_left": loaded.drain.seconds_left,
    }


async def _describe(loaded: Loaded) -> dict[str, object]:
    engine = loaded.engine
    step_model = (await _call(engine.report())).snapshot.step_model
    return {
        **asdict(engine.info),
        "version": loaded.version,
        "runner": loaded.runner,
        "profile": loaded.profile,
        "step_model": None if step_model is None else step_model.as_dict(),
        "start_seconds": dict(engine.start_seconds),
        "settings_generation": loaded.batching.state.generation,
        "adapters": [asdict(adapter.info) for adapter in loaded.adapters.served.values()],
        "policy_version": loaded.policy.version,
        "paused": loaded.drain.is_paused,
        "pause_mode": loaded.drain.pause_mode,
    }


def _loaded(state: AdminState) -> Loaded:
    if state.loaded is None:
        raise HTTPException(503, "the model is loading", headers={"retry-after": "1"})
    return state.loaded


async def _json(request: Request) -> object:
    body = await request.body()
    try:
        return orjson.loads(body) if body else {}
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from error


def _probe(is_good: bool, text: str) -> Response:
    return Response(text + "\n", 200 if is_good else 503, media_type="text/plain")


def _error(status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None) -> Response:
    return JsonResponse({"error": {"code": code, "message": message}}, status, headers=headers)


async def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 422: "invalid_value", 503: "loading"}
    code = codes.get(error.status_code, "error")
    return _error(error.status_code, code, str(error.detail), headers=error.headers)


async def _on_timeout(_request: Request, _error_: Exception) -> Response:
    return _error(503, "busy", "the engine did not answer in time", headers={"retry-after": "5"})


async def _on_refused_adapter(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ModelError)
    return _error(ADAPTER_STATUS.get(error.reason, 422), error.reason, error.message)


async def _on_engine_gone(_request: Request, error: Exception) -> Response:
    return _error(503, "engine_failed", str(error))
