"""The Kubernetes client: lists, server-side apply, status, Events, one Secret. Dict bodies, a timeout on every call.

The only module that talks to the API server (kopf's watches apart). Turns every failure into `ApiError`; decides
nothing. `kubernetes.aio` brings configuration and credentials, paths and bodies are ours: its models refuse objects of
newer API servers.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from tidegate_operator import api
from tidegate_operator.metrics import Metrics
from tidegate_operator.resources import LLM_DEPLOYMENTS, PODS, Key, Manifest, Resource
from tidegate_operator.settings import Settings

TIMEOUT = aiohttp.ClientTimeout(total=20, connect=5)
CONCURRENCY = 32
PAGE_ITEMS = 500
STATUS_MANAGER = f"{api.FIELD_MANAGER}-status"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
VERSION_OF_NOTHING = "1"
"""The store's first write has version 2: as a precondition, this one fails for every object and holds for none."""
LONGEST_RETRY_AFTER_SECONDS = 10.0
BUSY_RETRIES = 3


class ApiError(Exception):
    """The API server refused or did not answer. `status` 0: no answer."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}" if reason else message)
        self.status, self.reason, self.message = status, reason, message

    @property
    def is_invalid(self) -> bool:
        """Refused for what it says: trying the same again does not help."""
        return self.status in (400, 403, 422)


async def load_configuration(settings: Settings) -> Any:
    """Address and credentials of the API server: the service account's, else the kubeconfig's."""
    configuration = kubernetes_client.Configuration()
    if settings.kubeconfig is None:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    else:
        await kubernetes_config.load_kube_config(
            config_file=settings.kubeconfig, client_configuration=configuration, persist_config=False
        )
    configuration.client_session_kwargs = {"trust_env": False}
    return configuration


class Cluster:
    """One client object for the whole operator, at most `CONCURRENCY` calls at a time."""

    def __init__(self, configuration: Any, metrics: Metrics, *, instance: str) -> None:
        self._client = kubernetes_client.ApiClient(configuration)
        self._client.user_agent = f"{api.FIELD_MANAGER}/{api.VERSION}"
        self._metrics, self._instance = metrics, instance
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def close(self) -> None:
        await self._client.close()

    async def get(self, resource: Resource, address: Key) -> Manifest | None:
        """The live object, None when there is none."""
        try:
            return await self._call("GET", resource.path(*address))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, resource: Resource, namespace: str | None) -> list[Manifest]:
        """All objects of a kind, in pages; managed kinds by our label only."""
        query = {"limit": str(PAGE_ITEMS)}
        if resource.selector:
            query["labelSelector"] = resource.selector
        items: list[Manifest] = []
        while True:
            page = await self._call("GET", resource.path(namespace), query=query)
            items += page.get("items") or ()
            token = page["metadata"].get("continue")
            if not token:
                return items
            query["continue"] = token

    async def apply(self, resource: Resource, manifest: Manifest, *, only_if_absent: bool = False) -> Manifest:
        """Server-side apply; returns what stands now. Fields of other managers stay, ours are taken by force.

        With `only_if_absent` an object of that name, whosever it is, stays as it is: `ApiError` 409.
        """
        metadata = manifest["metadata"]
        if only_if_absent:
            manifest = {**manifest, "metadata": {**metadata, "resourceVersion": VERSION_OF_NOTHING}}
        query = {"fieldManager": api.FIELD_MANAGER, "force": "true"}
        path = resource.path(metadata["namespace"], metadata["name"])
        return await self._call("PATCH", path, query=query, body=manifest, content_type=APPLY)

    async def apply_status(self, seen: Manifest, status: Mapping[str, Any]) -> Manifest:
        """Write the whole status onto the object as it was `seen`; a conflict when it has changed since."""
        metadata = {name: seen["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
        body = {"apiVersion": api.API_VERSION, "kind": api.KIND, "metadata": metadata, "status": status}
        query = {"fieldManager": STATUS_MANAGER, "force": "true"}
        path = LLM_DEPLOYMENTS.path(metadata["namespace"], metadata["name"], "status")
        return await self._call("PATCH", path, query=query, body=body, content_type=APPLY)

    async def annotate_pod(self, address: Key, annotations: Mapping[str, str]) -> None:
        """Set annotations of a pod; one that is gone needs none."""
        body = {"metadata": {"annotations": dict(annotations)}}
        query = {"fieldManager": api.FIELD_MANAGER}
        try:
            await self._call("PATCH", PODS.path(*address), query=query, body=body, content_type=MERGE)
        except ApiError as error:
            if error.status != 404:
                raise

    async def post_event(self, regarding: Manifest, *, kind: str, reason: str, note: str) -> None:
        """Record an Event about an LLMDeployment. `kind` is Normal or Warning."""
        metadata = regarding["metadata"]
        now = datetime.now(UTC)
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}-", "namespace": metadata["namespace"]},
            "eventTime": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": f"{api.GROUP}/operator",
            "reportingInstance": self._instance[:128],
            "action": "Reconcile",
            "type": kind,
            "reason": reason[:128],
            "note": note[:1024],
            "regarding": {
                "apiVersion": api.API_VERSION,
                "kind": api.KIND,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
        }
        path = f"/apis/events.k8s.io/v1/namespaces/{metadata['namespace']}/events"
        await self._call("POST", path, body=body, content_type="application/json")

    async def get_secret(self, namespace: str, name: str) -> Manifest:
        return await self._call("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")

    async def patch_secret(
        self, namespace: str, name: str, *, data: Mapping[str, str | None], resource_version: str
    ) -> None:
        """Change keys of a Secret that is still as it was read; None removes a key."""
        body = {"metadata": {"resourceVersion": resource_version}, "data": dict(data)}
        path = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        await self._call("PATCH", path, body=body, content_type=MERGE)

    async def _call(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str | None = None,
    ) -> Manifest:
        for attempt in range(BUSY_RETRIES + 1):
            async with self._slots:
                status, headers, data = await self._send(
                    verb, path, query=(query or {}).items(), body=body, content_type=content_type
                )
            self._metrics.api_requests.labels(verb, str(status)).inc()
            if status != 429 or attempt == BUSY_RETRIES:
                break
            await asyncio.sleep(_retry_after(headers))
        answer = _parsed(data)
        if 200 <= status < 300:
            return answer
        message = str(answer.get("message", "")) or f"HTTP {status} for {verb} {path}"
        raise ApiError(status, str(answer.get("reason", "")), message)

    async def _send(
        self,
        verb: str,
        path: str,
        *,
        query: Iterable[tuple[str, str]],
        body: Manifest | None,
        content_type: str | None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        headers = {"Accept": "application/json"}
        if content_type:
            headers["Content-Type"] = content_type
        try:
            # Without the body, which is JSON already: the client would walk and copy all of it.
            method, url, sent_headers, _, _ = await self._client.param_serialize(
                verb, path, query_params=list(query), header_params=headers, auth_settings=["BearerToken"]
            )
            response = await self._client.call_api(method, url, sent_headers, body, _request_timeout=TIMEOUT)
            return response.status, response.headers, await response.read()
        except TimeoutError as error:
            self._metrics.api_requests.labels(verb, "timeout").inc()
            raise ApiError(0, "Timeout", f"the API server did not answer {verb} {path} in time") from error
        except (aiohttp.ClientError, OSError) as error:
            self._metrics.api_requests.labels(verb, "error").inc()
            raise ApiError(0, "Unreachable", str(error) or type(error).__name__) from error


def _retry_after(headers: Mapping[str, str]) -> float:
    text = headers.get("Retry-After", "1")
    return min(float(text) if text.isdecimal() else 1.0, LONGEST_RETRY_AFTER_SECONDS)


def _parsed(data: bytes) -> dict[str, Any]:
    """The JSON object in an answer; an empty one when there is none (a proxy's page)."""
    try:
        answer = json.loads(data)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
