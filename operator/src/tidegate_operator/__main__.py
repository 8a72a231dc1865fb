"""`tidegate-operator run`: reads the settings, wires the parts, and runs until it is told to stop or a part fails.

The one composition root. Crash-only: everything is rebuilt from lists at start, so any part that ends ends the process
and Kubernetes starts it again.
"""

import argparse
import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import aiohttp
import kopf

from tidegate_operator import api, handlers, render, settings
from tidegate_operator.cluster import ApiError, Cluster, load_configuration
from tidegate_operator.engines import EngineClient
from tidegate_operator.fleet import Fleet
from tidegate_operator.journal import Journal
from tidegate_operator.metrics import Metrics, serve_health, serve_metrics
from tidegate_operator.prometheus import PrometheusSource
from tidegate_operator.queue import KeyedQueue
from tidegate_operator.reconcile import Installation, Outcome, Ports, Reconciler
from tidegate_operator.resources import LLM_DEPLOYMENTS, WATCHED, Key, Manifest, Resource, key_of
from tidegate_operator.scrape import Scraper
from tidegate_operator.settings import Settings, SettingsError
from tidegate_operator.store import Store, Suspect
from tidegate_operator.tokens import KeyStore

WORKERS = 32
LONGEST_PASS_SECONDS = 60.0
CHILD_DELAY_SECONDS = 0.5
"""News about children comes in bursts: one pass for a burst."""
WATCH_GRACE_SECONDS = 10.0
"""What a list shows and no watch has told after this was missed."""
RETRY_SECONDS = 5.0
LIVE_PERIODS = 3

logger = logging.getLogger("tidegate_operator")


