"""The chat in the terminal: with a server by URL and with an engine here, in a pipe and on a terminal."""

import asyncio
import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidegate_engine.byte_tokenizer import ByteTokenizer
from tidegate_engine.cli import main
from tidegate_engine.serve import Model, Process
from tidegate_engine.steptime import Profile
from tidegate_engine.terminal_chat import ChatError, LocalBackend, Message, Piece, UrlBackend, run_chat

StartEngine = Callable[..., Awaitable[Process]]
MakeScript = Callable[..., Any]


class Parrot:
    """Says what it was told, and how much of the conversation it knows."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.interrupts = False

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        self.asked.append(list(messages))
        said = messages[-1]["content"]
        if said == "fail":
            raise ChatError("no such luck")
        yield Piece(thought="hm")
        yield Piece(f"{len(messages)}:")
        if self.interrupts:
            raise KeyboardInterrupt
        yield Piece(said)

    def close(self) -> None:
        return


def chat(backend: Any, text: str, **options: Any) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a chat with these lines."""
    out, notes = io.StringIO(), io.StringIO()
    chosen: dict[str, Any] = {"system": None, "message": None, **options}
    code = run_chat(backend, streams=(io.StringIO(text), out, notes), **chosen)
    return code, out.getvalue(), notes.getvalue()


def test_each_line_is_a_message_and_the_conversation_is_kept() -> None:
    code, out, notes = chat(Parrot(), "one\n\ntwo\n")
    assert (code, out, notes) == (0, "1:one\n3:two\n", ""), "thoughts are for terminals"


def test_commands_change_the_conversation_and_go_to_nobody() -> None:
    parrot = Parrot()
    code, out, notes = chat(parrot, "/system Be brief.\none\n/reset\ntwo\n/nothing\n/help\n/quit\nthree\n", system="S")
    assert (code, out) == (0, "2:one\n2:two\n")
    assert parrot.asked[1] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"}]
    assert "forgotten" in notes and "/nothing is unknown" in notes and "Ctrl-C" in notes


def test_an_interrupt_ends_the_answer_and_keeps_what_was_said_of_it() -> None:
    parrot = Parrot()
    parrot.interrupts = True
    code, out, notes = chat(parrot, "one\ntwo\n")
    assert (code, out) == (0, "1:\n3:\n") and notes == "stopped\nstopped\n"
    assert parrot.asked[1][1] == {"role": "assistant", "content": "1:"}


def test_a_failure_is_told_and_not_remembered() -> None:
    parrot = Parrot()
    code, out, notes = chat(parrot, "fail\none\n")
    assert (code, out, notes) == (0, "1:one\n", "Error: no such luck\n")
    assert chat(parrot, "", message="fail")[0] == 1
    assert chat(parrot, "unread", message="one")[:2] == (0, "1:one\n")


async def in_thread(engine: Process, text: str, **fields: Any) -> tuple[int, str, str]:
    def run() -> tuple[int, str, str]:
        url = f"127.0.0.1:{engine.api_port}"
        return chat(UrlBackend(url, api_key="k", model=None, fields={"max_completion_tokens": 40, **fields}), text)

    return await asyncio.to_thread(run)


async def test_a_server_by_its_url(start_engine: StartEngine, make_script: MakeScript) -> None:
    runner = make_script("<think>so</think>High at noon.", ends=True)
    engine = await start_engine(runner=runner, reasoning_parser="qwen3", api_keys=("k",))
    assert await in_thread(engine, "When?\nSure?\n") == (0, "High at noon.\nHigh at noon.\n", "")
    assert runner.prompts[1].startswith("<user>\nWhen?\n<assistant>\nHigh at noon.\n<user>\nSure?\n")
    code, out, notes = await in_thread(engine, "When?\n", temperature=9)
    assert (code, out) == (1, "") and "temperature" in notes and "400" in notes


async def test_a_server_that_is_not_there_or_not_ours_is_told() -> None:
    with pytest.raises(ChatError, match="does not answer"):
        await asyncio.to_thread(UrlBackend, "127.0.0.1:1", api_key=None, model=None, fields={})
    with pytest.raises(ChatError, match="no address"):
        UrlBackend("ftp://host", api_key=None, model=None, fields={})


def test_an_engine_in_this_process_answers_fails_and_is_stopped_early(
    make_script: MakeScript, fast_profile: Profile
) -> None:
    slow = replace(fast_profile, step=replace(fast_profile.step, base_seconds=0.005))
    runner = make_script("High at noon, low at six.", profile=slow)
    model = Model(lambda: (runner, None), ByteTokenizer)
    backend = LocalBackend(model, reasoning_parser=None, fields={"max_completion_tokens": 6})
    try:
        assert chat(backend, "When?\n") == (0, "High at noon, low at six\n", "")
        pieces = backend.answer([{"role": "user", "content": "x"}])
        assert next(pieces).text
        assert hasattr(pieces, "close")
        pieces.close()
        code, out, notes = chat(backend, "x" * 4000 + "\n")
        assert (code, out) == (1, "") and "512" in notes, "both numbers of a message that is too long"
        assert chat(backend, "When?\n")[0] == 0
    finally:
        backend.close()


def test_the_real_model_answers_in_a_pipe(real_model_path: Path) -> None:
    command = [
        sys.executable, "-m", "tidegate_engine.cli", "chat", str(real_model_path), "--temperature", "0",
        "--max-tokens", "8", "--num-gpu-blocks-override", "40",
    ]  # fmt: skip
    done = subprocess.run(
        command, input="What is the capital of France?\n/quit\n", capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "loading" in done.stderr


async def test_ctrl_c_on_a_terminal_stops_the_answer_and_not_the_program(
    start_engine: StartEngine, make_script: MakeScript, fast_profile: Profile
) -> None:
    slow = replace(fast_profile, step=replace(fast_profile.step, base_seconds=0.3))
    engine = await start_engine(runner=make_script("tide after tide, ", profile=slow))
    master, slave = pty.openpty()
    command = ("-m", "tidegate_engine.cli", "chat", "--url", f"http://127.0.0.1:{engine.api_port}")
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    shown = b""

    async def read_until(wanted: bytes) -> None:
        nonlocal shown
        async with asyncio.timeout(120):
            while wanted not in shown:
                shown += await asyncio.to_thread(os.read, master, 4096)

    try:
        await read_until(b"> ")
        os.write(master, b"go on\n")
        await read_until(b"tide after tide")
        child.send_signal(signal.SIGINT)
        await read_until(b"stopped")
        shown = shown.partition(b"stopped")[2]
        await read_until(b"> ")
        assert engine.state.loaded is not None
        client = engine.state.loaded.engine
        async with asyncio.timeout(20):
            while client.unfinished:  # noqa: ASYNC110  # another task changes it
                await asyncio.sleep(0.01)
        os.write(master, b"/quit\n")
        assert await asyncio.wait_for(child.wait(), 60) == 0
    finally:
        if child.returncode is None:
            child.kill()
        os.close(master)


@pytest.mark.parametrize("arguments", [[], ["model.gguf", "--url", "http://x"], ["--url", "ftp://x"], ["missing.gguf"]])
def test_wrong_flags_are_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *arguments]) in (2, 3)
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert ": " in last


@pytest.fixture
def real_model_path() -> Path:
    from tidegate_local import model

    return model.path()
