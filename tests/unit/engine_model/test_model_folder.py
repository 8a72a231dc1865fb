"""A folder of safetensors files, served: tokenizer and chats as by transformers, the runner, the ends of answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tidegate_engine.blocks import BlockPool
from tidegate_engine.request import Request, SamplingParams
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_engine.tokenizer import load_tokenizer
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.weights import ModelError, find_model_file

TEXTS = ["the cat in the  hat", "Ünï 日本 😀\n\ttabs 12345", "", " leading", "<|end|>after"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"


def byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {token: index for index, token in enumerate([*bytes_to_unicode().values(), "th", "the", "Ġthe"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e"), ("Ġ", "the")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|begin|>", "<|end|>"])
    made.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", made.token_to_id("<|begin|>"))]
    )
    return made


def pieces() -> Any:
    """As SentencePiece's vocabularies are converted: spaces as U+2581, unknown characters in bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thecaina", "th", "the", "▁the"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(names))}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<|begin|>", "<|end|>"])
    return made


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """A tiny Llama with a tokenizer, as transformers saves it."""

    def write(make: Callable[[], Any] = byte_level, **config: Any) -> Path:
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), bos_token="<|begin|>", eos_token="<|end|>")
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(tmp_path)
        settings = LlamaConfig(
            vocab_size=len(tokenizer) + 3,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **config,
        )
        torch.manual_seed(3)
        LlamaForCausalLM(settings).save_pretrained(tmp_path)
        return tmp_path

    return write


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_texts_and_chats_are_cut_and_joined_as_by_transformers(
    write_folder: Callable[..., Path], make: Callable[[], Any]
) -> None:
    from transformers import AutoTokenizer

    folder = write_folder(make)
    oracle, found = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == oracle.encode(text)
        plain = found.encode(text, add_special=False)
        assert plain == oracle.encode(text, add_special_tokens=False)
        assert b"".join(map(found.token_bytes, plain)).decode() == text.replace("<|end|>", "")
        assert found.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "in"}]
    assert found.render_chat(messages) == oracle.apply_chat_template(messages, tokenize=False)
    assert found.chat(messages) == oracle.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert found.token_bytes(found.vocab_size + 1) == b""


def test_a_folder_is_served_with_the_tokens_of_transformers(write_folder: Callable[..., Path]) -> None:
    from transformers import LlamaForCausalLM

    folder = write_folder()
    runner = TorchRunner(folder, options=TorchOptions(kv_blocks=30, block_tokens=4, threads=1))
    tokenizer = load_tokenizer(folder)
    assert (runner.info.name, runner.info.max_model_len) == (folder.name, 64)
    assert runner.info.eos_token_ids == tokenizer.eos_token_ids == (260,)
    ids = tokenizer.encode("the cat")
    scheduler = Scheduler(BatchSettings(4, 64, 64), BlockPool(30, 4), max_model_len=64)
    request = Request("a", len(ids), 8, 0.0, prompt_ids=ids, params=SamplingParams(temperature=0, ignore_eos=True))
    scheduler.add(request)
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        scheduler.commit(step, runner.run(step), 0.0)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=8)
    assert request.output_ids == expected[0, len(ids) :].tolist()


def test_ends_that_are_no_tokens_are_refused_at_load(write_folder: Callable[..., Path]) -> None:
    folder = write_folder()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [260, 999]}))
    with pytest.raises(ModelError, match="names the token 999 as the end, and its vocabulary has 264 tokens"):
        TorchRunner(folder, options=TorchOptions(kv_blocks=4))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "end"}))
    with pytest.raises(ModelError, match="has 'end' as eos_token_id; token ids are needed"):
        load_tokenizer(folder)


def test_a_text_never_becomes_a_token_that_the_model_has_no_row_for(write_folder: Callable[..., Path]) -> None:
    folder = write_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 260, "eos_token_id": 1}))
    assert max(load_tokenizer(folder).encode("<|end|>")) < 260


@pytest.mark.parametrize(
    ("number", "vocab_size", "below"),
    [(300, 264, 264), (4_000_000_000, 10**12, 1 << 22), (4_000_000_000, None, 1 << 22)],
)
def test_a_vocabulary_with_numbers_that_the_model_has_no_rows_for_is_refused(
    write_folder: Callable[..., Path], number: int, vocab_size: int | None, below: int
) -> None:
    folder = write_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    description = json.loads((folder / "tokenizer.json").read_text())
    description["model"]["vocab"]["zzz"] = number
    (folder / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ModelError, match=f"has a token with the number {number}.*; possible are those below {below}$"):
        load_tokenizer(folder)


def test_an_added_token_with_a_wrong_number_is_refused_where_its_own_has_no_row(
    write_folder: Callable[..., Path],
) -> None:
    folder = write_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 260}))
    description = json.loads((folder / "tokenizer.json").read_text())
    description["added_tokens"][1]["id"] = 3
    (folder / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ModelError, match="has a token with the number 260; possible are those below 260"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "holds no tokenizer.json"),
        ("[]", "its JSON is no object"),
        ('{"model": {"type": "BPE"}}', "is damaged"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(
    write_folder: Callable[..., Path], content: str | None, expected: str
) -> None:
    file = write_folder() / "tokenizer.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ModelError, match=expected):
        load_tokenizer(file.parent)


def test_a_decoder_that_joins_words_is_refused(write_folder: Callable[..., Path]) -> None:
    folder = write_folder()
    description = json.loads((folder / "tokenizer.json").read_text())
    description["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ModelError, match="has the decoder WordPiece; supported are ByteLevel"):
        load_tokenizer(folder)


def test_a_folder_with_both_formats_needs_a_name(write_folder: Callable[..., Path]) -> None:
    folder = write_folder()
    assert find_model_file(folder) == folder
    (folder / "model.gguf").touch()
    with pytest.raises(
        ModelError, match=r"holds model\.gguf and safetensors files; name the one file, or config\.json"
    ):
        find_model_file(folder)
    assert find_model_file(folder / "config.json") == folder
    assert find_model_file(folder / "model.gguf") == folder / "model.gguf"
