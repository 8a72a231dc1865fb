"""CPU time that the engine's host side takes for a streamed token, from scheduler to socket, beside the goal of 100 µs.

Run as a script: real server processes with the modelled runner, clients in this one; a line to read for each number of
streams, then one JSON line. Up to 64 streams a step takes 1 ms, so that the host is what limits; 500 streams get a
token each every 40 ms, 12,500 in a second, and the host has to keep up.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import cast

import uvloop

from tidegate_engine.steptime import TERMS, Profile, StepModel

GOAL_MICROSECONDS = 100.0
GOAL_TOKENS_PER_SECOND = 10_000
CASES = ((0.001, (1, 8, 64)), (0.040, (500,)))
"""Seconds of a step, and numbers of streams."""
TOKENS = 400
BODY = {"model": "bench", "prompt": "the tide " * 20, "max_tokens": TOKENS, "stream": True}


def write_profile(folder: Path, step_seconds: float) -> Path:
    """A GPU that takes so long for any step."""
    profile = Profile(
        name="bench",
        gpu="none",
        gpus=1,
        model="bench",
        layers=1,
        kv_heads=1,
        head_size=64,
        vocab_size=256,
        weight_dtype="float32",
        kv_dtype="float32",
        weight_bytes=1,
        kv_token_bytes=1,
        kv_blocks=30_001,
        block_tokens=16,
        max_model_len=4096,
        start_seconds={"weights": 0.0, "warmup": 0.0},
        step=StepModel(**{**dict.fromkeys(TERMS, 0.0), "base_seconds": step_seconds}),
        source=dict.fromkeys(TERMS, "made up for this benchmark"),
    )
    path = folder / "bench.json"
    path.write_text(json.dumps(asdict(profile)))
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """Of the server's process and of the engine's, its child."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ticks = 0
    for each in (str(pid), *children):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Stream(asyncio.Protocol):
    """One streamed completion: counts its events as they come."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first_after: float | None = None
        self.events = 0
        self.tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = json.dumps(BODY).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        cast(asyncio.Transport, transport).write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        found = data.count(b"data: {")
        if found and self.first_after is None:
            self.first_after = time.perf_counter() - self.began
        self.events += found
        self.tail = (self.tail + data)[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(b"data: [DONE]" in self.tail)


async def measure(port: int, pid: int, streams: int) -> dict[str, float]:
    """Tokens per second, the server's CPU time per token, and the time to the first token."""
    loop = asyncio.get_running_loop()
    cpu_before, began = cpu_seconds(pid), time.perf_counter()
    opened = [await loop.create_connection(Stream, "127.0.0.1", port) for _ in range(streams)]
    made = [stream for _, stream in opened]
    whole = await asyncio.gather(*(stream.ended for stream in made))
    seconds, cpu = time.perf_counter() - began, cpu_seconds(pid) - cpu_before
    events = sum(stream.events for stream in made)
    first = sorted(stream.first_after or float("inf") for stream in made)
    return {
        "streams": streams,
        "broken": streams - sum(whole),
        "events_per_token": events / (streams * TOKENS),
        "tokens_per_second": events / seconds,
        "cpu_microseconds_per_token": cpu / (streams * TOKENS) * 1e6,
        "ttft_p99_seconds": first[int(0.99 * (streams - 1))],
    }


def wait_until_served(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the server ended before it served")


def serve_and_measure(folder: Path, step_seconds: float, numbers: tuple[int, ...]) -> list[dict[str, float]]:
    port, admin_port = free_port(), free_port()
    command = [sys.executable, "-m", "tidegate_engine.cli", "serve", "--runner", "modelled"]
    command += ["--profile", str(write_profile(folder, step_seconds)), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--admin-port", str(admin_port), "--endpoint-removal-seconds", "0"]
    command += ["--max-num-seqs", "512", "--max-num-batched-tokens", "16384", "--long-prefill-token-threshold", "1024"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until_served(port, process)
        asyncio.run(measure(port, process.pid, 4))  # first calls compile and cache
        rows = []
        for streams in numbers:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                row = runner.run(measure(port, process.pid, streams))
            # The step that runs when a request comes, and its own.
            rows.append(
                {**row, "step_seconds": step_seconds, "ttft_p99_added": row["ttft_p99_seconds"] - 2 * step_seconds}
            )
        return rows
    finally:
        process.terminate()
        process.wait(timeout=30)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for seconds, numbers in CASES for row in serve_and_measure(Path(folder), seconds, numbers)]
    for row in rows:
        share = row["tokens_per_second"] * row["step_seconds"] / row["streams"]
        cpu = row["cpu_microseconds_per_token"]
        print(
            f"{row['streams']:4.0f} streams: {row['tokens_per_second']:7.0f} tokens/s "
            f"({share:.2f} of the model's rate), {cpu:4.0f} µs CPU a token "
            f"({cpu / GOAL_MICROSECONDS:.2f} of the goal), "
            f"{row['events_per_token']:.3f} events a token, {row['broken']:.0f} broken, "
            f"{1000 * row['ttft_p99_added']:.0f} ms added to the first token at p99"
        )
    ratio = rows[-1]["tokens_per_second"] / GOAL_TOKENS_PER_SECOND
    print(json.dumps({"bench": "server", "goal_microseconds": GOAL_MICROSECONDS, "ratio_to_goal": ratio, "rows": rows}))


if __name__ == "__main__":
    main()
