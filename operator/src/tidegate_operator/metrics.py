"""The operator's own metrics, in a registry of their own, and the small HTTP endpoints for them and for the probes.

Written by the shell; read by Prometheus and the kubelet.
"""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

RECONCILE_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
PREFIX = "tidegate_operator_"


class Metrics:
    """All series of the operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            PREFIX + "reconcile", "Reconcile passes by how they ended", ["result"], registry=self.registry
        )
        self.reconcile_seconds = Histogram(
            PREFIX + "reconcile_seconds",
            "Duration of a reconcile pass",
            buckets=RECONCILE_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.queue_depth = Gauge(PREFIX + "queue_depth", "Objects that wait for a pass", registry=self.registry)
        self.resync_age = Gauge(
            PREFIX + "resync_age_seconds", "Time since the last full resync ended", registry=self.registry
        )
        self.objects = Gauge(PREFIX + "objects", "LLMDeployments that are known", registry=self.registry)
        self.api_requests = Counter(
            PREFIX + "api_requests", "Requests to the API server", ["verb", "code"], registry=self.registry
        )
        self.decisions = Counter(
            PREFIX + "decisions", "Decisions that changed something", ["action", "reason"], registry=self.registry
        )
        self.watch_missed = Counter(
            PREFIX + "watch_missed",
            "Changes that only a resync found",
            ["kind"],
            registry=self.registry,
        )
        self.admin_requests = Counter(
            PREFIX + "admin_requests", "Requests to engines' admin ports", ["verb", "code"], registry=self.registry
        )

    def page(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


async def serve_metrics(metrics: Metrics, port: int) -> web.AppRunner:
    """Serve `/metrics`; the caller cleans the runner up."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return await _serve({"/metrics": page}, port)


async def serve_health(
    port: int, *, why_not_live: Callable[[], str | None], why_not_ready: Callable[[], str | None]
) -> web.AppRunner:
    """Serve `/healthz` and `/readyz`: 200, or 503 with the sentence that the callable gives."""

    def probe(check: Callable[[], str | None]) -> Callable[[web.Request], object]:
        async def answer(_: web.Request) -> web.Response:
            problem = check()
            return web.Response(text=problem or "ok", status=503 if problem else 200)

        return answer

    return await _serve({"/healthz": probe(why_not_live), "/readyz": probe(why_not_ready)}, port)


async def _serve(routes: dict[str, Callable[[web.Request], object]], port: int) -> web.AppRunner:
    application = web.Application()
    for path, handler in routes.items():
        application.router.add_get(path, handler)  # type: ignore[arg-type]
    runner = web.AppRunner(application, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port).start()
    return runner
