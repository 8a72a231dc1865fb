"""What the operator puts on the engine's command line is what the engine's command line takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_engine import cli
from tidegate_engine.steptime import profile_names
from tidegate_operator import api, render

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def arguments(spec: dict[str, Any]) -> list[str]:
    return render.engine_args(api.Target("chat", "team", "uid", 1, api.parse_spec(spec)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_engine_takes_the_command_line_of_every_example(path: Path) -> None:
    parsed = cli._parser().parse_args(arguments(yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]))
    assert (parsed.port, parsed.admin_port) == (api.HTTP_PORT, api.ADMIN_PORT)
    if parsed.runner == "modelled":
        assert parsed.profile in profile_names()


def test_every_field_reaches_the_engine() -> None:
    spec = {
        "model": {"uri": "file:///m.gguf", "servedNames": ["a", "b"]},
        "engine": {"maxModelLength": 4096, "kvBlockTokens": 32, "prefixCaching": False},
        "drain": {"timeoutSeconds": 120, "endpointRemovalSeconds": 5},
        "probes": {"livenessStallSeconds": 30},
    }
    parsed = vars(cli._parser().parse_args(arguments(spec)))
    expected = {
        "model": "/m.gguf",
        "served_model_name": ["a", "b"],
        "config_dir": Path(api.CONFIG_DIR),
        "max_model_len": 4096,
        "block_size": 32,
        "enable_prefix_caching": False,
        "shutdown_timeout": 120,
        "endpoint_removal_seconds": 5,
        "liveness_stall_seconds": 30,
    }
    assert {name: parsed[name] for name in expected} == expected


@pytest.mark.parametrize("flag", api.OPERATOR_OWNED_FLAGS)
def test_a_flag_that_users_may_not_set_is_one_of_the_engines(flag: str) -> None:
    with pytest.raises(cli.ConfigError, match=f"--{flag}.*: expected"):
        cli._parser().parse_args(["serve", f"--{flag}"])
