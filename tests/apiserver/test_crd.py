"""The CRD on a real API server: what it refuses and how it says so, what it fills in, and how kubectl shows it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate_local import cluster
from tidegate_operator import api as contract
from tidegate_operator import crd, status
from tidegate_operator.observation import Action, Decision, MetricsState, Observation, Replica, ReplicaPhase

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
URI = {"uri": "file:///models/m.gguf"}
AUTO = {"mode": "Auto", "maxReplicas": 4}


def spec(**fields: Any) -> dict[str, Any]:
    return {"model": URI, **fields}


def pod(**fields: Any) -> dict[str, Any]:
    return spec(podTemplate=fields)


BAD_SPECS: list[tuple[str, dict[str, Any], str]] = [
    ("no model", {}, "spec.model: Required value"),
    ("no uri", {"model": {}}, "spec.model.uri: Required value"),
    ("an unbuilt scheme", {"model": {"uri": "hf://org/name"}}, "model.uri must start with file:/// or oci://"),
    ("a relative file", {"model": {"uri": "file://models/m.gguf"}}, "model.uri must start with file:/// or oci://"),
    ("a path upwards", {"model": {"uri": "file:///models/../etc/passwd"}}, "an absolute path without '..'"),
    ("a uri with a space", {"model": {"uri": "file:///a b"}}, "must not contain spaces"),
    ("no image in oci", {"model": {"uri": "oci://"}}, "model.uri must name an image"),
    ("odd served names", {"model": {**URI, "servedNames": ["a b"]}}, "model.servedNames may hold letters"),
    ("a served name twice", {"model": {**URI, "servedNames": ["a", "a"]}}, 'servedNames[1]: Duplicate value: "a"'),
    (
        "replicas with Auto",
        spec(replicas=2, autoscaling=AUTO),
        "replicas and autoscaling.mode Auto exclude each other: remove replicas",
    ),
    ("External alone", spec(autoscaling={"mode": "External"}), "replicas is required with autoscaling.mode External"),
    ("Auto without maximum", spec(autoscaling={}), "autoscaling.maxReplicas is required with autoscaling.mode Auto"),
    ("Observe without maximum", spec(autoscaling={"mode": "Observe"}), "autoscaling.maxReplicas is required"),
    (
        "minimum above maximum",
        spec(autoscaling={"minReplicas": 5, "maxReplicas": 4}),
        "autoscaling.minReplicas must not be above autoscaling.maxReplicas",
    ),
    (
        "a schedule without bounds",
        spec(autoscaling={**AUTO, "schedules": [{"name": "day", "startTime": "08:00", "endTime": "18:00"}]}),
        "autoscaling.schedules: give minReplicas, maxReplicas or both",
    ),
    (
        "a schedule above the maximum",
        spec(
            autoscaling={
                **AUTO,
                "schedules": [{"name": "day", "startTime": "08:00", "endTime": "18:00", "minReplicas": 5}],
            }
        ),
        "autoscaling.schedules: minReplicas must not be above maxReplicas",
    ),
    (
        "a schedule at no time",
        spec(
            autoscaling={
                **AUTO,
                "schedules": [{"name": "day", "startTime": "8", "endTime": "24:00", "minReplicas": 2}],
            }
        ),
        "spec.autoscaling.schedules[0].startTime",
    ),
    (
        "a budget below the minimum",
        spec(autoscaling={**AUTO, "minReplicas": 3, "maxGPUs": 5}, resources={"gpu": {"count": 2}}),
        "autoscaling.maxGPUs must not be below autoscaling.minReplicas times resources.gpu.count",
    ),
    ("no replica at least", spec(autoscaling={"minReplicas": 0, "maxReplicas": 4}), "greater than or equal to 1"),
    ("an unknown mode", spec(autoscaling={**AUTO, "mode": "Turbo"}), 'Unsupported value: "Turbo"'),
    ("a negative number of replicas", spec(replicas=-1), "spec.replicas: Invalid value: -1"),
    ("replicas as text", spec(replicas="two"), "spec.replicas: Invalid value"),
    (
        "sequences min above max",
        spec(batching={"maxSequences": {"min": 9, "max": 8}}),
        "batching.maxSequences: min must not be above max",
    ),
    (
        "sequences initial above max",
        spec(batching={"maxSequences": {"max": 8, "initial": 9}}),
        "batching.maxSequences: initial must lie between min and max",
    ),
    (
        "sequences initial above the default max",
        spec(batching={"maxSequences": {"initial": 300}}),
        "batching.maxSequences: initial must lie between min and max",
    ),
    (
        "tokens initial below the default min",
        spec(batching={"maxBatchedTokens": {"initial": 100}}),
        "batching.maxBatchedTokens: initial must lie between min and max",
    ),
    (
        "chunk above tokens",
        spec(batching={"prefillChunkTokens": {"max": 9000}, "maxBatchedTokens": {"max": 8192}}),
        "batching.prefillChunkTokens.max must not be above batching.maxBatchedTokens.max",
    ),
    (
        "chunk above the default tokens",
        spec(batching={"prefillChunkTokens": {"max": 20000}}),
        "batching.prefillChunkTokens.max must not be above batching.maxBatchedTokens.max",
    ),
    (
        "sequences above tokens",
        spec(batching={"maxSequences": {"max": 4096}, "maxBatchedTokens": {"max": 2048}}),
        "batching.maxSequences.max must not be above batching.maxBatchedTokens.max",
    ),
    (
        "more sequences than tokens to start with",
        spec(batching={"maxSequences": {"initial": 64}, "maxBatchedTokens": {"min": 1, "initial": 32}}),
        "batching.maxSequences.initial must not be above batching.maxBatchedTokens.initial",
    ),
    ("another percentile", spec(objectives={"ttft": {"percentile": 99, "milliseconds": 500}}), "Unsupported value: 99"),
    (
        "a whole answer before its first token",
        spec(objectives={"ttft": {"milliseconds": 900}, "endToEnd": {"milliseconds": 800}}),
        "objectives: endToEnd must not be below ttft",
    ),
    ("a floor of nothing", spec(objectives={"outputTokensPerSecond": 0}), "spec.objectives.outputTokensPerSecond"),
    ("an unknown priority", spec(objectives={"priority": "Speed"}), 'Unsupported value: "Speed"'),
    (
        "a class with goals but none",
        spec(trafficClasses=[{"name": "a", "objectives": {}}]),
        "trafficClasses.objectives: give ttft, interTokenLatency or endToEnd",
    ),
    ("a goal without a time", spec(objectives={"ttft": {}}), "spec.objectives.ttft.milliseconds: Required value"),
    (
        "an empty class",
        spec(trafficClasses=[{"name": "a", "inputTokens": {"min": 10, "max": 10}}]),
        "min must be below max",
    ),
    ("a class twice", spec(trafficClasses=[{"name": "a"}, {"name": "a"}]), "spec.trafficClasses[1]: Duplicate value"),
    ("the reserved class", spec(trafficClasses=[{"name": "Other"}]), "the class Other is built in"),
    ("nine classes", spec(trafficClasses=[{"name": f"c{i}"} for i in range(9)]), "Too many: 9: must have at most 8"),
    (
        "a fallback to nowhere",
        spec(metrics={"onMissing": {"policy": "Fallback"}}),
        "metrics.onMissing.fallbackReplicas is required with metrics.onMissing.policy Fallback",
    ),
    (
        "an address that is none",
        spec(metrics={"prometheus": {"url": "prometheus:9090"}}),
        "metrics.prometheus.url must be an http:// or https:// address",
    ),
    (
        "a password in the address",
        spec(metrics={"prometheus": {"url": "http://me:secret@prometheus"}}),
        "without user, query and fragment",
    ),
    (
        "a drain longer than an hour",
        spec(drain={"timeoutSeconds": 3600}),
        "drain.timeoutSeconds and drain.endpointRemovalSeconds must not exceed 3600 together",
    ),
    ("the operator's port", spec(engine={"args": ["--admin-port=1"]}), "engine.args must not set a flag that the"),
    ("the operator's port apart", spec(engine={"args": ["--port", "1"]}), "engine.args must not set a flag that the"),
    ("batch settings as flags", spec(engine={"args": ["--max-num-seqs=1"]}), "engine.args must not set a flag"),
    ("a variable of no name", spec(engine={"env": [{"name": "1A"}]}), "engine.env names are letters, digits"),
    (
        "the operator's variable",
        spec(engine={"env": [{"name": "TIDEGATE_OBJECT_UID", "value": "x"}]}),
        "engine.env names that start with TIDEGATE_ are set by the operator",
    ),
    ("a variable twice", spec(engine={"env": [{"name": "A"}, {"name": "A"}]}), "spec.engine.env[1]: Duplicate value"),
    (
        "a GPU among the limits",
        spec(resources={"limits": {"nvidia.com/gpu": 1}}),
        "resources.limits must not name the GPU resource: set resources.gpu.count",
    ),
    (
        "another GPU among the requests",
        spec(resources={"gpu": {"resourceName": "amd.com/gpu"}, "requests": {"amd.com/gpu": 1}}),
        "resources.requests must not name the GPU resource: set resources.gpu.count",
    ),
    ("a quantity that is none", spec(resources={"limits": {"memory": "8 GB"}}), "spec.resources.limits.memory"),
    ("a GPU of no vendor", spec(resources={"gpu": {"resourceName": "gpu"}}), "must be an extended resource"),
    (
        "a toleration with too much",
        spec(placement={"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}),
        "operator Exists takes no value",
    ),
    ("a reserved label", pod(labels={"app.kubernetes.io/name": "x"}), "podTemplate.labels must not set"),
    ("our own label", pod(labels={"tidegate.dev/x": "y"}), "podTemplate.labels must not set"),
    ("our own annotation", pod(annotations={"tidegate.dev/x": "y"}), "podTemplate.annotations must not set"),
    ("a volume of ours", pod(volumes=[{"name": "tidegate-tmp", "emptyDir": {}}]), "must not start with tidegate-"),
    ("a volume of nothing", pod(volumes=[{"name": "a"}]), "give exactly one of persistentVolumeClaim"),
    (
        "a volume of two things",
        pod(volumes=[{"name": "a", "emptyDir": {}, "configMap": {"name": "b"}}]),
        "give exactly one of persistentVolumeClaim",
    ),
    ("a mount of nothing", pod(volumeMounts=[{"name": "a", "mountPath": "/a"}]), "every name must be one of"),
    (
        "a mount over the settings",
        pod(volumes=[{"name": "a", "emptyDir": {}}], volumeMounts=[{"name": "a", "mountPath": "/etc/tidegate"}]),
        "/, /tmp and /etc/tidegate are mounted by the operator",
    ),
    (
        "a mount over the copied model",
        {
            "model": {"uri": "oci://registry.example/m:1"},
            "podTemplate": {
                "volumes": [{"name": "a", "emptyDir": {}}],
                "volumeMounts": [{"name": "a", "mountPath": "/models"}],
            },
        },
        "/models is mounted by the operator when model.uri is oci://",
    ),
]

BAD_NAMES = [
    ("a" * 53, "metadata.name must not be longer than 52 characters"),
    ("model.v1", "metadata.name must start with a letter and hold only lower-case letters, digits and hyphens"),
    ("7b", "metadata.name must start with a letter"),
    ("default", "metadata.name must not be default or kubernetes"),
]


def body(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": name}, "spec": fields}


def test_enough_bad_objects_are_tried() -> None:
    assert len(BAD_SPECS) + len(BAD_NAMES) >= 30


@pytest.mark.parametrize(("fields", "message"), [row[1:] for row in BAD_SPECS], ids=[row[0] for row in BAD_SPECS])
def test_a_bad_object_is_refused_with_a_clear_message(api: httpx.Client, fields: dict[str, Any], message: str) -> None:
    url = "/apis/tidegate.dev/v1alpha1/namespaces/default/llmdeployments"
    answer = api.post(url, params={"dryRun": "All"}, json=body("bad", fields))
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["message"]


@pytest.mark.parametrize(("name", "message"), BAD_NAMES)
def test_a_bad_name_is_refused_with_a_clear_message(api: httpx.Client, name: str, message: str) -> None:
    url = "/apis/tidegate.dev/v1alpha1/namespaces/default/llmdeployments"
    answer = api.post(url, params={"dryRun": "All"}, json=body(name, spec()))
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["message"]


def test_a_field_that_does_not_act_is_refused_by_strict_clients(api: httpx.Client) -> None:
    url = "/apis/tidegate.dev/v1alpha1/namespaces/default/llmdeployments"
    fields = spec(autoscaling={**AUTO, "scaleToZero": {"enabled": True}})
    answer = api.post(url, params={"dryRun": "All", "fieldValidation": "Strict"}, json=body("bad", fields))
    assert answer.status_code == 400
    assert 'unknown field "spec.autoscaling.scaleToZero"' in answer.json()["message"]


ODD_BUT_GOOD: list[tuple[str, dict[str, Any]]] = [
    ("the least", spec()),
    ("a small maximum bends the other defaults", spec(batching={"maxBatchedTokens": {"max": 128}})),
    ("a large minimum bends the maximum", spec(batching={"maxSequences": {"min": 400}})),
    ("observing beside fixed replicas", spec(replicas=2, autoscaling={"mode": "Observe", "maxReplicas": 4})),
    ("others scale", spec(replicas=1, autoscaling={"mode": "External"})),
    ("none at all", spec(replicas=0)),
    ("one file of an image", {"model": {"uri": "oci://registry.example:5000/models/m@sha256:abc#m.Q4_1.gguf"}}),
    ("the modelled engine", spec(engine={"args": ["--runner=modelled", "--profile=l4"]})),
    (
        "goals of every kind",
        spec(
            objectives={
                "ttft": {"milliseconds": 500},
                "endToEnd": {"milliseconds": 9000},
                "outputTokensPerSecond": 4000,
                "priority": "Cost",
            },
            trafficClasses=[{"name": "chat", "objectives": {"interTokenLatency": {"milliseconds": 30}}}],
        ),
    ),
    ("quantities as numbers", spec(resources={"limits": {"cpu": 2, "memory": "1.5Gi"}, "gpu": {"count": 0}})),
]


@pytest.mark.parametrize("fields", [row[1] for row in ODD_BUT_GOOD], ids=[row[0] for row in ODD_BUT_GOOD])
def test_what_the_server_accepts_the_operator_reads_as_usable_settings(
    api: httpx.Client, fields: dict[str, Any]
) -> None:
    url = "/apis/tidegate.dev/v1alpha1/namespaces/default/llmdeployments"
    answer = api.post(url, params={"dryRun": "All"}, json=body("good", fields))
    assert answer.status_code == 201, answer.text
    read = contract.parse_spec(answer.json()["spec"])
    settings, envelope = read.initial_settings(), read.envelope()
    assert settings.max_num_seqs <= settings.max_num_batched_tokens
    assert all(
        envelope.bounds(name)[0] <= value <= envelope.bounds(name)[1] for name, value in settings.as_dict().items()
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_accepted(control_plane: cluster.Cluster, namespace: str, path: Path) -> None:
    control_plane.kubectl("-n", namespace, "apply", "-f", str(path))
    names = control_plane.kubectl("-n", namespace, "get", "lld", "-o", "name")
    assert "llmdeployment.tidegate.dev/" in names


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_client_side_apply_works_twice_and_changes_nothing_the_second_time(
    control_plane: cluster.Cluster, namespace: str
) -> None:
    control_plane.kubectl("-n", namespace, "apply", "-f", str(EXAMPLES[0]))
    assert "unchanged" in control_plane.kubectl("-n", namespace, "apply", "-f", str(EXAMPLES[0]))


def test_the_crd_itself_fits_the_annotation_of_client_side_apply(control_plane: cluster.Cluster) -> None:
    stored = control_plane.kubectl("get", "crd", "llmdeployments.tidegate.dev", "-o", "json")
    annotation = json.loads(stored)["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"]
    assert len(annotation) < 64 * 1024


# --- kubectl explain -----------------------------------------------------------------------------------------------


def field_paths(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every field of the schema as `kubectl explain` names it."""
    for name, part in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from field_paths(part.get("items", part), f"{path}.{name}")


