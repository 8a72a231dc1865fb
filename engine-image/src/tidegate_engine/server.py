"""The API listener (port 8000): routes, authentication, disconnects. No logic of its own: calls go to `completions`.

Imports no torch. Built by `serve`.
"""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, wraps

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate_engine.completions import Completions, Generation
from tidegate_engine.drain import Drain
from tidegate_engine.embeddings import EmbeddingWork, begin_embedding
from tidegate_engine.engine_client import EngineGone
from tidegate_engine.metrics import CONTENT_TYPE, EngineMetrics
from tidegate_engine.ollama import (
    EMULATED_VERSION,
    OllamaChatCall,
    OllamaEmbedCall,
    OllamaGenerateCall,
    OllamaWire,
    Served,
    ShowCall,
    error_body,
    resolve_name,
)
from tidegate_engine.openai import (
    ApiError,
    ChatCall,
    CompletionCall,
    DetokenizeCall,
    EmbeddingCall,
    TokenizeCall,
    parse,
)
from tidegate_engine.openapi import describe_api
from tidegate_engine.responses import ResponseCall, ResponseWire
from tidegate_engine.runner import ModelInfo

Handler = Callable[[Request], Awaitable[Response]]
CONTENT_TYPES = {
    "text/event-stream": b"text/event-stream; charset=utf-8",
    "application/x-ndjson": b"application/x-ndjson",
}
"""Of streams, by media type."""
MAX_BODY_BYTES = 32 * 1024 * 1024
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
OLLAMA_PREFIX = "/api/"
CLIENT_CLOSED_REQUEST = 499
DRAIN_RETRY_AFTER_SECONDS = 5
METRICS_TIMEOUT_SECONDS = 5.0
REJECTION_REASONS = {
    401: "unauthorized",
    404: "unknown_model",
    413: "body_too_large",
    "context_length_exceeded": "context_length",
    "queue_full": "queue_full",
    "paused": "paused",
    "shutting_down": "shutting_down",
    "unsupported_parameter": "unsupported",
}
"""By the error's code or status; every other error that is the client's is `invalid`."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return orjson.dumps(content)


def error_response(error: ApiError, path: str) -> Response:
    """In the shape of the API that the path belongs to."""
    body = error_body(error) if path.startswith(OLLAMA_PREFIX) else error.body()
    return JsonResponse(body, error.status, headers=dict(error.headers))


def rejection_reason(error: ApiError) -> str | None:
    """A bounded word for a request that was turned away; None when it failed while it was served."""
    reason = REJECTION_REASONS.get(error.code or "") or REJECTION_REASONS.get(error.status)
    return reason or ("invalid" if 400 <= error.status < 500 else None)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends a generation as it comes; a client that goes away ends it."""

    def __init__(self, generation: Generation) -> None:
        # Not the framework's: a stream has no length, and its head is always the same.
        self.status_code = 200
        self.background = None
        self.raw_headers = [
            (b"content-type", CONTENT_TYPES[generation.wire.media_type]),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        watch = asyncio.ensure_future(_until_disconnect(receive))
        watch.add_done_callback(lambda _: generation.abort())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in generation.stream():
                await send({"type": "http.response.body", "body": data, "more_body": not generation.is_over})
            if not generation.is_over:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            generation.abort()
            watch.cancel()


async def whole_answer(generation: Generation | EmbeddingWork, receive: Receive) -> Response:
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

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], metrics: EngineMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._api_keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            self._metrics.rejected(rejection_reason(refusal))
            await error_response(refusal, scope["path"])(scope, receive, send)
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
    metrics: EngineMetrics
    """What is counted on this side."""
    render_metrics: Callable[[], Awaitable[bytes]]
    is_healthy: Callable[[], bool]
    info: ModelInfo
    version: str
    created: int


