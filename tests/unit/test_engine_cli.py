"""The command line: what is wrong is said in one sentence, with an exit code that tells whose fault it is."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate_engine import cli, serve
from tidegate_engine.settings import DEFAULT_PATTERNS, BatchSettings, Envelope, SettingsFile, settings_file_dict

MODELLED = ["serve", "--runner", "modelled", "--profile", "l4-llama-3.1-8b"]
TORCH = ["serve", "--model", "/no/model.gguf"]


@pytest.fixture
def termination_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setattr(cli, "TERMINATION_LOG", path)
    return path


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["serve"], 2, "FlagsInvalid: --model is needed"),
        (["serve", "--nope"], 2, "FlagsInvalid: unrecognized arguments: --nope"),
        (["serve", "--model", "/no/model.gguf"], 3, "ModelNotFound: /no/model.gguf does not exist"),
        (["serve", "--runner", "modelled"], 2, "FlagsInvalid: --profile is needed"),
        (["serve", "--runner", "modelled", "--profile", "abacus"], 2, "ProfileInvalid: there is no profile 'abacus'"),
        ([*MODELLED, "--max-model-len", "9999999"], 2, "FlagsInvalid: --max-model-len is 9999999"),
        ([*MODELLED, "--max-num-seqs", "0"], 2, "FlagsInvalid: argument --max-num-seqs"),
        ([*MODELLED, "--max-num-seqs", "900", "--max-num-batched-tokens", "512"], 2, "SettingsInvalid: "),
        ([*MODELLED, "--port", "99999"], 2, "FlagsInvalid: argument --port"),
        ([*MODELLED, "--shutdown-timeout", "-1"], 2, "FlagsInvalid: argument --shutdown-timeout"),
        ([*MODELLED, "--config-dir", "/nowhere"], 2, "SettingsInvalid: /nowhere/settings.json cannot be read"),
        ([*TORCH, "--precision", "int9"], 2, "FlagsInvalid: the precision 'int9' is unknown"),
        ([*TORCH, "--kv-cache-dtype", "fp4"], 2, "FlagsInvalid: argument --kv-cache-dtype"),
        ([*TORCH, "--dtype", "int8"], 2, "FlagsInvalid: argument --dtype"),
        ([*TORCH, "--quantization", "bitsandbytes"], 2, "FlagsInvalid: --quantization bitsandbytes is not supported"),
        ([*TORCH, "--quantization", "fp8", "--precision", "int8"], 2, "FlagsInvalid: --quantization and --precision"),
        ([*MODELLED, "--speculative-config", "{}"], 2, "FlagsInvalid: --speculative-config needs --runner torch"),
        ([*TORCH, "--speculative-config", "{"], 2, "FlagsInvalid: --speculative-config: Expecting property name"),
        ([*TORCH, "--speculative-config", '{"method": "eagle"}'], 2, "FlagsInvalid: --speculative-config: the method"),
        (["bake"], 2, "FlagsInvalid: "),
    ],
)
def test_a_failure_is_one_sentence_on_stderr_and_in_the_termination_message(
    flags: list[str], code: int, sentence: str, termination_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(flags) == code
    printed = capsys.readouterr().err.strip()
    assert printed.startswith(sentence)
    assert "\n" not in printed
    assert termination_log.read_text() == printed


def settings_json(**changes: object) -> str:
    file = SettingsFile(1, BatchSettings(64, 4096, 1024), Envelope(), DEFAULT_PATTERNS)
    return json.dumps({**settings_file_dict(file), **changes})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "is missing"),
        (settings_json(settings=BatchSettings(900, 4096, 1024).as_dict()), "max_num_seqs is 900; allowed are 1 to 256"),
        (settings_json(generation="x"), "generation"),
    ],
)
def test_a_wrong_settings_file_is_refused_with_what_is_wrong(
    text: str, sentence: str, tmp_path: Path, termination_log: Path
) -> None:
    (tmp_path / "settings.json").write_text(text)
    assert cli.main([*MODELLED, "--config-dir", str(tmp_path)]) == 2
    assert termination_log.read_text().startswith("SettingsInvalid: ")
    assert sentence in termination_log.read_text()


def test_a_port_that_is_taken_is_named_before_the_model_is_loaded(termination_log: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main([*MODELLED, "--host", "127.0.0.1", "--port", str(port)]) == 2
    assert termination_log.read_text().startswith(f"PortUnavailable: 127.0.0.1:{port} cannot be used")


@pytest.mark.parametrize(
    ("flags", "most"),
    [([], 8 * 256), (["--max-num-seqs", "300"], 8 * 300), (["--max-num-queued-reqs", "5"], 5)],
)
def test_the_queue_has_an_end_also_when_no_flag_says_where(
    flags: list[str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[serve.ServeOptions] = []

    def run(options: serve.ServeOptions, _: serve.Model) -> int:
        taken.append(options)
        return 0

    monkeypatch.setattr(serve, "run", run)
    assert cli.main([*MODELLED, *flags]) == 0
    assert [options.policy.max_num_queued_reqs for options in taken] == [most]


def test_without_a_termination_log_none_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "absent"
    monkeypatch.setattr(cli, "TERMINATION_LOG", path)
    assert cli.main(["serve"]) == 2
    assert not path.exists()


def test_profiles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("h100-llama-3.1-8b ") and "H100" in line for line in lines)


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--runner", "--profile", "--admin-keys", "--liveness-stall-seconds"))


def test_the_modelled_path_imports_no_model_library() -> None:
    program = (
        "import sys\n"
        "import tidegate_engine.serve, tidegate_engine.modelled_runner, tidegate_engine.cli\n"
        "print(sorted({'torch', 'gguf', 'numpy', 'tokenizers', 'jinja2', 'triton', 'llguidance'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model-path", "x"], "--model-path is a flag of another engine: use --model"),
        (["--chunked-prefill-size", "512"], "use --long-prefill-token-threshold"),
        (["-np", "4"], "use --max-num-seqs"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size needs --runner torch"),
        (["--prefix-caching-hash-algo", "builtin"], "can be sha256 only, not builtin"),
        (["--tool-call-parser", "pythonic"], "invalid choice: 'pythonic'"),
        (["--context-policy", "shift"], "invalid choice: 'shift'"),
    ],
)
def test_a_flag_with_another_name_here_is_refused_with_what_to_use(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*MODELLED, *flags]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("FlagsInvalid: ") and sentence in printed


def test_a_flag_without_a_meaning_here_is_accepted_with_one_warning(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    habits = ["--seed", "0", "--enforce-eager", "--gpu-memory-utilization", "0.9", "--tensor-parallel-size", "1",
              "--prefix-caching-hash-algo", "sha256", "--enable-auto-tool-choice", "--trust-remote-code"]  # fmt: skip
    # The folder is looked at after all flags were read.
    assert cli.main([*MODELLED, *habits, "--config-dir", "/nowhere"]) == 2
    assert "SettingsInvalid" in capsys.readouterr().err
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.split()[0] for line in warned] == [
        "--seed", "--gpu-memory-utilization", "--trust-remote-code",
    ]  # fmt: skip
