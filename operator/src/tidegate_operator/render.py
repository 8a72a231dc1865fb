"""The manifests of one LLMDeployment's children, as dicts in the order in which they are applied.

Pure: the same target, plan and defaults always give the same dicts. Says nothing about how they are applied (`cluster`)
or when (`reconcile`). The pods meet the `restricted` pod security standard and run under any user id.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate_engine.settings import SETTING_NAMES, SettingsFile, settings_file_dict
from tidegate_operator import api
from tidegate_operator.api import RolloutStrategy, Spec, Target

Manifest = dict[str, Any]

ENVELOPE_ANNOTATION = f"{api.GROUP}/envelope"
"""On the pods, so that another envelope, which a running engine cannot take, rolls them. Settings are never there."""
CONFIG_VOLUME = f"{api.VOLUME_PREFIX}config"
MODELS_VOLUME = f"{api.VOLUME_PREFIX}models"
TMP_VOLUME = f"{api.VOLUME_PREFIX}tmp"
TMP_DIR = "/tmp"  # noqa: S108  the container's own, an emptyDir
ENGINE_CONTAINER = "engine"
COPY_CONTAINER = "copy-model"
COPY_TARGET = "/tidegate-models"
GRACE_MARGIN_SECONDS = 15
"""Between the end of the drain and the kubelet's SIGKILL: the grace period must be strictly longer."""
STARTUP_PERIOD_SECONDS = 2
REVISIONS_KEPT = 3


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the installation says for objects that say nothing."""

    engine_image: str
    image_pull_policy: str | None = None
    run_as_user: int | None = 10001
    """None where the cluster assigns user ids itself (OpenShift)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the decision and the operator's keys put into the manifests."""

    replicas: int
    settings_file: SettingsFile
    jwks: Mapping[str, object]
    """Public keys of the operator's admin tokens."""


def objects(target: Target, plan: Plan, defaults: Defaults) -> list[Manifest]:
    """All children of `target`; the Deployment comes last, when everything that its pods need is there."""
    return [
        service_account(target),
        config_map(target, plan),
        service(target),
        pod_disruption_budget(target),
        deployment(target, replicas=plan.replicas, defaults=defaults),
    ]


def service_account(target: Target) -> Manifest:
    """An identity without rights, so that pods never run as the namespace's default one."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(target, target.name),
        "automountServiceAccountToken": False,
    }


def config_map(target: Target, plan: Plan) -> Manifest:
    """What a pod starts with, and the keys that it re-reads; a change of it restarts nothing."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(target, api.config_map_name(target.name)),
        "data": {
            "settings.json": json.dumps(settings_file_dict(plan.settings_file), sort_keys=True),
            "admin-keys.json": json.dumps(plan.jwks, sort_keys=True),
        },
    }


def service(target: Target) -> Manifest:
    """The address of the model: the OpenAI API of the ready pods."""
    given = target.spec.service
    metadata = _metadata(target, target.name)
    if given.annotations:
        metadata["annotations"] = dict(given.annotations)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": given.type,
            "selector": api.selector(target.name),
            "ports": [
                {"name": "http", "port": given.port, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
            ],
        },
    }


