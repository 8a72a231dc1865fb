"""Measurements from a Prometheus server: one instant query for all terms of an object, answered as `PodWindow`s.

An empty answer means unknown, never zero. prometheus-api-client is synchronous, so it runs in two threads of its own
with a timeout on every call. Called by `reconcile`; knows nothing of the cluster.
"""

import asyncio
import math
import re
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tidegate_operator.demand import PREFIX, TERMS, WINDOW_SECONDS, Kind, Measured, PodWindow, Term, canonical_key

QUERY_TIMEOUT_SECONDS = 5
LONGEST_WAIT_SECONDS = 15.0
THREADS = 2
MAX_ANSWER_BYTES = 16 << 20
"""The address is the choice of whoever made the object: an answer without an end must not fill the memory."""
PAUSE_SECONDS = 8.0
"""A server that failed is left alone for so long: a thousand objects must not queue up before a dead one."""
TERM_LABEL = "tidegate_term"
AGE, SCRAPES = "age", "scrapes"
_PRESENCE = "requests_running"


def query_of(*, namespace: str, name: str) -> str:
    """One PromQL expression for every term of one object; `TERM_LABEL` says which term a result belongs to.

    The pods are those of Deployment `name`, by the form of their names; the caller drops those that do not live.
    """
    # Of a long name Kubernetes cuts the last dash, and more: the second half may be missing.
    matchers = f'namespace="{namespace}",pod=~"{name}-[a-z0-9]+(-[a-z0-9]+)?"'
    window = f"[{WINDOW_SECONDS:.0f}s]"

    def labelled(term: str, expression: str) -> str:
        return f'label_replace({expression}, "{TERM_LABEL}", "{term}", "", "")'

    def expression(term: Term) -> str:
        chosen = f"{term.metric}{{{matchers}}}"
        inner = f"rate({chosen}{window})" if term.kind is Kind.RATE else chosen
        return f"sum by ({', '.join(('pod', *term.labels))}) ({inner})"

    present = f"{PREFIX}{_PRESENCE}{{{matchers}}}"
    parts = [labelled(term.name, expression(term)) for term in TERMS]
    parts.append(labelled(AGE, f"time() - max by (pod) (timestamp({present}))"))
    parts.append(labelled(SCRAPES, f"max by (pod) (count_over_time({present}{window}))"))
    return " or ".join(parts)


def windows_from(result: Iterable[Mapping[str, Any]], now: float) -> tuple[PodWindow, ...]:
    """Windows by pod from the vector; `now` is our clock: only ages are taken from the server's.

    NaN is unknown and left out; a pod without an age is left out too.
    """
    terms = {term.name: term for term in TERMS}
    values: dict[str, dict[tuple[str, ...], float]] = {}
    ages: dict[str, float] = {}
    scrapes: dict[str, int] = {}
    for series in result:
        labels = series["metric"]
        pod, name, value = labels.get("pod", ""), labels.get(TERM_LABEL, ""), float(series["value"][1])
        if math.isnan(value) or not pod:
            continue
        if name == AGE:
            ages[pod] = max(0.0, value)
        elif name == SCRAPES:
            scrapes[pod] = int(value)
        elif (term := terms.get(name)) is not None:
            values.setdefault(pod, {})[canonical_key(term, labels)] = value
    return tuple(
        PodWindow(pod, now - age, WINDOW_SECONDS, scrapes.get(pod, 0), values.get(pod, {})) for pod, age in ages.items()
    )


class _Paused(Exception):
    """The server failed a moment ago; the message is that failure's."""


class PrometheusSource:
    """A client for each server address and thread: the library's sessions are not meant for two threads at once."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prometheus")
        self._local = threading.local()
        self._paused: dict[str, tuple[float, str]] = {}

    async def measure(self, url: str, *, namespace: str, name: str, now: float) -> Measured:
        """Ask `url` for the pods of one object. What goes wrong is told in `error`, never raised."""
        query = query_of(namespace=namespace, name=name)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LONGEST_WAIT_SECONDS):
                self._raise_if_paused(url)
                result = await loop.run_in_executor(self._threads, self._query, url, query)
            return Measured(windows_from(result, now))
        except _Paused as paused:
            return Measured(error=str(paused))
        except TimeoutError:
            return Measured(error=self._pause(url, "no answer in time"))
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            return Measured(error=self._pause(url, _sentence(error)))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _pause(self, url: str, trouble: str) -> str:
        error = f"PrometheusError: {url}: {trouble}"
        self._paused[url] = (time.monotonic() + PAUSE_SECONDS, error)
        return error

    def _raise_if_paused(self, url: str) -> None:
        until, error = self._paused.get(url, (0.0, ""))
        if time.monotonic() < until:
            raise _Paused(error)

    def _query(self, url: str, query: str) -> list[dict[str, Any]]:
        # Imported late: it costs memory and time that only objects with a Prometheus need.
        import requests
        from prometheus_api_client import PrometheusApiClientException, PrometheusConnect

        self._raise_if_paused(url)
        clients: dict[str, Any] = self._local.__dict__.setdefault("clients", {})
        if url not in clients:
            from urllib3.util.retry import Retry

            session = requests.Session()
            session.hooks["response"].append(_read_bounded)
            session.stream = True
            clients[url] = PrometheusConnect(
                url=url.rstrip("/"), timeout=QUERY_TIMEOUT_SECONDS, retry=Retry(total=0), session=session
            )
        try:
            result: list[dict[str, Any]] = clients[url].custom_query(query)
        except PrometheusApiClientException as error:
            # Without the body: the address is the user's choice, and a status is read by others than its answer is for.
            code = re.search(r"HTTP Status Code (\d+)", str(error))
            raise ValueError(f"HTTP {code.group(1)}" if code else "an answer that is not Prometheus'") from error
        return result


def _read_bounded(response: Any, *_: object, **__: object) -> None:
    """Read the body here, not in the library, which would take whatever comes for as long as it comes."""
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    body = bytearray()
    while part := response.raw.read1(1 << 16, decode_content=True):
        body += part
        if len(body) > MAX_ANSWER_BYTES or time.monotonic() > deadline:
            response.close()
            raise ValueError("an answer without an end")
    response._content = bytes(body)


def _sentence(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 300 else text[:299] + "…"