class Calls:
    """Calls of the engine, by path, past the framework: they come in bursts, and what it does for each, which none of
    them needs, takes as long as all else. Everything else goes to `app`."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler], metrics: EngineMetrics) -> None:
        self._app = app
        self._handlers = handlers
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._handlers.get(scope["path"]) if is_post else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler(Request(scope, receive, send))
        except ApiError as error:
            self._metrics.rejected(rejection_reason(error))
            response = error_response(error, scope["path"])
        except ClientDisconnect:
            return  # nobody reads an answer
        await response(scope, receive, send)


def create_api(parts: ApiParts, *, api_keys: tuple[str, ...] = ()) -> ASGIApp:
    """The ASGI app of port 8000."""
    app = FastAPI(title="Tidegate engine", openapi_url=None, docs_url=None, redoc_url=None)

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        parts.metrics.rejected(rejection_reason(error))
        return error_response(error, request.url.path)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_openai_routes(app, parts)
    _add_ollama_routes(app, parts)
    _add_plain_routes(app, parts)
    calls = {**_openai_calls(parts), **_ollama_calls(parts), **_token_calls(parts)}
    for path, handler in calls.items():
        app.add_api_route(path, handler, methods=["POST"])  # so that the framework knows what else to say of the path
    return Guard(Calls(app, calls, parts.metrics), api_keys, parts.metrics)


def _add_openai_routes(app: FastAPI, parts: ApiParts) -> None:
    completions = parts.completions

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": completions.model_cards(created=parts.created)})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        completions.check_model(name)
        cards = completions.model_cards(created=parts.created)
        return JsonResponse(next(card for card in cards if card["id"] == name))


def _openai_calls(parts: ApiParts) -> dict[str, Handler]:
    completions = parts.completions
    accepted = partial(_accepted, parts.drain)

    @accepted
    async def complete(request: Request) -> Response:
        arrival = time.monotonic()
        call = parse(CompletionCall, await _read_body(request))
        generation = await completions.begin_completion(call, arrival=arrival)
        return await _respond(generation, request, stream=bool(call.stream))

    @accepted
    async def chat(request: Request) -> Response:
        arrival = time.monotonic()
        call = parse(ChatCall, await _read_body(request))
        generation = await completions.begin_chat(call, arrival=arrival)
        return await _respond(generation, request, stream=bool(call.stream))

    @accepted
    async def respond(request: Request) -> Response:
        arrival = time.monotonic()
        call = parse(ResponseCall, await _read_body(request))
        make_wire = partial(ResponseWire, call)
        generation = await completions.begin_chat(call.as_chat(), arrival=arrival, make_wire=make_wire)
        return await _respond(generation, request, stream=bool(call.stream))

    @accepted
    async def embed(request: Request) -> Response:
        arrival = time.monotonic()
        call = parse(EmbeddingCall, await _read_body(request))
        work = await begin_embedding(completions, call, parts.info, arrival=arrival)
        work.start()
        return await whole_answer(work, request.receive)

    return {
        "/v1/completions": complete,
        "/v1/chat/completions": chat,
        "/v1/responses": respond,
        "/v1/embeddings": embed,
    }


def _ollama_calls(parts: ApiParts) -> dict[str, Handler]:
    completions = parts.completions
    accepted = partial(_accepted, parts.drain)
    names = completions.served_names

    async def answer(kind: type[OllamaChatCall | OllamaGenerateCall], request: Request) -> Response:
        arrival = time.monotonic()
        call = parse(kind, await _read_body(request))
        if call.think and completions.limits.reasoning_format is None:
            message = f"{call.model!r} does not support thinking: the server was given no --reasoning-parser"
            raise ApiError(400, message, param="think", code="unsupported_parameter")
        wire = OllamaWire(call.model, is_chat=kind is OllamaChatCall, with_logprobs=bool(call.logprobs))
        if call.asks_nothing():
            completions.check_model(resolve_name(call.model, names()))
            return JsonResponse(wire.loaded())
        inner = call.as_call(names())
        if isinstance(inner, CompletionCall):
            generation = await completions.begin_completion(
                inner, arrival=arrival, make_wire=lambda: wire, default_tokens=None
            )
        else:
            generation = await completions.begin_chat(inner, arrival=arrival, make_wire=lambda: wire)
        return await _respond(generation, request, stream=call.stream is not False)

    @accepted
    async def chat(request: Request) -> Response:
        return await answer(OllamaChatCall, request)

    @accepted
    async def generate(request: Request) -> Response:
        return await answer(OllamaGenerateCall, request)

    @accepted
    async def embed(request: Request) -> Response:
        arrival = time.monotonic()
        call = parse(OllamaEmbedCall, await _read_body(request))
        make_answer = call.make_answer(arrival)
        work = await begin_embedding(
            completions, call.as_call(names()), parts.info, arrival=arrival, make_answer=make_answer
        )
        work.start()
        return await whole_answer(work, request.receive)

    return {"/api/chat": chat, "/api/generate": generate, "/api/embed": embed}


def _add_ollama_routes(app: FastAPI, parts: ApiParts) -> None:
    completions = parts.completions
    names = completions.served_names
    served = Served(
        names,
        parts.info,
        created=parts.created,
        template=completions.tokenizer.chat_template,
        has_tools=completions.limits.tool_format is not None,
        has_thoughts=completions.limits.reasoning_format is not None,
    )

    @app.post("/api/show")
    async def show(request: Request) -> Response:
        call = parse(ShowCall, await _read_body(request))
        completions.check_model(resolve_name(call.model or call.name or "", names()))
        return JsonResponse(served.show())

    @app.get("/api/tags")
    async def tags() -> Response:
        return JsonResponse(served.tags())

    @app.get("/api/ps")
    async def running() -> Response:
        return JsonResponse(served.running())

    @app.get("/")
    @app.head("/")
    async def root() -> Response:
        """Ollama's clients ask this to see whether anything is there."""
        return Response("Tidegate engine is running\n", media_type="text/plain")

    @app.get("/api/version")
    async def version() -> Response:
        return JsonResponse({"version": EMULATED_VERSION})