def pod_disruption_budget(target: Target) -> Manifest:
    """One pod at a time, a single one too: a budget that never lets a node drain helps nobody."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(target, target.name),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": api.selector(target.name)},
        },
    }


def deployment(target: Target, *, replicas: int, defaults: Defaults) -> Manifest:
    """The engine pods."""
    spec = target.spec
    startup_seconds = spec.probes.startup_timeout_seconds
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(target, target.name),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": REVISIONS_KEPT,
            # A deadline inside the start-up budget would report a slow model as a failed rollout.
            "progressDeadlineSeconds": max(spec.rollout.progress_deadline_seconds, startup_seconds + 60),
            "selector": {"matchLabels": api.selector(target.name)},
            "strategy": _strategy(spec.rollout.strategy),
            "template": {"metadata": _pod_metadata(target), "spec": _pod_spec(target, defaults)},
        },
    }


def _metadata(target: Target, name: str) -> Manifest:
    """Never the parent's own labels or annotations: they are how GitOps tools find what they own."""
    return {
        "name": name,
        "namespace": target.namespace,
        "labels": api.labels(target.name),
        "ownerReferences": [
            {
                "apiVersion": api.API_VERSION,
                "kind": api.KIND,
                "name": target.name,
                "uid": target.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def _strategy(strategy: RolloutStrategy) -> Manifest:
    if strategy is RolloutStrategy.RECREATE:
        return {"type": "Recreate"}
    surge = 1 if strategy is RolloutStrategy.SURGE else 0
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": 1 - surge}}


def _pod_metadata(target: Target) -> Manifest:
    envelope = target.spec.envelope()
    bounds = ("{}-{}".format(*envelope.bounds(name)) for name in SETTING_NAMES)
    return {
        "labels": {**target.spec.pod_template.labels, **api.labels(target.name)},
        "annotations": {**target.spec.pod_template.annotations, ENVELOPE_ANNOTATION: ",".join(bounds)},
    }


def _pod_spec(target: Target, defaults: Defaults) -> Manifest:
    spec = target.spec
    security: Manifest = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if defaults.run_as_user is not None:
        security["runAsUser"] = defaults.run_as_user
    manifest: Manifest = {
        "serviceAccountName": target.name,
        "automountServiceAccountToken": False,
        # A Service called like one of the engine's variables would inject NAME_PORT=tcp://… into it.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": (
            spec.drain.timeout_seconds + spec.drain.endpoint_removal_seconds + GRACE_MARGIN_SECONDS
        ),
        "securityContext": security,
        "containers": [_engine_container(target, defaults)],
        "volumes": _volumes(target),
    }
    if _model_image(spec) is not None:
        manifest["initContainers"] = [_copy_container(spec, defaults)]
    if spec.pod_template.image_pull_secrets:
        manifest["imagePullSecrets"] = [{"name": secret.name} for secret in spec.pod_template.image_pull_secrets]
    return manifest | {name: value for name, value in _given(spec.placement).items() if value}


def _given(part: api.Part) -> Manifest:
    dumped: Manifest = part.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped


def _engine_container(target: Target, defaults: Defaults) -> Manifest:
    spec = target.spec
    container: Manifest = {
        "name": ENGINE_CONTAINER,
        "image": spec.engine.image or defaults.engine_image,
        "command": ["tidegate-engine"],
        "args": engine_args(target),
        "env": _environment(target),
        "ports": [
            {"name": "http", "containerPort": api.HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": api.ADMIN_PORT, "protocol": "TCP"},
        ],
        "startupProbe": _probe(
            "/startupz",
            period_seconds=STARTUP_PERIOD_SECONDS,
            failures=math.ceil(spec.probes.startup_timeout_seconds / STARTUP_PERIOD_SECONDS),
        ),
        "readinessProbe": _probe("/readyz", period_seconds=3, failures=3),
        "livenessProbe": _probe("/livez", period_seconds=10, failures=3),
        "resources": _resources(spec, with_gpu=True),
        "securityContext": _container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": CONFIG_VOLUME, "mountPath": api.CONFIG_DIR, "readOnly": True},
            {"name": TMP_VOLUME, "mountPath": TMP_DIR},
            *([{"name": MODELS_VOLUME, "mountPath": api.MODELS_DIR, "readOnly": True}] if _model_image(spec) else []),
            *(_given(mount) for mount in spec.pod_template.volume_mounts),
        ],
    }
    return container | _pull_policy(spec, defaults)


def _environment(target: Target) -> list[Manifest]:
    """HOME (an arbitrary user id has none, the root file system is read-only), what the user gave, and the uid."""
    given = {variable.name: variable.value for variable in target.spec.engine.env}
    values = {"HOME": TMP_DIR, **given, api.OBJECT_UID_ENV: target.uid}
    return [{"name": name, "value": value} for name, value in values.items()]


def engine_args(target: Target) -> list[str]:
    """The engine's command line. The user's own arguments come last: the last of a repeated flag wins."""
    spec = target.spec
    args = ["serve", f"--model={model_path(spec)}", "--served-model-name", *spec.served_names(target.name)]
    args += [f"--config-dir={api.CONFIG_DIR}", "--host=0.0.0.0"]
    args += [f"--port={api.HTTP_PORT}", f"--admin-port={api.ADMIN_PORT}"]
    if spec.engine.max_model_length is not None:
        args.append(f"--max-model-len={spec.engine.max_model_length}")
    args.append(f"--block-size={spec.engine.kv_block_tokens}")
    if not spec.engine.prefix_caching:
        args.append("--no-enable-prefix-caching")
    args.append(f"--shutdown-timeout={spec.drain.timeout_seconds}")
    args.append(f"--endpoint-removal-seconds={spec.drain.endpoint_removal_seconds}")
    args.append(f"--liveness-stall-seconds={spec.probes.liveness_stall_seconds}")
    return [*args, *spec.engine.args]


def model_path(spec: Spec) -> str:
    """Where the engine finds the model: a file, or a folder with a single one."""
    if _model_image(spec) is None:
        return spec.model.uri.removeprefix("file://")
    _, _, file = spec.model.uri.partition("#")
    return f"{api.MODELS_DIR}/{file}" if file else api.MODELS_DIR


def _model_image(spec: Spec) -> str | None:
    if not spec.model.uri.startswith("oci://"):
        return None
    return spec.model.uri.removeprefix("oci://").partition("#")[0]


def _copy_container(spec: Spec, defaults: Defaults) -> Manifest:
    """Copies the model out of its image, which works with every container runtime."""
    _, _, file = spec.model.uri.partition("#")
    container: Manifest = {
        "name": COPY_CONTAINER,
        "image": _model_image(spec),
        "command": ["cp", "-R", f"{api.MODELS_DIR}/{file or '.'}", COPY_TARGET],
        # The same as the engine's, so that quotas which ask for limits admit the pod, at no further cost.
        "resources": _resources(spec, with_gpu=False),
        "securityContext": _container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": MODELS_VOLUME, "mountPath": COPY_TARGET}],
    }
    return container | _pull_policy(spec, defaults)


def _pull_policy(spec: Spec, defaults: Defaults) -> Manifest:
    policy = spec.engine.image_pull_policy or defaults.image_pull_policy
    return {"imagePullPolicy": policy} if policy else {}


def _container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def _probe(path: str, *, period_seconds: int, failures: int) -> Manifest:
    """On the admin port, so that a full accept queue of the API never looks like death; 5 s ride out a busy node."""
    return {
        "httpGet": {"path": path, "port": "admin", "scheme": "HTTP"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _resources(spec: Spec, *, with_gpu: bool) -> Manifest:
    requests = {name: str(quantity) for name, quantity in spec.resources.requests.items()}
    limits = {name: str(quantity) for name, quantity in spec.resources.limits.items()}
    gpu = spec.resources.gpu
    if with_gpu and gpu.count > 0:
        limits[gpu.resource_name] = requests[gpu.resource_name] = str(gpu.count)
    return {name: values for name, values in (("limits", limits), ("requests", requests)) if values}


def _volumes(target: Target) -> list[Manifest]:
    spec = target.spec
    volumes: list[Manifest] = [
        {
            "name": CONFIG_VOLUME,
            "configMap": {
                "name": api.config_map_name(target.name),
                "items": [{"key": key, "path": key} for key in ("settings.json", "admin-keys.json")],
            },
        },
        {"name": TMP_VOLUME, "emptyDir": {}},
    ]
    if _model_image(spec) is not None:
        volumes.append({"name": MODELS_VOLUME, "emptyDir": {}})
    return volumes + [_given(volume) for volume in spec.pod_template.volumes]