class Operator:
    """The running whole: the store, the queue that the watches fill, and the workers that drain it."""

    def __init__(self, options: Settings, metrics: Metrics, *, store: Store, cluster: Cluster, keys: KeyStore) -> None:
        self._settings, self._metrics = options, metrics
        self._store, self._cluster, self._keys = store, cluster, keys
        self._queue: KeyedQueue[Key] = KeyedQueue()
        self._started_at = time.monotonic()
        self._resynced_at: float | None = None
        self._missed: frozenset[Resource] = frozenset()
        self._deaf: frozenset[Resource] = frozenset()

        metrics.queue_depth.set_function(lambda: len(self._queue))
        metrics.objects.set_function(lambda: len(store.addresses(LLM_DEPLOYMENTS)))
        metrics.resync_age.set_function(self.resync_age_seconds)

    # --- probes ----------------------------------------------------------------------------------------------------

    def why_not_live(self) -> str | None:
        """A sentence when only a restart helps."""
        age = self.resync_age_seconds()
        if age > LIVE_PERIODS * self._settings.resync_seconds + LONGEST_PASS_SECONDS:
            return f"no resync has ended for {age:.0f} s"
        if self._deaf:
            kinds = ", ".join(sorted(resource.kind for resource in self._deaf))
            return f"the watch of {kinds} misses changes"
        return None

    def resync_age_seconds(self) -> float:
        """Time since the last full comparison with the cluster, or since the start."""
        return time.monotonic() - (self._resynced_at or self._started_at)

    def why_not_ready(self) -> str | None:
        """A sentence until the kind is known and everything has been listed once."""
        return None if self._resynced_at is not None else "the first list has not ended"

    # --- what comes in ---------------------------------------------------------------------------------------------

    def see(self, resource: Resource, body: Manifest, gone: bool) -> None:
        """A watch told of an object."""
        news = self._store.drop(resource, body) if gone else self._store.put(resource, body)
        key = key_of(resource, body)
        if not news or key is None:
            return
        if resource is LLM_DEPLOYMENTS:
            self._queue.add(key)
        else:
            self._queue.add_after(key, CHILD_DELAY_SECONDS)

    async def first_list(self) -> None:
        """Fill the store before any decision; waits for the API server, the kind and the rights as long as it takes."""
        told = ""
        while True:
            try:
                await self._keys.refresh(time.time())
                for suspect in await self._list_all():
                    self._store.settle(suspect)
                break
            except ApiError as error:
                if str(error) != told:
                    told = str(error)
                    logger.warning("Waiting for the first list: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
        self._resynced_at = time.monotonic()
        keys = self._store.addresses(LLM_DEPLOYMENTS)
        logger.info("Found %d %s objects", len(keys), api.KIND)
        for key in keys:
            self._queue.add(key)

    async def resync_for_ever(self, fleet: Fleet) -> None:
        """Compare the store with lists now and then, and pass over every object."""
        period = self._settings.resync_seconds
        while True:
            await asyncio.sleep(period * random.uniform(0.9, 1.1))
            try:
                await self._keys.refresh(time.time())
                suspects = await self._list_all()
            except ApiError as error:
                logger.warning("A resync failed: %s", error)
                continue
            await asyncio.sleep(min(WATCH_GRACE_SECONDS, period))
            missed = set()
            for suspect in suspects:
                if (key := self._store.settle(suspect)) is not None:
                    missed.add(suspect.resource)
                    self._metrics.watch_missed.labels(suspect.resource.kind).inc()
                    self._queue.add(key)
            self._deaf = self._missed & missed
            self._missed = frozenset(missed)
            for key in self._store.addresses(LLM_DEPLOYMENTS):
                self._queue.add_after(key, random.uniform(0, min(30.0, period / 4)))
            fleet.prune(time.time(), keep_seconds=2 * period)
            self._resynced_at = time.monotonic()

    async def _list_all(self) -> list[Suspect]:
        suspects: list[Suspect] = []
        for namespace in self._settings.scopes:
            for resource in WATCHED:
                suspects += self._store.differences(resource, await self._cluster.list(resource, namespace), namespace)
        return suspects

    # --- the work --------------------------------------------------------------------------------------------------

    async def work_for_ever(self, reconciler: Reconciler) -> None:
        """One worker: pass after pass."""
        while True:
            key = await self._queue.get()
            started = time.perf_counter()
            result = "error"
            try:
                async with asyncio.timeout(LONGEST_PASS_SECONDS):
                    outcome = await reconciler.reconcile(key)
                result = "retry" if outcome.failed else "ok"
            except (ApiError, TimeoutError) as error:
                logger.warning("%s/%s: will be tried again: %s", *key, error or "the pass took too long")
                outcome = Outcome(None, failed=True)
            except Exception:
                logger.exception("%s/%s: a defect", *key)
                outcome = Outcome(None, failed=True)
            self._metrics.reconcile_seconds.observe(time.perf_counter() - started)
            self._metrics.reconciles.labels(result).inc()
            if outcome.failed:
                self._queue.failed(key)
            else:
                self._queue.done(key, outcome.recheck_after_seconds)


async def run(options: Settings) -> None:
    """Run until SIGTERM; raises when a part fails."""
    metrics = Metrics()
    configuration = await load_configuration(options)
    cluster = Cluster(configuration, metrics, instance=options.pod_name)
    keys = KeyStore(cluster, namespace=options.namespace, name=options.admin_key_secret)
    store = Store()
    operator = Operator(options, metrics, store=store, cluster=cluster, keys=keys)
    servers = [
        await serve_metrics(metrics, options.metrics_port),
        await serve_health(
            options.health_port, why_not_live=operator.why_not_live, why_not_ready=operator.why_not_ready
        ),
    ]
    prometheus = PrometheusSource()
    journal = None
    if options.journal is not None:
        journal = Journal(options.journal, most_bytes=round(1e6 * options.journal_megabytes))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64), trust_env=False) as session:
        scraper = Scraper(session, port=api.ADMIN_PORT)
        fleet = Fleet(EngineClient(session, metrics, port=api.ADMIN_PORT))
        ports = Ports(
            cluster=cluster,
            scraper=scraper,
            prometheus=prometheus,
            fleet=fleet,
            keys=keys,
            clock=time.time,
            journal=journal,
        )
        installation = Installation(
            defaults=render.Defaults(
                engine_image=options.engine_image,
                image_pull_policy=options.engine_image_pull_policy,
                run_as_user=options.engine_run_as_user,
            ),
            prometheus_url=options.prometheus_url,
            gpu_budgets=options.gpu_budgets,
            gpu_prices=options.gpu_prices,
        )
        reconciler = Reconciler(ports, store, installation=installation, metrics=metrics)
        try:
            await operator.first_list()
            await _until_one_ends(
                [
                    *(operator.work_for_ever(reconciler) for _ in range(WORKERS)),
                    operator.resync_for_ever(fleet),
                    scraper.run(),
                    # Last, because kopf at its end waits for every task that is younger than itself.
                    _watch(operator, options, configuration),
                ]
            )
        finally:
            prometheus.close()
            for server in servers:
                await server.cleanup()
            await cluster.close()


async def _until_one_ends(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run every part; the first that ends, ends all."""
    done, pending = await asyncio.wait(
        [asyncio.create_task(part) for part in parts], return_when=asyncio.FIRST_COMPLETED
    )
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


async def _watch(operator: Operator, options: Settings, configuration: object) -> None:
    """kopf, until a signal or an error that it cannot ride out."""

    async def credentials() -> kopf.ConnectionInfo:
        return handlers.connection(configuration, options)

    await kopf.operator(
        registry=handlers.registry(operator.see, credentials),
        settings=handlers.kopf_settings(),
        standalone=True,
        # kopf's own choice asks the passwd file for the user's name, and an arbitrary user id stands in none.
        identity=api.OPERATOR_NAME,
        clusterwide=not options.watch_namespaces,
        namespaces=list(options.watch_namespaces),
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 after SIGTERM, 1 when a part failed, 2 for wrong settings."""
    parser = argparse.ArgumentParser(prog="tidegate-operator", description="The Tidegate operator.")
    parser.add_subparsers(dest="command", required=True).add_parser("run", help="run in, or against, a cluster")
    parser.parse_args(arguments)
    try:
        options = settings.read(os.environ)
    except SettingsError as error:
        print(f"tidegate-operator: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=options.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    handlers.quiet_logs()
    try:
        asyncio.run(run(options))
    except KeyboardInterrupt:
        return 0
    except Exception:
        logger.exception("The operator ends")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
