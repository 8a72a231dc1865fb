"""The decoder's logits against transformers' with the same weights, and what the real model says.

The real model's oracle is loaded by transformers' own GGUF reader (dequantisation, un-permutation, names): it shares no
code with ours.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tidegate_engine.blocks import BlockPool
from tidegate_engine.precision import Precision, as_stored
from tidegate_engine.request import PoolingKind, Request, SamplingParams, Step, StepItem
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_engine.tokenizer import load_tokenizer
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.transformer import build_decoder, forward, layer_caches, new_kv_pool
from tidegate_engine.weights_gguf import load_gguf
from tidegate_kernels.reference import ragged_batch

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
BLOCK = 16


def logits_of(path: Path, ids: list[int], *, precision: Precision | None = None) -> torch.Tensor:
    """Logits after each of `ids`."""
    config, parameters = load_gguf(path, dtype=torch.float32, precision=precision)
    decoder = build_decoder(config, parameters)
    blocks = -(-len(ids) // BLOCK)
    caches = layer_caches(config, new_kv_pool(config, blocks=blocks + 1, block_tokens=BLOCK, dtype=torch.float32))
    batch = ragged_batch([len(ids)], [len(ids)], [range(1, blocks + 1)], cache=caches[0])
    with torch.inference_mode():
        return forward(decoder, torch.tensor(ids), batch, caches=caches, logits_rows=torch.arange(len(ids)))


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True)], ids=lambda value: str(value)
)
def test_a_tiny_model_of_each_family_has_the_logits_of_transformers(
    write_tiny_model: Callable[..., Path], architecture: str, tied: bool
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    path = write_tiny_model(architecture=architecture, tied=tied)
    weights = torch.load(path.with_suffix(".pt"))
    dimensions: dict[str, Any] = {
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": tied,
    }
    oracle: Any
    if architecture == "llama":
        oracle = LlamaForCausalLM(LlamaConfig(**dimensions))
    else:
        oracle = Qwen2ForCausalLM(Qwen2Config(**dimensions))
    oracle.load_state_dict(weights, strict=not tied)
    oracle.tie_weights()
    ids = torch.randint(3, dimensions["vocab_size"], (50,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        expected = oracle.eval()(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(path, ids), expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def oracle(real_model: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with no_init_weights():
        model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(real_model), return_tensors=True, model_to_load=model)["tensors"]
    assert len(tensors) == 272
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


PROMPT = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]


def test_the_real_model_has_the_logits_of_transformers(real_model: Path, oracle: Any) -> None:
    ids = load_tokenizer(real_model).chat(PROMPT)
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    found = logits_of(real_model, ids)
    assert (found - expected).abs().max() <= 1e-3
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_the_real_model_kept_in_the_files_own_bits_has_the_same_logits(real_model: Path, oracle: Any) -> None:
    ids = load_tokenizer(real_model).chat(PROMPT)
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    found = logits_of(real_model, ids, precision=as_stored(Precision()))
    assert (found - expected).abs().max() <= 1e-3
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


QUESTIONS = (
    "What is the capital of France?", "Write a short poem about the tide.", "Count from one to ten.",
    "Why is the sky blue?", "Name three rivers in Europe.", "Explain photosynthesis to a child.",
    "What is 12 times 12?", "Translate 'good morning' into French.", "Tell me a joke about a harbour.",
    "How do I boil an egg?", "Who wrote Romeo and Juliet?", "List the planets of the solar system.",
    "Write a Python function that adds two numbers.", "What is the difference between a sea and a lake?",
    "Give me a recipe for pancakes.", "Was ist die Hauptstadt von Deutschland?", "Describe a lighthouse at night.",
    "What does an operating system do?", "Write a letter to my landlord about a leaking tap.", "¿Qué es la marea?",
)  # fmt: skip
ASKED, ANSWER_TOKENS = (len(QUESTIONS), 64) if PROVE else (2, 12)


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_the_real_model_writes_the_text_of_transformers(real_model: Path, oracle: Any) -> None:
    tokenizer = load_tokenizer(real_model)
    runner = TorchRunner(real_model, options=TorchOptions(kv_blocks=200))
    scheduler = Scheduler(BatchSettings(len(QUESTIONS), 512, 16), BlockPool(200, BLOCK), max_model_len=512)
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS[:ASKED]]
    requests = [
        Request(str(number), len(ids), ANSWER_TOKENS, 0.0, prompt_ids=ids, params=SamplingParams(temperature=0))
        for number, ids in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        scheduler.commit(step, runner.run(step), 0.0)
    for request, ids in zip(requests, prompts, strict=True):
        with torch.inference_mode():
            expected = oracle.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),
                do_sample=False,
                max_new_tokens=ANSWER_TOKENS,
            )
        assert tokenizer.decode(request.output_ids) == tokenizer.decode(expected[0, len(ids) :].tolist())
    assert max(len(set(request.output_ids)) for request in requests) > ANSWER_TOKENS // 2


def test_the_real_model_answers_as_transformers_does(real_model: Path, oracle: Any) -> None:
    tokenizer = load_tokenizer(real_model)
    runner = TorchRunner(real_model, options=TorchOptions(kv_blocks=64))
    ids = tokenizer.chat(PROMPT)
    scheduler = Scheduler(BatchSettings(8, 512, 16), BlockPool(64, BLOCK), max_model_len=512)
    scheduler.add(Request("a", len(ids), 24, 0.0, prompt_ids=ids, params=SamplingParams(temperature=0)))
    output: list[int] = []
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        output += [event.token.token_id for event in scheduler.commit(step, runner.run(step), 0.0) if event.token]
    with torch.inference_mode():
        expected = oracle.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=24
        )
    assert tokenizer.decode(output) == "The capital of France is Paris."
    assert output == expected[0, len(ids) :].tolist()
    assert runner.info.eos_token_ids == (2,)
    assert output[-1] == 2


@pytest.mark.parametrize("kind", list(PoolingKind))
def test_the_real_model_embeds_as_transformers_does(real_model: Path, oracle: Any, kind: PoolingKind) -> None:
    ids = load_tokenizer(real_model).encode("The tide comes in twice a day, and goes out again.")
    with torch.inference_mode():
        states = oracle.model(torch.tensor([ids])).last_hidden_state[0]
    chosen = {PoolingKind.LAST: states[-1], PoolingKind.CLS: states[0], PoolingKind.MEAN: states.mean(dim=0)}
    runner = TorchRunner(real_model, options=TorchOptions(kv_blocks=8, threads=1))
    request = Request("r", len(ids), 1, 0.0, prompt_ids=ids, pooling=kind)
    found = runner.run(Step(1, (StepItem(request, 0, len(ids), True, [1, 2]),), 1))["r"].embedding
    assert found is not None
    embedding = torch.frombuffer(bytearray(found), dtype=torch.float32)
    assert torch.nn.functional.cosine_similarity(embedding, chosen[kind], dim=0) > 0.99999
