"""Reads one LLMDeployment, its pods and its Events from the API server, and the load's records from its pod's log.

The I/O side of `recording`. Called by the demo, which decides when to look.
"""

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import urllib3
from kubernetes import client

from tidegate_local.recording import EventFact, Sample, event_fact, gauge_total, sample_of

GROUP, VERSION, PLURAL = "tidegate.dev", "v1alpha1", "llmdeployments"
ADMIN_PORT = 8001
RUNNING, WAITING = "tidegate_engine_requests_running", "tidegate_engine_requests_waiting"


class Watcher:
    """One object in one namespace."""

    def __init__(self, api: client.ApiClient, namespace: str, name: str) -> None:
        self._custom = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._name = name
        self._known_events: dict[str, int] = {}

    def resource(self) -> dict[str, Any]:
        found: dict[str, Any] = self._custom.get_namespaced_custom_object(
            GROUP, VERSION, self._namespace, PLURAL, self._name
        )
        return found

    def pods(self) -> list[Mapping[str, object]]:
        answer = self._core.list_namespaced_pod(
            self._namespace,
            label_selector=f"app.kubernetes.io/instance={self._name},app.kubernetes.io/name=tidegate-engine",
            _preload_content=False,
        )
        items: list[Mapping[str, object]] = json.loads(answer.data)["items"]
        return items

    def sample(self, at: float) -> Sample:
        sample = sample_of(self.resource(), self.pods(), at)
        running, waiting = self._requests([pod.name for pod in sample.pods if pod.ready])
        return replace(sample, running=running, waiting=waiting)

    def _requests(self, pods: Sequence[str]) -> tuple[float | None, float | None]:
        """Requests (running, waiting) in these pods, by their own metrics; unknown when one does not answer."""
        running = waiting = 0.0
        for pod in pods:
            try:
                text = self._core.connect_get_namespaced_pod_proxy_with_path(
                    f"{pod}:{ADMIN_PORT}", self._namespace, "metrics", _request_timeout=3
                )
            except (client.ApiException, urllib3.exceptions.HTTPError):
                return None, None
            values = gauge_total(text, RUNNING), gauge_total(text, WAITING)
            if values[0] is None or values[1] is None:
                return None, None
            running, waiting = running + values[0], waiting + values[1]
        return (running, waiting) if pods else (None, None)

    def new_events(self) -> list[EventFact]:
        """Events about the object since the last call, oldest first."""
        answer = self._core.list_namespaced_event(
            self._namespace,
            field_selector=f"involvedObject.kind=LLMDeployment,involvedObject.name={self._name}",
            _preload_content=False,
        )
        fresh: list[EventFact] = []
        for item in json.loads(answer.data)["items"]:
            uid, count = item["metadata"]["uid"], _times(item)
            fact = event_fact(item)
            if fact is not None and self._known_events.get(uid) != count:
                self._known_events[uid] = count
                fresh.append(fact)
        return sorted(fresh, key=lambda fact: fact.at)


def _times(event: Mapping[str, Any]) -> int:
    series = event.get("series") or {}
    return int(series.get("count") or event.get("count") or 1)


class LoadLog:
    """The load pod's records, read in the background from a process that prints one JSON record a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._records: list[dict[str, object]] = []
        self._lock = threading.Lock()
        self.other_lines: list[str] = []
        """What is not a record: the traceback of a load generator that failed."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            with self._lock:
                if isinstance(record, dict) and "kind" in record:
                    self._records.append(record)
                else:
                    self.other_lines.append(line.rstrip())

    def records(self) -> list[dict[str, object]]:
        with self._lock:
            return list(self._records)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()
