"""Small pods: a gibibyte is enough for a small model's weights and cache, and an eight-bit KV cache answers as well."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

MODEL = "file:///models/SmolLM2-135M-Instruct.Q4_1.gguf"
PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
CLIENTS = 4
CONTEXT_TOKENS = 2048
OUTPUT_TOKENS = 32
PROMPT_TOKENS = CONTEXT_TOKENS - OUTPUT_TOKENS if PROVE else 256
MEMORY = {"cpu": "2", "memory": "1Gi"}
PEAK = "cat /sys/fs/cgroup/memory.peak 2>/dev/null || cat /sys/fs/cgroup/memory/memory.max_usage_in_bytes"


@pytest.fixture(scope="module", autouse=True)
def served(fleet: Any, objects: Any) -> Iterator[None]:
    engine = {"image": "tidegate.local/engine:torch", "maxModelLength": CONTEXT_TOKENS}
    small = {"gpu": {"count": 0}, "requests": {"cpu": "20m", "memory": "256Mi"}, "limits": MEMORY}
    fleet.apply(
        objects.real("edge", MODEL, engine=engine, resources=small),
        objects.real("kv-fp8", MODEL, engine={**engine, "args": ["--kv-cache-dtype=fp8"]}),
    )
    yield
    fleet.kubectl("delete", "lld", "edge", "kv-fp8", "--wait=false")


def client_of(fleet: Any, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url(name)}/v1", api_key="none", max_retries=0, timeout=600)


@pytest.mark.prove
def test_a_pod_of_one_gibibyte_serves_four_clients_with_their_whole_context(fleet: Any) -> None:
    fleet.wait_ready("edge")
    client = client_of(fleet, "edge")

    def ask(number: int) -> openai.types.CompletionUsage | None:
        prompt = [1 + (number + position) % 1000 for position in range(PROMPT_TOKENS)]
        answer = client.completions.create(
            model="edge", prompt=prompt, max_tokens=OUTPUT_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.usage

    with ThreadPoolExecutor(CLIENTS) as pool:
        used = list(pool.map(ask, range(CLIENTS)))
    assert [usage and (usage.prompt_tokens, usage.completion_tokens) for usage in used] == [
        (PROMPT_TOKENS, OUTPUT_TOKENS)
    ] * CLIENTS
    (pod,) = fleet.pods("edge")
    metrics = httpx.get(f"http://{fleet.cluster.forward(pod['status']['podIP'], 8001)}/metrics").text
    blocks = int(re.findall(r'num_gpu_blocks="(\d+)"', metrics)[0])
    assert blocks * 16 >= CLIENTS * CONTEXT_TOKENS, "all four fit at once, none waits for another"
    assert [fact.restarts for fact in fleet.ready_pods("edge")] == [0]
    peak = int(fleet.kubectl("exec", pod["metadata"]["name"], "--", "sh", "-c", PEAK))
    print(f"peak memory of the pod: {peak / 2**20:.0f} MiB of 1024")


def test_a_pod_with_an_eight_bit_kv_cache_answers(fleet: Any) -> None:
    fleet.wait_ready("kv-fp8")
    answer = client_of(fleet, "kv-fp8").chat.completions.create(
        model="kv-fp8",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
    )
    assert "Paris" in str(answer.choices[0].message.content)
    (pod,) = fleet.pods("kv-fp8")
    metrics = httpx.get(f"http://{fleet.cluster.forward(pod['status']['podIP'], 8001)}/metrics").text
    assert 'cache_dtype="fp8' in metrics
