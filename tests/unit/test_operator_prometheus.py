"""Prometheus as the source: one query for all terms, answered by the real server about a real engine."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate_operator.demand import MIN_SCRAPES, TERMS, WINDOW_SECONDS, Measured, combine
from tidegate_operator.observation import MetricsState
from tidegate_operator.prometheus import (
    AGE,
    MAX_ANSWER_BYTES,
    QUERY_TIMEOUT_SECONDS,
    SCRAPES,
    TERM_LABEL,
    PrometheusSource,
    query_of,
    windows_from,
)

Start = Callable[..., Awaitable[Any]]


def series(pod: str, term: str, value: str, **labels: str) -> dict[str, Any]:
    return {"metric": {"pod": pod, TERM_LABEL: term, **labels}, "value": [1000.0, value]}


def test_ages_are_taken_from_the_server_and_times_from_our_clock() -> None:
    result = [series("a", AGE, "3"), series("a", SCRAPES, "12"), series("a", "arrivals", "2.5", isl="64")]
    (window,) = windows_from(result, now=500.0)
    assert (window.pod, window.sampled_at, window.scrapes, window.seconds) == ("a", 497.0, 12, WINDOW_SECONDS)
    assert window.values == {("arrivals", "64"): 2.5}


def test_nan_is_unknown_and_a_pod_without_an_age_is_left_out() -> None:
    result = [series("a", AGE, "3"), series("a", "running", "NaN"), series("b", "running", "7")]
    (window,) = windows_from(result, now=500.0)
    assert window.values == {}


def test_an_empty_answer_is_no_window() -> None:
    assert windows_from([], now=1.0) == ()


def test_the_query_asks_for_every_term_of_this_objects_pods_only() -> None:
    query = query_of(namespace="team", name="m")
    assert all(f'"{term.name}"' in query and term.metric in query for term in TERMS)
    assert query.count('namespace="team",pod=~"m-[a-z0-9]+(-[a-z0-9]+)?"') == len(TERMS) + 2


@pytest.mark.parametrize("pod", ["m-6dd4c8f9b7-x2x4z", "m-6dd4c8f9b7x2x4z"])
def test_the_query_finds_the_pods_of_a_name_that_kubernetes_cut(pod: str) -> None:
    pattern = query_of(namespace="team", name="m").partition('pod=~"')[2].partition('"')[0]
    assert re.fullmatch(pattern, pod)


def test_an_answer_that_is_not_prometheus_is_told_not_raised() -> None:
    with pytest.raises((LookupError, TypeError, ValueError, ArithmeticError)):
        windows_from([{"metric": {"pod": "a", "tidegate_term": "scrapes"}, "value": [0, "Inf"]}], now=1.0)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@pytest.fixture
def nowhere() -> str:
    return f"http://127.0.0.1:{free_port()}"


async def test_a_server_that_is_not_there_is_told_not_raised(nowhere: str) -> None:
    source = PrometheusSource()
    measured = await source.measure(nowhere, namespace="n", name="m", now=1.0)
    source.close()
    assert measured.windows == ()
    assert measured.error is not None
    assert measured.error.startswith("PrometheusError: ")
    demand, state, message = combine(measured, ready=dict.fromkeys(["m-a-b"]), now=1.0, stale_after_seconds=60)
    assert (demand, state, message) == (None, MetricsState.ABSENT, measured.error)


async def test_a_server_that_never_answers_holds_up_nobody_for_long() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    source = PrometheusSource()
    try:
        async with asyncio.timeout(QUERY_TIMEOUT_SECONDS * 4):
            asked = (source.measure(url, namespace="n", name=f"m{number}", now=1.0) for number in range(100))
            answers = await asyncio.gather(*asked)
    finally:
        source.close()
        server.close()
    assert all((answer.error or "").startswith(f"PrometheusError: {url}") for answer in answers)


async def test_an_answer_without_an_end_is_cut_off_and_told() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        try:
            while sent < MAX_ANSWER_BYTES * 8:
                writer.write(b" " * 65536)
                sent += 65536
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    source = PrometheusSource()
    try:
        measured = await source.measure(url, namespace="n", name="m", now=1.0)
    finally:
        source.close()
        server.close()
    assert measured.error == f"PrometheusError: {url}: an answer without an end"
    assert sent < MAX_ANSWER_BYTES * 4


@pytest.fixture
def start_prometheus(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Start a real Prometheus that scrapes these pods once a second."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Debian's package prometheus is not installed")
    started: list[subprocess.Popen[bytes]] = []

    def start(targets: dict[str, str]) -> str:
        configs = [{"targets": [address], "labels": {"namespace": "n", "pod": pod}} for pod, address in targets.items()]
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "engines", "static_configs": configs}],
        }
        file, port = tmp_path / "prometheus.yml", free_port()
        file.write_text(json.dumps(config))
        arguments = [f"--config.file={file}", f"--storage.tsdb.path={tmp_path}/data"]
        arguments.append(f"--web.listen-address=127.0.0.1:{port}")
        with (tmp_path / "prometheus.log").open("wb") as log:
            started.append(subprocess.Popen([program, *arguments], stdout=log, stderr=log))
        return f"http://127.0.0.1:{port}"

    yield start
    for process in started:
        process.terminate()
        process.wait(20)


async def measured_after(
    source: PrometheusSource, url: str, good: Callable[[Measured], bool], *, seconds: float = 60
) -> Measured:
    async with asyncio.timeout(seconds):
        while True:
            measured = await source.measure(url, namespace="n", name="m", now=time.time())
            if good(measured):
                return measured
            await asyncio.sleep(0.3)


async def test_every_term_of_a_real_engine_comes_back_from_a_real_prometheus(
    start_engine: Start, start_prometheus: Callable[..., str]
) -> None:
    engine = await start_engine()
    address = f"127.0.0.1:{engine.admin_port}"
    # The second is another object's pod, whose name begins alike.
    url = start_prometheus({"m-5d4f8c-x2x9z": address, "m-two-5d4f8c-x2x9z": address})
    source = PrometheusSource()
    try:
        await measured_after(source, url, lambda measured: bool(measured.windows))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=20) as api:
            for _ in range(5):
                body = {"model": "fast", "prompt": "tide " * 20, "max_tokens": 20}
                assert (await api.post("/v1/completions", json=body)).status_code == 200

        def has_traffic(measured: Measured) -> bool:
            (window,) = measured.windows
            return window.scrapes >= MIN_SCRAPES and any(
                key[0] == "finished" and value > 0 for key, value in window.values.items()
            )

        measured = await measured_after(source, url, has_traffic)
    finally:
        source.close()
    (window,) = measured.windows
    assert window.pod == "m-5d4f8c-x2x9z"
    absent = {term.name for term in TERMS} - {key[0] for key in window.values}
    assert absent <= {"step_model_residual_ratio"}, "an engine that has not fitted yet has no residual"
    demand, state, _ = combine(measured, ready=dict.fromkeys([window.pod]), now=time.time(), stale_after_seconds=30)
    assert state is MetricsState.FRESH
    assert demand is not None
    assert sum(demand.arrivals_per_second.values()) > 0
    assert demand.ttft_p95_seconds is not None
    assert demand.kv_used_ratio is not None


async def test_an_engine_that_died_is_unknown_not_idle(
    start_engine: Start, start_prometheus: Callable[..., str]
) -> None:
    engine = await start_engine()
    url = start_prometheus({"m-5d4f8c-x2x9z": f"127.0.0.1:{engine.admin_port}"})
    source = PrometheusSource()
    try:
        await measured_after(source, url, lambda measured: bool(measured.windows))
        engine.leave.set()
        measured = await measured_after(source, url, lambda measured: not measured.windows)
    finally:
        source.close()
    assert measured.error is None
    ready = dict.fromkeys(["m-5d4f8c-x2x9z"])
    demand, state, _ = combine(measured, ready=ready, now=time.time(), stale_after_seconds=60)
    assert (demand, state) == (None, MetricsState.ABSENT)
