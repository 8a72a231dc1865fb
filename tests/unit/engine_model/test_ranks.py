"""A model split over processes behind the HTTP server: the same tokens, and an end that everybody is told of."""

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from tidegate_engine import cli
from tidegate_engine.engine import Engine
from tidegate_engine.engine_client import EngineClient, EngineGone
from tidegate_engine.engine_host import host_engine
from tidegate_engine.model_part import Work, packed, unpacked
from tidegate_engine.ranks import RankEnd, Team, start_ranks
from tidegate_engine.request import Window
from tidegate_engine.weights import ModelError
from tidegate_kernels.reference import Cache, in_other_tables, ragged_batch

READY_SECONDS = 120
PROMPTS = ("the theory", "in the inn", "x")
FIELDS = {"model": "even", "max_tokens": 12, "ignore_eos": True}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A `tidegate-engine serve` that is ready."""
    port = free_port()
    command = [sys.executable, "-m", "tidegate_engine.cli", "serve", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--admin-port", str(free_port()), "--num-gpu-blocks-override", "40", *flags]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    try:
        until = time.monotonic() + READY_SECONDS
        while not _answers(client):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield process, client
    finally:
        client.close()
        process.kill()
        process.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def texts_of(client: httpx.Client) -> list[str]:
    """Greedy ones, and one that is drawn."""
    found = []
    for prompt, wish in zip(
        PROMPTS, ({"temperature": 0}, {"temperature": 0}, {"temperature": 1, "seed": 3}), strict=True
    ):
        answer = client.post("/v1/completions", json={**FIELDS, **wish, "prompt": prompt})
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["text"])
    return found


def test_two_ranks_answer_as_one_does_and_when_one_dies_the_server_ends_and_says_which(
    even_model: Path, tmp_path: Path
) -> None:
    with serving(even_model, tmp_path / "one.log") as (_, client):
        expected = texts_of(client)
    with serving(even_model, tmp_path / "two.log", "--tensor-parallel-size", "2") as (process, client):
        assert texts_of(client) == expected
        (engine,) = children_of(process.pid)
        (rank,) = children_of(engine)
        os.kill(rank, signal.SIGKILL)
        assert process.wait(timeout=60) == 1
    log = (tmp_path / "two.log").read_text()
    assert "EngineFailed: rank 1 of 2 ended: signal SIGKILL" in log
    assert not Path(f"/proc/{engine}").exists() or not children_of(engine)
    assert len(set(expected)) == len(expected)


def test_a_model_that_ranks_cannot_share_is_refused_by_name(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "tidegate_engine.cli", "serve", "--model", str(tiny_model), "--port", "0"]
    command += ["--admin-port", "0", "--host", "127.0.0.1", "--tensor-parallel-size", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=READY_SECONDS)
    assert run.returncode == 3
    assert "TensorParallelUneven: " in run.stderr.splitlines()[-1] and "9 heads" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("flag", [("--enable-lora",), ("--kv-offload-bytes", "1000000")])
def test_what_a_split_model_does_not_have_is_refused(flag: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model", "model.gguf", *flag, "-tp", "2"]) == 2
    assert f"{flag[0]} needs --tensor-parallel-size 1" in capsys.readouterr().err


@pytest.fixture
def lost() -> "queue.SimpleQueue[tuple[str | None, str]]":
    return queue.SimpleQueue()


def watched(follow: Callable[[RankEnd], None], lost: "queue.SimpleQueue[tuple[str | None, str]]") -> Team:
    team = start_ranks(3, follow, foreign=())
    team.watch(lambda reason, message: lost.put((reason, message)))
    return team


def wait_for_orders(end: RankEnd) -> None:
    while (order := end.receive()) is not None:
        if order[0] == "fail" and end.rank == 2:
            raise ModelError("TooLarge", "no room") if order[1] else ZeroDivisionError("made up")
        if order[0] == "die" and end.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # is ignored
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (("fail", False), (None, "rank 2 of 3 failed: ZeroDivisionError: made up")),
        (("fail", True), ("TooLarge", "rank 2 of 3 cannot have its part: no room")),
        (("die", None), (None, "rank 1 of 3 ended: signal SIGKILL")),
    ],
)
def test_the_end_of_a_rank_is_told_with_its_cause(
    order: tuple[str, object], expected: tuple[str | None, str], lost: "queue.SimpleQueue[tuple[str | None, str]]"
) -> None:
    team = watched(wait_for_orders, lost)
    team.tell(*order)
    assert lost.get(timeout=60) == expected


def test_a_step_that_this_rank_did_not_finish_is_the_end_too(
    lost: "queue.SimpleQueue[tuple[str | None, str]]",
) -> None:
    watched(wait_for_orders, lost).give_up("rank 0 of 3 failed: out of memory")
    assert lost.get(timeout=60) == (None, "rank 0 of 3 failed: out of memory")


async def test_a_rank_that_is_lost_while_the_model_is_loaded_is_said_at_once() -> None:
    """The first rank waits for the others in the middle of it, which never come."""
    team, is_over = start_ranks(2, wait_for_orders, foreign=()), threading.Event()

    def load() -> Engine:
        team.tell("die")
        is_over.wait(60)
        raise AssertionError("nobody ended it")

    end, other = socket.socketpair()
    hosting = asyncio.create_task(host_engine(other, load, team))
    try:
        with pytest.raises(EngineGone, match="could not be loaded: rank 1 of 2 ended: signal SIGKILL"):
            await EngineClient.connect(end, process=None)
        await hosting
    finally:
        is_over.set()


def test_a_step_crosses_whole() -> None:
    cache = Cache(torch.zeros(9, 1, 16, 4), torch.zeros(9, 1, 16, 4))
    batch = ragged_batch([3, 1], [20, 5], [[1, 2], [3]], cache=cache, views=[Window(4, 1), None])
    batch = in_other_tables(batch, [[4, 5], [6]])
    work = Work(torch.arange(4), batch, torch.tensor([2, 3]), [2, 3], wants_states=True)
    facts, arrays = packed(work)
    found = unpacked(facts, arrays)
    assert (found.begun_blocks, found.wants_states, found.batch.counts) == ([2, 3], True, ([3, 1], [20, 5]))
    assert found.batch.views == [(4, 1), None] and found.batch.block_tokens == 16
    for name in ("query_starts", "kv_lengths", "block_tables", "positions", "slots", "view_table"):
        assert torch.equal(getattr(found.batch, name), getattr(batch, name)), name
    assert torch.equal(found.token_ids, work.token_ids) and torch.equal(found.logits_rows, work.logits_rows)
