"""The manifests: golden files for whole objects, and the rules that no change may break.

`WRITE_GOLDEN=1 pytest tests/unit/test_operator_render.py` writes the golden files anew; read the difference.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_engine.settings import SettingsFile, parse_settings_file
from tidegate_operator import api, render

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
JWKS = {"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": "k1", "x": "AAAA"}]}
DEFAULTS = render.Defaults(engine_image="registry.example/engine:1", image_pull_policy="IfNotPresent")


def target(spec: dict[str, Any], name: str = "chat") -> api.Target:
    return api.Target(name, "team", "00000000-0000-0000-0000-000000000001", 3, api.parse_spec(spec))


def plan(target: api.Target, replicas: int = 2) -> render.Plan:
    spec = target.spec
    return render.Plan(
        replicas=replicas,
        settings_file=SettingsFile(7, spec.initial_settings(), spec.envelope(), spec.patterns()),
        jwks=JWKS,
    )


def made(spec: dict[str, Any], defaults: render.Defaults = DEFAULTS) -> dict[str, dict[str, Any]]:
    """Manifests by kind."""
    asked = target({"model": {"uri": "file:///models/m.gguf"}, **spec})
    return {manifest["kind"]: manifest for manifest in render.objects(asked, plan(asked), defaults)}


def pod(spec: dict[str, Any], defaults: render.Defaults = DEFAULTS) -> dict[str, Any]:
    found: dict[str, Any] = made(spec, defaults)["Deployment"]["spec"]["template"]["spec"]
    return found


FULL: dict[str, Any] = {
    "model": {"uri": "oci://registry.example/m:1#m.gguf", "servedNames": ["m", "m-large"]},
    "engine": {
        "image": "registry.example/own:2",
        "maxModelLength": 4096,
        "kvBlockTokens": 32,
        "prefixCaching": False,
        "args": ["--log-level=debug"],
        "env": [{"name": "A", "value": "1"}],
    },
    "batching": {"maxSequences": {"max": 32, "initial": 8}},
    "trafficClasses": [{"name": "Chat", "inputTokens": {"max": 1000}}],
    "resources": {"gpu": {"count": 2}, "requests": {"cpu": 4}, "limits": {"memory": "64Gi"}},
    "placement": {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
        "schedulerName": "packing",
    },
    "rollout": {"strategy": "DrainFirst"},
    "drain": {"timeoutSeconds": 120, "endpointRemovalSeconds": 5},
    "probes": {"startupTimeoutSeconds": 3600, "livenessStallSeconds": 30},
    "service": {"port": 80, "type": "LoadBalancer", "annotations": {"a": "b"}},
    "podTemplate": {
        "labels": {"team": "search"},
        "annotations": {"note": "x"},
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache", "readOnly": True}],
    },
}
CASES: dict[str, dict[str, Any]] = {"least": {"model": {"uri": "file:///models/m.gguf"}}, "full": FULL}


@pytest.mark.parametrize("case", CASES)
def test_the_manifests_are_as_the_golden_file_says(case: str) -> None:
    asked = target(CASES[case])
    text = yaml.safe_dump_all(render.objects(asked, plan(asked), DEFAULTS), sort_keys=False, width=120)
    path = GOLDEN / f"render-{case}.yaml"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_can_be_rendered(path: Path) -> None:
    example = yaml.safe_load(path.read_text(encoding="utf-8"))
    asked = target(example["spec"], example["metadata"]["name"])
    assert [manifest["kind"] for manifest in render.objects(asked, plan(asked), DEFAULTS)][-1] == "Deployment"


def test_every_child_is_owned_by_the_object_and_carries_our_labels_only() -> None:
    for manifest in made(FULL).values():
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["controller"]) == ("LLMDeployment", "chat", True)
        assert owner["blockOwnerDeletion"] is True
        assert manifest["metadata"]["labels"] == api.labels("chat")
        assert manifest["metadata"]["namespace"] == "team"


def test_the_selector_is_part_of_the_pods_labels_and_users_cannot_change_it() -> None:
    deployment = made({"podTemplate": {"labels": {api.NAME_LABEL: "theirs", "team": "x"}}})["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert labels["team"] == "x"


def test_other_live_settings_or_keys_leave_the_pods_as_they_are() -> None:
    asked = target(CASES["least"])
    first = plan(asked)
    changed = parse_settings_file(
        {
            **json.loads(render.config_map(asked, first)["data"]["settings.json"]),
            "generation": 8,
            "settings": {
                "max_num_seqs": 9,
                "max_num_batched_tokens": 999,
                "long_prefill_token_threshold": 300,
            },
        }
    )
    second = render.Plan(replicas=2, settings_file=changed, jwks={"keys": []})
    before, after = (render.objects(asked, p, DEFAULTS) for p in (first, second))
    assert before[1] != after[1]
    assert before[-1] == after[-1]


def test_another_envelope_rolls_the_pods_since_buffers_are_sized_by_it() -> None:
    before = made({})["Deployment"]["spec"]["template"]
    after = made({"batching": {"maxSequences": {"max": 512}}})["Deployment"]["spec"]["template"]
    assert before != after
    assert before["spec"] == after["spec"]


def test_the_engine_can_read_the_settings_file() -> None:
    data = made({})["ConfigMap"]["data"]
    assert parse_settings_file(json.loads(data["settings.json"])).generation == 7
    assert json.loads(data["admin-keys.json"]) == JWKS


def test_pods_meet_the_restricted_standard() -> None:
    spec = pod(FULL)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    for container in (*spec["containers"], *spec["initContainers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }


def test_the_user_id_can_be_left_to_the_cluster() -> None:
    assert pod({})["securityContext"]["runAsUser"] == 10001
    assert "runAsUser" not in pod({}, render.Defaults("e", run_as_user=None))["securityContext"]


def test_the_grace_period_is_strictly_longer_than_drain_and_removal_together() -> None:
    spec = {"drain": {"timeoutSeconds": 3000, "endpointRemovalSeconds": 600}}
    assert pod(spec)["terminationGracePeriodSeconds"] == 3615


@pytest.mark.parametrize("seconds", [10, 61, 1800, 7200])
def test_a_slow_start_is_neither_killed_nor_called_a_failed_rollout(seconds: int) -> None:
    spec = {"probes": {"startupTimeoutSeconds": seconds}}
    probe = pod(spec)["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= seconds
    assert made(spec)["Deployment"]["spec"]["progressDeadlineSeconds"] > seconds


def test_probes_go_to_the_admin_port_with_time_to_answer() -> None:
    container = pod({})["containers"][0]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"]["port"] == "admin"
        assert container[name]["timeoutSeconds"] >= 5


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("Surge", {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}),
        ("DrainFirst", {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}),
        ("Recreate", {"type": "Recreate"}),
    ],
)
def test_the_rollout_strategy_is_kept_for_one_replica_too(strategy: str, expected: dict[str, Any]) -> None:
    assert made({"rollout": {"strategy": strategy}})["Deployment"]["spec"]["strategy"] == expected


def test_a_single_replica_does_not_block_the_drain_of_its_node() -> None:
    assert made({})["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


def test_users_arguments_come_last_so_that_they_win() -> None:
    args = pod({"engine": {"args": ["--runner=modelled", "--profile=l4"]}})["containers"][0]["args"]
    assert args[-2:] == ["--runner=modelled", "--profile=l4"]


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///models/m.gguf", "/models/m.gguf"),
        ("oci://registry.example:5000/m@sha256:ab", "/models"),
        ("oci://registry.example/m:1#m.Q4.gguf", "/models/m.Q4.gguf"),
    ],
)
def test_the_engine_is_told_where_the_model_lies(uri: str, path: str) -> None:
    assert f"--model={path}" in pod({"model": {"uri": uri}})["containers"][0]["args"]


def test_no_gpu_is_asked_for_on_the_cpu() -> None:
    resources = pod({"resources": {"gpu": {"count": 0}, "limits": {"cpu": "500m"}}})["containers"][0]["resources"]
    assert resources == {"limits": {"cpu": "500m"}}


def test_only_the_engine_holds_gpus_not_the_copy_of_the_model() -> None:
    spec = pod(FULL)
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "nvidia.com/gpu" not in spec["initContainers"][0]["resources"].get("limits", {})
