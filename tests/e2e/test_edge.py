"""A small pod: a gibibyte is enough for a small model's weights and an eight-bit KV cache."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
        objects.real("edge", MODEL, engine={**engine, "args": ["--kv-cache-dtype=fp8"]}, resources=small),
    )
    yield
    fleet.kubectl("delete", "lld", "edge", "--wait=false")


@pytest.mark.prove
def test_a_pod_of_one_gibibyte_with_an_eight_bit_kv_cache_serves_four_clients(fleet: Any) -> None:
    fleet.wait_ready("edge")
    client = openai.OpenAI(base_url=f"{fleet.url('edge')}/v1", api_key="none", max_retries=0, timeout=600)

    def fill_context(number: int) -> openai.types.CompletionUsage | None:
        prompt = [1 + (number + position) % 1000 for position in range(PROMPT_TOKENS)]
        answer = client.completions.create(
            model="edge", prompt=prompt, max_tokens=OUTPUT_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.usage

    with ThreadPoolExecutor(CLIENTS) as pool:
        used = list(pool.map(fill_context, range(CLIENTS)))
    whole = (PROMPT_TOKENS, OUTPUT_TOKENS)
    assert [usage and (usage.prompt_tokens, usage.completion_tokens) for usage in used] == [whole] * CLIENTS
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model="edge", messages=question, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in str(answer.choices[0].message.content)

    (pod,) = fleet.pods("edge")
    assert [fact.restarts for fact in fleet.ready_pods("edge")] == [0]
    ready = re.search(r"(\d+) KV blocks of 16 tokens in fp8", fleet.kubectl("logs", pod["metadata"]["name"]))
    assert ready is not None
    assert int(ready[1]) * 16 >= CLIENTS * CONTEXT_TOKENS, "all four fit at once, none waits for another"
    peak = int(fleet.kubectl("exec", pod["metadata"]["name"], "--", "sh", "-c", PEAK))
    print(f"peak memory of the pod, page cache included: {peak / 2**20:.0f} MiB of 1024")