def _token_calls(parts: ApiParts) -> dict[str, Handler]:
    completions = parts.completions

    async def tokenize(request: Request) -> Response:
        call = parse(TokenizeCall, await _read_body(request))
        return JsonResponse(await completions.tokenize(call))

    async def detokenize(request: Request) -> Response:
        call = parse(DetokenizeCall, await _read_body(request))
        return JsonResponse(await completions.detokenize(call))

    return {"/tokenize": tokenize, "/detokenize": detokenize}


def _add_plain_routes(app: FastAPI, parts: ApiParts) -> None:
    completions = parts.completions
    describe = lru_cache(maxsize=1)(partial(describe_api, version=parts.version))

    @app.get("/health")
    @app.get("/ping")
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

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JsonResponse(describe(completions.served_names()))


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


def _accepted(drain: Drain, handler: Handler) -> Handler:
    """`handler` for calls that are still taken; what it has begun is not cut by a drain."""

    @wraps(handler)
    async def handle(request: Request) -> Response:
        _check_accepts(drain)
        with drain.preparing():
            return await handler(request)

    return handle


def _check_accepts(drain: Drain) -> None:
    if drain.is_paused:
        raise ApiError(
            503,
            "this replica is paused by an administrator",
            type="server_error",
            code="paused",
            headers={"retry-after": str(DRAIN_RETRY_AFTER_SECONDS)},
        )
    if not drain.accepts:
        raise ApiError(
            503,
            "this replica is shutting down",
            type="server_error",
            code="shutting_down",
            headers={"retry-after": str(DRAIN_RETRY_AFTER_SECONDS), "connection": "close"},
        )


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "not_found" if error.status_code == 404 else None
    return error_response(
        ApiError(error.status_code, message, code=code, headers=error.headers or {}), request.url.path
    )
