"""Loading a model reads the flags that are declared for it and no others, whichever command loads one."""

from argparse import Namespace
from pathlib import Path

import pytest

from tidegate_engine import cli
from tidegate_engine.precision import Precision
from tidegate_engine.request import PoolingKind
from tidegate_engine.torch_runner import TorchRunner

COMMANDS = {
    "serve": ["serve", "--model"],
    "bench": ["bench", "--model"],
    "chat": ["chat"],
    "pack": ["pack", "--output", "/nowhere", "--model"],
}
DEFAULTS = vars(cli._loading_args(Namespace()))


def test_what_loading_reads_is_what_is_declared_for_it(tiny_model: Path) -> None:
    args = cli._loading_args(Namespace(model=str(tiny_model), num_gpu_blocks_override=8))
    model = cli._computed(args, Precision())
    runner, _ = model.load_runner()
    assert isinstance(runner, TorchRunner) and runner.info.kv_blocks == 8
    assert model.load_tokenizer().encode("the tide")


def test_that_a_modelled_engine_is_described_by_flags_for_loading_too(fast_profile_file: Path) -> None:
    name, model = cli._read_model(Namespace(runner="modelled", profile=str(fast_profile_file)))
    assert (name, model.load_runner()[0].info.kv_blocks) == ("fast", 65)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_loads_has_the_defaults_of_what_it_does_not_offer(command: str) -> None:
    parsed = cli._parser().parse_args([*COMMANDS[command], "model.gguf"])
    loading = vars(cli._loading_args(parsed))
    assert {name: loading[name] for name in DEFAULTS} == DEFAULTS
    assert loading["model"] == "model.gguf"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_given_wins_over_the_defaults(command: str) -> None:
    parsed = cli._parser().parse_args([*COMMANDS[command], "model.gguf", "--precision", "int8"])
    assert cli._loading_args(parsed).precision == "int8"


def test_embeddings_are_made_as_the_flag_says(tiny_model: Path) -> None:
    parsed = cli._parser().parse_args(
        ["serve", "--model", str(tiny_model), "--pooler-config", '{"pooling_type": "mean"}', "--max-model-len", "64"]
    )
    runner, _ = cli._read_model(parsed)[1].load_runner()
    assert (runner.info.pooling, runner.info.max_model_len) == (PoolingKind.MEAN, 64)