def schema_of(part: str) -> dict[str, Any]:
    definition = crd.custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found: dict[str, Any] = definition["properties"][part]
    return found


def test_explain_documents_every_field(control_plane: cluster.Cluster) -> None:
    told = control_plane.kubectl("explain", "lld", "--recursive", "--output=plaintext-openapiv2")
    published = json.loads(control_plane.kubectl("get", "--raw", "/openapi/v3/apis/tidegate.dev/v1alpha1"))
    served = published["components"]["schemas"]["dev.tidegate.v1alpha1.LLMDeployment"]["properties"]
    assert "trafficClasses" in told
    for part in ("spec", "status"):
        undocumented = list(without_description(served[part], part))
        assert undocumented == []


def without_description(schema: dict[str, Any], path: str) -> Iterator[str]:
    if not schema.get("description"):
        yield path
    inside = schema.get("items", schema)
    for name, part in inside.get("properties", {}).items():
        yield from without_description(part, f"{path}.{name}")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("spec", "The model to serve."),
        ("spec.batching.maxSequences.max", "Highest value that may be set."),
        ("spec.autoscaling.behavior.scaleDown.policies.periodSeconds", "Length of the period."),
        ("spec.podTemplate.volumes.persistentVolumeClaim.claimName", "Name of the PersistentVolumeClaim"),
        ("status.autoscaling.lastDecision.bottleneck", "What is scarcest"),
        ("status.autoscaling.lastDecision.binding", "Goal that limits a replica"),
        ("spec.objectives.priority", "What wins where goals leave a choice"),
        ("spec.objectives.outputTokensPerSecond", "all replicas together"),
        ("spec.trafficClasses.objectives", "Goals of this class in place of the object's"),
    ],
)
def test_explain_says_what_a_field_is_for(control_plane: cluster.Cluster, path: str, words: str) -> None:
    told = " ".join(control_plane.kubectl("explain", f"lld.{path}").split())
    assert words in told


