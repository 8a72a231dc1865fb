"""A real model on the full node: Ready means that it answers, from a file and from an image, under any user id."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module", autouse=True)
def served(fleet: Any, objects: Any) -> Iterator[None]:
    fleet.apply(
        objects.real("from-file", f"file:///models/{FILE}"),
        objects.real("from-image", "oci://tidegate.local/smollm2:dev"),
    )
    yield
    fleet.kubectl("delete", "lld", "from-file", "from-image", "--wait=false")


def answer(fleet: Any, name: str) -> str:
    client = openai.OpenAI(base_url=f"{fleet.url(name)}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": QUESTION}], max_tokens=24, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_ready_means_a_real_answer_from_a_file_and_from_an_image(fleet: Any) -> None:
    fleet.wait_ready("from-file")
    fleet.wait_ready("from-image")
    from_file = answer(fleet, "from-file")
    assert "Paris" in from_file
    assert answer(fleet, "from-image") == from_file
    assert all(pod.restarts == 0 for name in ("from-file", "from-image") for pod in fleet.ready_pods(name))


def test_a_request_over_the_context_is_refused_with_a_clear_error_and_nothing_breaks(fleet: Any) -> None:
    fleet.wait_ready("from-file")
    client = openai.OpenAI(base_url=f"{fleet.url('from-file')}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="from-file", prompt="tide " * 3000, max_tokens=10)
    assert "1024" in str(refused.value)
    assert answer(fleet, "from-file")


def test_the_engine_runs_under_an_arbitrary_user_id_with_a_read_only_root(fleet: Any) -> None:
    """As on clusters that give every namespace its own range of user ids, which no passwd file knows."""
    fleet.wait_ready("from-file")
    spec = fleet.get("from-file", "deployment")["spec"]["template"]["spec"]
    spec["securityContext"] |= {"runAsUser": 1000770000, "runAsGroup": 0}
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    spec["restartPolicy"] = "Never"
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any-user", "namespace": "tidegate"}, "spec": spec}
    fleet.kubectl("create", "--filename=-", input=json.dumps(pod))

    def settled() -> bool:
        found = fleet.get("any-user", "pod")
        assert found["status"]["phase"] != "Failed", fleet.kubectl("logs", "any-user")
        return any(c["type"] == "Ready" and c["status"] == "True" for c in found["status"].get("conditions", []))

    fleet.until("a pod under user id 1000770000 is ready", settled, timeout_seconds=90)
    fleet.kubectl("delete", "pod", "any-user", "--wait=false", "--grace-period=1")
