"""CPU time that the engine's host side takes for a streamed token, from scheduler to socket, beside the goal of 250 µs.

Run as a script: a real server process with the modelled runner (1 ms a step), clients in this one; a line to read for
each number of streams, then one JSON line.
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

from tidegate_engine.steptime import TERMS, Profile, StepModel

GOAL_MICROSECONDS = 250.0
TOKENS = 400
STREAMS = (1, 8, 64)
STEP_SECONDS = 0.001


def write_profile(folder: Path) -> Path:
    """A GPU that takes a millisecond for any step."""
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
        kv_blocks=10_001,
        block_tokens=16,
        max_model_len=4096,
        start_seconds={"weights": 0.0, "warmup": 0.0},
        step=StepModel(**{**dict.fromkeys(TERMS, 0.0), "base_seconds": STEP_SECONDS}),
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


async def read_stream(port: int) -> None:
    """One streamed completion, read to its end."""
    body = json.dumps({"model": "bench", "prompt": "the tide " * 20, "max_tokens": TOKENS, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    data = await reader.read()
    writer.close()
    if b"data: [DONE]" not in data:
        raise RuntimeError(f"the stream did not end: {data[-200:]!r}")


async def measure(port: int, pid: int, streams: int) -> dict[str, float]:
    """Tokens per second, and the server's CPU time per token."""
    cpu_before, began = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(read_stream(port) for _ in range(streams)))
    seconds, cpu = time.perf_counter() - began, cpu_seconds(pid) - cpu_before
    tokens = streams * TOKENS
    return {"streams": streams, "tokens_per_second": tokens / seconds, "cpu_microseconds_per_token": cpu / tokens * 1e6}


def wait_until_served(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the server ended before it served")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        port, admin_port = free_port(), free_port()
        command = [sys.executable, "-m", "tidegate_engine.cli", "serve", "--runner", "modelled"]
        command += ["--profile", str(write_profile(Path(folder))), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--admin-port", str(admin_port), "--endpoint-removal-seconds", "0"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_until_served(port, process)
            asyncio.run(measure(port, process.pid, 4))  # first calls compile and cache
            rows = [asyncio.run(measure(port, process.pid, streams)) for streams in STREAMS]
        finally:
            process.terminate()
            process.wait(timeout=30)
    for row in rows:
        share = row["tokens_per_second"] * STEP_SECONDS / row["streams"]
        cpu = row["cpu_microseconds_per_token"]
        print(
            f"{row['streams']:4.0f} streams: {row['tokens_per_second']:7.0f} tokens/s "
            f"({share:.2f} of the modelled rate), {cpu:5.0f} µs CPU a token ({cpu / GOAL_MICROSECONDS:.2f} of the goal)"
        )
    print(json.dumps({"bench": "server", "goal_microseconds": GOAL_MICROSECONDS, "rows": rows}))


if __name__ == "__main__":
    main()