# --- subresources, columns, field managers -------------------------------------------------------------------------


def written_status(stored: dict[str, Any]) -> dict[str, Any]:
    """A status as the operator writes it, for an object with two pods of which one serves."""
    read = contract.parse_spec(stored["spec"])
    target = contract.Target(
        name=stored["metadata"]["name"],
        namespace=stored["metadata"]["namespace"],
        uid=stored["metadata"]["uid"],
        generation=stored["metadata"]["generation"],
        spec=read,
    )
    pods = tuple(
        Replica(name=f"p{i}", uid=f"u{i}", ip=None, phase=phase, created_at=0.0)
        for i, phase in enumerate((ReplicaPhase.READY, ReplicaPhase.LOADING))
    )
    observation = Observation(now=0.0, current_replicas=2, replicas=pods, metrics_state=MetricsState.FRESH)
    decision = Decision(
        replicas=2,
        settings=read.initial_settings(),
        settings_generation=1,
        action=Action.SCALE_UP,
        reason="LoadGrew",
        message="2 replicas are needed",
        recheck_after_seconds=15,
        memory={"recommendations": [[0, 2]], "nested": {"any": "thing"}},
        inputs={"rate": 1.25},
    )
    return status.build(target, observation, decision, {}, now=0.0)


def put_status(api: httpx.Client, url: str, stored: dict[str, Any]) -> dict[str, Any]:
    answer = api.patch(
        f"{url}/{stored['metadata']['name']}/status",
        params={"fieldManager": contract.FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"},
        headers={"Content-Type": "application/apply-patch+yaml"},
        content=json.dumps(
            {
                "apiVersion": contract.API_VERSION,
                "kind": contract.KIND,
                "metadata": {"name": stored["metadata"]["name"]},
                "status": written_status(stored),
            }
        ),
    )
    assert answer.status_code == 200, answer.text
    changed: dict[str, Any] = answer.json()
    return changed


def test_the_status_is_stored_as_it_was_built(
    api: httpx.Client, objects_url: str, make: Callable[..., dict[str, Any]]
) -> None:
    stored = make(autoscaling=AUTO)
    changed = put_status(api, objects_url, stored)
    assert changed["status"] == written_status(stored)
    again = put_status(api, objects_url, stored)
    assert again["metadata"]["resourceVersion"] == changed["metadata"]["resourceVersion"]


def test_scale_gives_replicas_and_the_selector_that_an_autoscaler_needs(
    api: httpx.Client, objects_url: str, make: Callable[..., dict[str, Any]]
) -> None:
    put_status(api, objects_url, make(replicas=2, autoscaling={"mode": "External"}))
    scale = api.get(f"{objects_url}/model/scale").json()
    assert scale["spec"]["replicas"] == 2
    assert scale["status"]["replicas"] == 2
    assert scale["status"]["selector"] == "app.kubernetes.io/name=tidegate-engine,app.kubernetes.io/instance=model"


def test_kubectl_scale_sets_the_replicas(
    control_plane: cluster.Cluster, namespace: str, make: Callable[..., dict[str, Any]]
) -> None:
    make(replicas=1)
    control_plane.kubectl("-n", namespace, "scale", "lld/model", "--replicas=3")
    assert control_plane.kubectl("-n", namespace, "get", "lld", "model", "-o", "jsonpath={.spec.replicas}") == "3"


def test_scaling_by_hand_is_refused_while_the_operator_scales(
    control_plane: cluster.Cluster, namespace: str, make: Callable[..., dict[str, Any]]
) -> None:
    make(autoscaling=AUTO)
    with pytest.raises(cluster.CommandFailed):
        control_plane.kubectl("-n", namespace, "scale", "lld/model", "--replicas=3")


def test_get_shows_the_columns_worth_reading(
    control_plane: cluster.Cluster,
    namespace: str,
    api: httpx.Client,
    objects_url: str,
    make: Callable[..., dict[str, Any]],
) -> None:
    put_status(api, objects_url, make(autoscaling=AUTO))
    header, row = control_plane.kubectl("-n", namespace, "get", "lld").strip().splitlines()
    assert header.split() == [
        "NAME", "READY", "SERVING", "REPLICAS", "DESIRED", "TTFT-P95-MS", "MIX", "BATCH", "REASON", "AGE",
    ]  # fmt: skip
    assert row.split()[:5] == ["model", "True", "1", "2", "2"]
    assert "Serving" in row
    wide = control_plane.kubectl("-n", namespace, "get", "lld", "-o", "wide")
    assert all(name in wide for name in ("MODEL", "URL", "MODE", "METRICS"))
    assert f"http://model.{namespace}.svc:8000/v1" in wide
    assert "llmdeployment.tidegate.dev/model" in control_plane.kubectl("-n", namespace, "get", "llm", "-o", "name")


def apply_as(api: httpx.Client, url: str, manager: str, fields: dict[str, Any]) -> httpx.Response:
    return api.patch(
        url,
        params={"fieldManager": manager},
        headers={"Content-Type": "application/apply-patch+yaml"},
        content=json.dumps(body("model", fields)),
    )


def test_two_managers_share_an_object_and_conflict_only_on_the_same_field(api: httpx.Client, objects_url: str) -> None:
    url = f"{objects_url}/model"
    git = {"model": URI, "autoscaling": {"mode": "External"}, "replicas": 1, "engine": {"env": [{"name": "A"}]}}
    assert apply_as(api, url, "git", git).status_code == 201
    team = {"engine": {"env": [{"name": "B", "value": "2"}]}, "trafficClasses": [{"name": "Chat"}]}
    both = apply_as(api, url, "team", team)
    assert both.status_code == 200, both.text
    assert [item["name"] for item in both.json()["spec"]["engine"]["env"]] == ["A", "B"]
    clash = apply_as(api, url, "team", {"replicas": 5})
    assert clash.status_code == 409
    assert 'conflict with "git"' in clash.json()["message"]


def test_git_applying_again_leaves_the_replicas_that_an_autoscaler_set(
    control_plane: cluster.Cluster, namespace: str, api: httpx.Client, objects_url: str
) -> None:
    url = f"{objects_url}/model"
    apply_as(api, url, "git", {"model": URI, "autoscaling": {"mode": "External"}, "replicas": 1})
    control_plane.kubectl("-n", namespace, "scale", "lld/model", "--replicas=4")
    without = apply_as(api, url, "git", {"model": URI, "autoscaling": {"mode": "External"}})
    assert without.status_code == 200, without.text
    assert without.json()["spec"]["replicas"] == 4
