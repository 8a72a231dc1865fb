"""The API listener (port 8000): routes, authentication, disconnects. No logic of its own: calls go to `completions`.

Imports no torch. Built by `serve`.
"""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate_engine.completions import Completions, Generation
from tidegate_engine.drain import Drain
from tidegate_engine.engine_client import EngineGone
from tidegate_engine.metrics import CONTENT_TYPE
from tidegate_engine.openai import (
    ApiError,
    ChatCall,
    CompletionCall,
    DetokenizeCall,
    TokenizeCall,
    model_list,
    parse,
)

MAX_BODY_BYTES = 32 * 1024 * 1024
OPEN_PATHS = frozenset({"/health", "/metrics"})
CLIENT_CLOSED_REQUEST = 499
DRAIN_RETRY_AFTER_SECONDS = 5
METRICS_TIMEOUT_SECONDS = 5.0


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return orjson.dumps(content)


def error_response(error: ApiError) -> Response:
    return JsonResponse(error.body(), error.status, headers=dict(error.headers))


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends a generation as server-sent events; a client that goes away ends it."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        # A stream has no length.
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                await pump
        finally:
            self._generation.abort()
            for task in (pump, watch):
                task.cancel()

    async def _pump(self, send: Send) -> None:
        async for data in self._generation.stream():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def whole_answer(generation: Generation, receive: Receive) -> Response:
    """The answer in one piece; a client that goes away meanwhile ends it."""
    answer = asyncio.ensure_future(generation.answer())
    watch = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return JsonResponse(await answer)
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        generation.abort()
        for task in (answer, watch):
            task.cancel()


class Guard:
    """Default deny, before any route: without a valid key only health and metrics are answered."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._api_keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await error_response(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return _body_too_large()
        if not self._api_keys or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and any(hmac.compare_digest(given.strip(), key) for key in self._api_keys):
            return None
        return ApiError(
            401,
            "the API key is missing or wrong",
            type="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


@dataclass(frozen=True, slots=True)
class ApiParts:
    """What the routes call."""

    completions: Completions
    drain: Drain
    render_metrics: Callable[[], Awaitable[bytes]]
    is_healthy: Callable[[], bool]
    version: str
    created: int


def create_api(parts: ApiParts, *, api_keys: tuple[str, ...] = ()) -> ASGIApp:
    """The ASGI app of port 8000."""
    app = FastAPI(title="Tidegate engine", openapi_url=None, docs_url=None, redoc_url=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_openai_routes(app, parts)
    _add_plain_routes(app, parts)
    return Guard(app, api_keys)


def _add_openai_routes(app: FastAPI, parts: ApiParts) -> None:
    completions = parts.completions

    @app.get("/v1/models")
    async def models() -> Response:
        limits = completions.limits
        return JsonResponse(model_list(limits.served_names, created=parts.created, max_model_len=limits.max_model_len))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        completions.check_model(name)
        limits = completions.limits
        data = model_list((name,), created=parts.created, max_model_len=limits.max_model_len)["data"]
        return JsonResponse(data[0])  # type: ignore[index]

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        arrival = time.monotonic()
        _check_accepts(parts.drain)
        call = parse(CompletionCall, await _read_body(request))
        generation = await completions.begin_completion(call, arrival=arrival)
        return await _respond(generation, request, stream=bool(call.stream))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        arrival = time.monotonic()
        _check_accepts(parts.drain)
        call = parse(ChatCall, await _read_body(request))
        generation = await completions.begin_chat(call, arrival=arrival)
        return await _respond(generation, request, stream=bool(call.stream))


def _add_plain_routes(app: FastAPI, parts: ApiParts) -> None:
    completions = parts.completions

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if parts.is_healthy() else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return await metrics_page(parts.render_metrics)

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": parts.version})

    @app.get("/load")
    async def load() -> Response:
        return JsonResponse(_load(completions))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        call = parse(TokenizeCall, await _read_body(request))
        completions.check_model(call.model)
        if (call.prompt is None) == (call.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
        if call.messages is not None:
            ids = await completions.encode_chat(call.messages)
        else:
            ids = await completions.encode(call.prompt or "")
        return JsonResponse({"tokens": ids, "count": len(ids), "max_model_len": completions.limits.max_model_len})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        call = parse(DetokenizeCall, await _read_body(request))
        completions.check_model(call.model)
        completions.check_ids(call.tokens, param="tokens")
        return JsonResponse({"prompt": completions.tokenizer.decode(call.tokens)})


def _load(completions: Completions) -> Mapping[str, int]:
    status = completions.engine.status()
    return {
        "server_load": status.running + status.waiting,
        "requests_running": status.running,
        "requests_waiting": status.waiting,
        "max_num_seqs": status.settings.max_num_seqs,
    }


async def metrics_page(render_metrics: Callable[[], Awaitable[bytes]]) -> Response:
    """What Prometheus reads; 503 while the engine does not tell, since old numbers would look like new ones."""
    try:
        page = await asyncio.wait_for(render_metrics(), METRICS_TIMEOUT_SECONDS)
    except (EngineGone, TimeoutError):
        return Response("the engine does not answer\n", 503, media_type="text/plain")
    return Response(page, media_type=CONTENT_TYPE)


async def _respond(generation: Generation, request: Request, *, stream: bool) -> Response:
    generation.start()
    return EventStream(generation) if stream else await whole_answer(generation, request.receive)


async def _read_body(request: Request) -> bytes:
    """The whole body; raises ApiError when it is too large, which one without a length tells only as it comes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise _body_too_large()
    return bytes(body)


def _body_too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")


def _check_accepts(drain: Drain) -> None:
    if not drain.accepts:
        raise ApiError(
            503,
            "this replica is shutting down",
            type="server_error",
            code="shutting_down",
            headers={"retry-after": str(DRAIN_RETRY_AFTER_SECONDS), "connection": "close"},
        )


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "not_found" if error.status_code == 404 else None
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers or {}))
