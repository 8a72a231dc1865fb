"""The simulator beside our own engine over HTTP: the same requests, mean and 95th percentile of TTFT and TPOT.

Run as a script: a real server process with the modelled runner and a slow profile, so that the host's time hardly
counts, and a load of some minutes from this process; then the same lengths at the same moments in virtual time.

    python tests/bench/check_against_server.py [SECONDS]
"""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from random import Random
from urllib.error import URLError
from urllib.request import urlopen

from tidegate_engine.bench import LoadOptions, Record, Server, run_load, scale_of
from tidegate_engine.load_client import Endpoint, open_session
from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import Profile, StepModel, load_profile
from tidegate_engine.workload import PlannedRequest, made_up, parse_lengths, poisson
from tidegate_sim.arrivals import Arrival
from tidegate_sim.controller import FleetView, Order
from tidegate_sim.results import quantile
from tidegate_sim.simulation import simulate
from tidegate_sim.specification import FleetSpec

GOAL = 0.05
SECONDS = 240.0
RATE = 1.1
SETTINGS = BatchSettings(max_num_seqs=24, max_num_batched_tokens=512, long_prefill_token_threshold=256)
SLOW = StepModel(
    base_seconds=0.1,
    threshold_tokens=32,
    token_seconds=5e-4,
    kv_token_seconds=2e-6,
    sequence_seconds=4e-4,
    attention_seconds=4e-8,
    mixed_kv_token_seconds=1e-6,
)


class One:
    """One replica, always."""

    name = "one"
    period_seconds = 60.0

    def decide(self, view: FleetView) -> Order:
        return Order(1)


def slow_profile() -> Profile:
    other = load_profile("h100-llama-3.1-8b")
    source = dict.fromkeys(other.source, "made up for this check")
    start = {"weights": 0.0, "warmup": 0.0}
    return replace(
        other, name="slow", step=SLOW, kv_blocks=3000, max_model_len=4096, source=source, start_seconds=start
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def serve(folder: Path, profile: Profile, port: int) -> subprocess.Popen[bytes]:
    path = folder / "slow.json"
    path.write_text(json.dumps(asdict(profile)))
    command = [sys.executable, "-m", "tidegate_engine.cli", "serve", "--runner", "modelled", "--profile", str(path)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--admin-port", str(free_port())]
    command += ["--endpoint-removal-seconds", "0", "--max-num-seqs", str(SETTINGS.max_num_seqs)]
    command += ["--max-num-batched-tokens", str(SETTINGS.max_num_batched_tokens)]
    command += ["--long-prefill-token-threshold", str(SETTINGS.long_prefill_token_threshold)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def wait_until_served(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.1)
    raise SystemExit("the server ended before it served")


def planned(seconds: float) -> list[PlannedRequest]:
    rng = Random(7)
    lengths = parse_lengths("lognormal:220,0.7"), parse_lengths("lognormal:60,0.6")
    found = made_up(*lengths, arrivals=poisson(RATE, burstiness=0.5, rng=rng), rng=Random(8))
    return [each for each in takewhile(lambda each: each.at_seconds < seconds, found) if each.input_tokens < 3000]


async def measure(port: int, requests: Sequence[PlannedRequest]) -> list[Record]:
    endpoint = Endpoint(f"http://127.0.0.1:{port}", "slow", timeout_seconds=600.0)
    async with open_session(endpoint, keep_alive=True) as session:
        server = Server(endpoint, session)
        scale = await scale_of(server, seed=0)
        run = await run_load(server, iter(requests), LoadOptions(), scale=scale, stop=asyncio.Event())
    return run.records


def figures(ttft: Sequence[float], tpot: Sequence[float]) -> dict[str, float]:
    return {
        "ttft_mean": sum(ttft) / len(ttft),
        "ttft_p95": quantile(sorted(ttft), 0.95),
        "tpot_mean": sum(tpot) / len(tpot),
        "tpot_p95": quantile(sorted(tpot), 0.95),
    }


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    profile, port = slow_profile(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = serve(Path(folder), profile, port)
        try:
            wait_until_served(port, process)
            records = asyncio.run(measure(port, planned(seconds)))
        finally:
            process.terminate()
            process.wait(timeout=60)
    failed = [record.answer.failure for record in records if record.answer.failure is not None]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with {failed[0]}")
    records.sort(key=lambda record: record.due_seconds)
    answers = [record.answer for record in records]
    served = [
        (answer.ttft_seconds, answer.e2e_seconds, answer.output_tokens, answer.prompt_tokens)
        for answer in answers
        if answer.ttft_seconds and answer.e2e_seconds and answer.output_tokens and answer.prompt_tokens
    ]
    real = figures(
        [ttft for ttft, _, _, _ in served],
        [(e2e - ttft) / (tokens - 1) for ttft, e2e, tokens, _ in served if tokens > 1],
    )
    workload = [Arrival(record.due_seconds, isl, osl) for record, (_, _, osl, isl) in zip(records, served, strict=True)]
    result = simulate(workload, FleetSpec(profile, settings=SETTINGS, initial_replicas=1), One())
    simulated = figures(list(result.records.ttft), [itl for itl in result.records.itl if itl == itl])
    errors = {name: simulated[name] / real[name] - 1 for name in real}
    lag = quantile(sorted(record.lag_seconds for record in records), 0.95)
    print(
        f"{len(records)} requests in {seconds:.0f} s; 95 % were sent within {1000 * lag:.0f} ms of when they were due"
    )
    for name, error in errors.items():
        print(f"  {name:10} over HTTP {real[name]:7.4f} s, simulated {simulated[name]:7.4f} s: {100 * error:+.1f} %")
    worst = max(map(abs, errors.values()))
    print(json.dumps({"check": "server", "goal": GOAL, "worst": worst, "real": real, "simulated": simulated}))


if __name__ == "__main__":
    main()
