"""The objects that the demo applies and the load that it sends: manifests as dicts, phases as values.

Pure. Their figures are chosen so that two cores can stream all the tokens and everything is seen within minutes; an
object for production would leave most of them at their defaults.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate_local import load

NAMESPACE = "tidegate-demo"
CHAT = "smollm2"
TIDE = "tide"
LOAD_POD = "load"
QUESTION = "Why does the sea have tides? Answer in two short sentences."
PROFILE = "l4-qwen2.5-14b"
MODEL_URI = "file:///models/SmolLM2-135M-Instruct.Q4_1.gguf"
SERVICE_PORT = 8000
TTFT_MILLISECONDS = 2000

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Images:
    """What the demo runs."""

    operator: str = "tidegate.local/operator:dev"
    engine: str = "tidegate.local/engine:torch"
    modelled: str = "tidegate.local/engine:modelled"


SHORT_LONG = load.TrafficClass("short in, long out", (64, 256), (300, 400))
LONG_SHORT = load.TrafficClass("long in, short out", (1500, 3000), (16, 48))
PHASES = (
    load.Phase("short in, long out", 60, 0.6, (SHORT_LONG,)),
    load.Phase("long in, short out", 80, 0.5, (LONG_SHORT,)),
    load.Phase("burst", 60, 2.2, (SHORT_LONG,)),
    load.Phase("quiet", 90, 0.1, (SHORT_LONG,)),
)


def chat(images: Images) -> Manifest:
    """The real model: SmolLM2 on the CPU, one replica, an ordinary object."""
    return _object(
        CHAT,
        {
            "model": {"uri": MODEL_URI},
            "engine": {"image": images.engine, "maxModelLength": 2048},
            "replicas": 1,
            "autoscaling": {"mode": "Off"},
            "resources": {"gpu": {"count": 0}, "requests": {"cpu": "200m", "memory": "600Mi"}},
            "drain": {"timeoutSeconds": 20, "endpointRemovalSeconds": 2},
        },
    )


def tide(images: Images, *, gpus: int) -> Manifest:
    """The modelled engine under load: replicas and batch settings follow it."""
    return _object(
        TIDE,
        {
            "model": {"uri": "file:///models/modelled"},
            "engine": {"image": images.modelled, "args": ["--runner=modelled", f"--profile={PROFILE}"]},
            "batching": {
                "mode": "Auto",
                "maxSequences": {"min": 32, "max": 64, "initial": 32},
                "maxBatchedTokens": {"min": 512, "max": 4096, "initial": 2048},
                "prefillChunkTokens": {"min": 256, "max": 4096, "initial": 1024},
                "maxStepPercent": 300,
                "minIntervalSeconds": 10,
                "verificationSeconds": 15,
            },
            "objectives": {
                "ttft": {"percentile": 95, "milliseconds": TTFT_MILLISECONDS},
            },
            "autoscaling": {
                "mode": "Auto",
                "minReplicas": 1,
                "maxReplicas": 3,
                "syncPeriodSeconds": 5,
                "behavior": {
                    "scaleUp": {"stabilizationWindowSeconds": 10},
                    "scaleDown": {
                        "stabilizationWindowSeconds": 20,
                        "policies": [{"type": "Pods", "value": 2, "periodSeconds": 15}],
                    },
                },
            },
            "resources": {"gpu": {"count": gpus}, "requests": {"cpu": "100m", "memory": "150Mi"}},
            "drain": {"timeoutSeconds": 60, "endpointRemovalSeconds": 3},
        },
    )


def load_objects(images: Images) -> list[Manifest]:
    """A pod that sends the load, and the ConfigMap with its program: one file beside what the operator's image has."""
    program = Path(load.__file__).read_text()
    command = ["python3", "-u", "/load/load.py", f"--url=http://{TIDE}:{SERVICE_PORT}", f"--model={TIDE}"]
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": LOAD_POD, "namespace": NAMESPACE},
            "data": {"load.py": program, "phases.json": load.phases_json(PHASES)},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": LOAD_POD, "namespace": NAMESPACE},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 1,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 10001,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": LOAD_POD,
                        "image": images.operator,
                        "command": [*command, "--phases=/load/phases.json"],
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                            "readOnlyRootFilesystem": True,
                        },
                        "volumeMounts": [{"name": "program", "mountPath": "/load", "readOnly": True}],
                    }
                ],
                "volumes": [{"name": "program", "configMap": {"name": LOAD_POD}}],
            },
        },
    ]


def as_list(manifests: list[Manifest]) -> str:
    """One JSON document that `kubectl apply` takes."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})


def _object(name: str, spec: Mapping[str, Any]) -> Manifest:
    return {
        "apiVersion": "tidegate.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": dict(spec),
    }
