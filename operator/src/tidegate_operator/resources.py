"""The kinds of Kubernetes objects that the operator watches and makes: their paths, and what of them is remembered.

Pure data. Used by `cluster` (paths), `handlers` (watches), `store` (memory) and `reconcile`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate_operator import api

Manifest = Mapping[str, Any]
Key = tuple[str, str]
"""Namespace and name of an LLMDeployment."""

MANAGED_SELECTOR = f"{api.MANAGED_BY_LABEL}={api.OPERATOR_NAME}"


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind; `managed` kinds are watched by our label only."""

    kind: str
    group: str
    version: str
    plural: str
    managed: bool = True

    @property
    def selector(self) -> str | None:
        return MANAGED_SELECTOR if self.managed else None

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Path at the API server; without a namespace, that of all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root, *(("namespaces", namespace) if namespace else ()), self.plural]
        return "/".join([*parts, *(part for part in (name, subresource) if part)])


LLM_DEPLOYMENTS = Resource(api.KIND, api.GROUP, api.VERSION, api.PLURAL, managed=False)
DEPLOYMENTS = Resource("Deployment", "apps", "v1", "deployments")
PODS = Resource("Pod", "", "v1", "pods")
SERVICES = Resource("Service", "", "v1", "services")
CONFIG_MAPS = Resource("ConfigMap", "", "v1", "configmaps")
SERVICE_ACCOUNTS = Resource("ServiceAccount", "", "v1", "serviceaccounts")
DISRUPTION_BUDGETS = Resource("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets")

CHILDREN = {
    resource.kind: resource for resource in (DEPLOYMENTS, SERVICES, CONFIG_MAPS, SERVICE_ACCOUNTS, DISRUPTION_BUDGETS)
}
"""Kinds that are applied, by the manifest's `kind`."""
WATCHED = (LLM_DEPLOYMENTS, PODS, *CHILDREN.values())

_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
_KEPT = {
    "Pod": {
        "spec": ("nodeName", "schedulingGates"),
        "status": ("phase", "podIP", "conditions", "containerStatuses", "initContainerStatuses"),
    },
    "Deployment": {"spec": ("replicas",), "status": ("replicas", "updatedReplicas", "conditions")},
}


def slim(resource: Resource, body: Manifest) -> Manifest:
    """What is remembered of an object: thousands of them are held in memory."""
    metadata = body["metadata"]
    if resource is LLM_DEPLOYMENTS:
        kept = {name: value for name, value in metadata.items() if name != "managedFields"}
        return {"metadata": kept, "spec": body.get("spec") or {}, "status": body.get("status") or {}}
    small: dict[str, Any] = {name: metadata[name] for name in _METADATA if name in metadata}
    small["labels"] = metadata.get("labels") or {}
    small["owner"] = controller_uid(body)
    if resource is PODS:
        small["replicaSet"] = _replica_set(body)
    result: dict[str, Any] = {"metadata": small}
    for part, names in _KEPT.get(resource.kind, {}).items():
        values = body.get(part) or {}
        result[part] = {name: values[name] for name in names if name in values}
    return result


def controller_uid(body: Manifest) -> str | None:
    """Uid of the object's controlling owner."""
    references = body["metadata"].get("ownerReferences") or ()
    return next((reference["uid"] for reference in references if reference.get("controller")), None)


def _replica_set(body: Manifest) -> str | None:
    """Name of the ReplicaSet that controls a pod."""
    references = body["metadata"].get("ownerReferences") or ()
    return next(
        (
            reference["name"]
            for reference in references
            if reference.get("controller") and reference["kind"] == "ReplicaSet"
        ),
        None,
    )


def key_of(resource: Resource, body: Manifest) -> Key | None:
    """The LLMDeployment that an object is about; None when it is nobody's."""
    metadata = body["metadata"]
    if resource is LLM_DEPLOYMENTS:
        return metadata["namespace"], metadata["name"]
    name = (metadata.get("labels") or {}).get(api.DEPLOYMENT_LABEL)
    return (metadata["namespace"], name) if name else None


def version_of(body: Manifest) -> int:
    """The object's resource version as a number, by which older news is told from newer; 0 when it is none."""
    text = str(body["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def content_version(body: Manifest) -> str:
    """Changes when the desired part of an object changes: its generation, or the resource version where it has none."""
    metadata = body["metadata"]
    return str(metadata.get("generation") or metadata.get("resourceVersion", ""))
