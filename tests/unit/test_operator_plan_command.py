"""`tidegate plan` as users type it."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tidegate_engine.steptime import load_profile
from tidegate_operator.cli import main as tidegate
from tidegate_operator.plan_command import MIXES, BadFlag, UnknownModel, main, parse_mix, parse_time, read_shape

SMALL = ("--gpu", "L4", "--gpu", "A100 80GB", "--precision", "fp8,int8", "--mix", "1000:200", "--ttft", "1s")
CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def test_the_table_names_options_refusals_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert tidegate(["plan", "--model", "Llama-3.1-8B", *SMALL, "--rate", "4", "--price", "L4=0.5"]) == 0
    text = capsys.readouterr().out
    assert "Llama-3.1-8B: 8.03 billion parameters" in text and "128 KiB of 16-bit KV a token" in text
    assert "A100 80GB fp8: A100 80GB (Ampere) has no fp8 in its tensor cores" in text
    assert "Take " in text and "a replica is bound by" in text
    assert "load: 4 requests/s" in text and "TTFT 1000 ms" in text


def test_json_says_the_same_with_units_in_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "Llama-3.1-8B", *SMALL, "--rate", "4", "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    choice = answer["choice"]
    assert answer["stepModel"] == {"source": "Prior", "relativeError": 0.25}
    assert choice["requestsPerSecond"] == 4 and choice["outputTokensPerSecond"] == pytest.approx(800)
    assert choice["replicas"] * choice["gpusPerReplica"] == choice["gpus"]
    memory = choice["memoryPerGpu"]
    assert memory["weightBytes"] + memory["workspaceBytes"] + memory["kvBytes"] == pytest.approx(memory["usableBytes"])
    assert [refusal["gpu"] for refusal in answer["refusals"]] == ["A100 80GB"]
    assert {option["gpu"] for option in answer["options"]} == {"L4", "A100 80GB"}


def test_the_choice_can_be_written_as_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "choice.json"
    flags = ["--model", "Llama-3.1-8B", *SMALL, "--rate", "4", "--json", "--write-profile"]
    assert main([*flags, str(file)]) == 0
    choice = json.loads(capsys.readouterr().out)["choice"]
    profile = load_profile(str(file))
    assert profile.step.as_dict() == choice["stepModel"]
    assert (profile.gpu, profile.gpus) == (choice["gpu"], choice["gpusPerReplica"])
    assert profile.kv_blocks == choice["kvTokens"] // 16
    assert main([*flags, str(tmp_path / "no-such-folder" / "x.json")]) == 2


def test_the_goal_that_a_load_implies_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--concurrency", "100", "--tokens-per-second", "2000"]
    assert main(["--model", "Llama-3.1-8B", *SMALL, *load]) == 0
    assert "goals, 95th percentile: TTFT 1000 ms, ITL 50 ms" in capsys.readouterr().out


def test_no_option_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "Llama-3.1-70B", "--gpu", "T4", "--precision", "bf16", "--mix", "1000:200"]) == 1
    assert "No choice: the model fits on none" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        *(
            ("--mix", mix)
            for mix in ("nan:5", "5:nan", "inf:1", "1:2:inf", "1:2:nan", "chat:inf", "1:2:1e308,1:2:1e308")
        ),
        ("--mix", ",".join(["100:100"] * 65)),
        ("--ttft", "9" * 400 + "s"),
        ("--itl", "0.0000000001ms"),
    ],
)
def test_numbers_that_no_load_has_are_refused_in_a_sentence(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "Llama-3.1-8B", "--gpu", "L4", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_a_name_that_no_file_can_have_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "a" * 5000]) == 2
    assert "neither a file nor a known model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "no-such"], "neither a file nor a known model"),
        (["--model", "Llama-2-7B", "--mix", "rag"], "holds 4,096 in context"),
        (["--model", "Llama-2-7B", "--gpu", "V100"], "the GPU 'V100' is unknown"),
        (["--model", "Llama-2-7B", "--precision", "fp3"], "known are fp32"),
        (["--model", "Llama-2-7B", "--ttft", "500"], "write 500ms"),
        (["--model", "Llama-2-7B", "--rate", "0"], "--rate must be above 0"),
        (["--model", "Llama-2-7B", "--rate", "1e9"], "below a billion"),
        (["--model", "Llama-2-7B", "--price", "H100"], "is no price"),
        (["--model", "Llama-2-7B", "--headroom", "95"], "0 to 90"),
        (["--model", "Llama-2-7B", "--mix", "1000"], "neither ISL:OSL"),
    ],
)
def test_a_question_that_cannot_be_read_is_one_sentence(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_explain_refuses_flags_that_are_the_plans() -> None:
    with pytest.raises(SystemExit) as stopped:
        tidegate(["explain", "--model", "x"])
    assert stopped.value.code == 2


def test_the_plan_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tidegate(["plan", "--help"])
    assert stopped.value.code == 0 and "--tokens-per-second" in capsys.readouterr().out


# --- mixes and times -------------------------------------------------------------------------------------------------


def test_presets_have_shares_of_one() -> None:
    for name in MIXES:
        assert sum(cell.share for cell in parse_mix(name).cells) == pytest.approx(1), name


def test_lengths_and_presets_can_be_weighed() -> None:
    mix = parse_mix("8000:200:3,300:100:1")
    assert [(cell.isl, cell.osl, cell.share) for cell in mix.cells] == [(8000, 200, 0.75), (300, 100, 0.25)]
    assert [cell.isl_edge for cell in mix.cells] == [4096, 256]
    both = parse_mix("chat:0.75,rag:0.25")
    assert sum(cell.share for cell in both.cells if cell.isl >= 4000) == pytest.approx(0.25)


@pytest.mark.parametrize("text", ["", "talk", "1000", "0:100", "100:50:-1", "100:50:0", "chat:x"])
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadFlag):
        parse_mix(text)


def test_times_need_a_unit() -> None:
    assert [parse_time(text) for text in ("500ms", "0.5s", "2m")] == [0.5, 0.5, 120.0]
    for text in ("500", "0ms", "fast", "-1s"):
        with pytest.raises(ValueError):
            parse_time(text)


# --- models from files -----------------------------------------------------------------------------------------------


def test_a_folder_or_its_config_is_read_as_the_engine_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "one-b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for path in (folder, folder / "config.json"):
        shape = read_shape(str(path))
        assert (shape.name, shape.parameters, shape.kv_heads) == ("one-b", 1_235_814_400, 8)


def test_a_gguf_files_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("small")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-5)
    for name in ("token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight"):
        writer.add_tensor(name, np.zeros((100, 64) if name.startswith("token") else (64,), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for model in (path, tmp_path):
        shape = read_shape(str(model))
        assert (shape.name, len(shape.config.layers), shape.kv_heads) == ("small", 2, 2)
        # 2 sides x 2 layers x 2 heads x 16 values x 2 bytes
        assert shape.kv_bytes_per_token("bf16") == 256


@pytest.mark.parametrize(
    ("name", "words"),
    [("empty", "holds 0 GGUF files and no config.json"), ("broken", "is damaged"), ("foreign", "model_type")],
)
def test_files_that_describe_no_model_are_refused(name: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    if name == "broken":
        (folder / "config.json").write_text("{")
    if name == "foreign":
        (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "mamba"}))
    with pytest.raises(UnknownModel, match=words):
        read_shape(str(folder))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.1-70B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("Qwen/Qwen2.5-14B-Instruct-AWQ", "Qwen2.5-14B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
    ],
)
def test_releases_of_one_shape_are_one_row(name: str, key: str) -> None:
    assert read_shape(name).name == key
