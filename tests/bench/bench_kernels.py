"""Products with 4-bit groups by compiled code and with the same values in fp32 by torch, interleaved, on one thread.

By rows of activations: the ratio of CPU time, which others disturb less, with GFLOP/s and GB/s of weights beside
what reading memory alone gives. Prints a JSON line and a table.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from tidegate_kernels import native
from tidegate_kernels.quantised import quantise_groups
from tidegate_kernels.weight import Dense, linear

SHAPE = (49152, 576)
"""Of SmolLM2's head: with its scales 18 MB in four bits."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    packed = quantise_groups(torch.randn(SHAPE), bits=4, group=32)
    ours, theirs = native.laid_out(packed), Dense(packed.dequantised()).laid_out()
    results = []
    for rows in ROWS:
        x = torch.randn(rows, SHAPE[1])
        own, other = interleaved(partial(linear, x, ours), partial(linear, x, theirs), rounds)
        results.append(
            {
                "rows": rows,
                "ratio": round(statistics.median(b / a for a, b in zip(own, other, strict=True)), 2),
                "gflops": round(2 * rows * SHAPE[0] * SHAPE[1] / statistics.median(own) * 1e-9, 1),
                "weights_gb_per_second": round(packed.size_bytes / statistics.median(own) * 1e-9, 1),
            }
        )
    memory = torch.ones(64 << 20)
    reading, _ = interleaved(memory.sum, memory.sum, rounds)
    bandwidth = round(memory.nbytes / statistics.median(reading) * 1e-9, 1)
    library = native.library()
    name = library.name if library else "none, torch"
    print(json.dumps({"bench": "kernels", "library": name, "read_gb_per_second": bandwidth, "products": results}))
    print(f"library {name}; reading memory: {bandwidth} GB/s a thread")
    print("| rows | of torch's fp32 | GFLOP/s | GB/s of weights |")
    print("|---|---|---|---|")
    for found in results:
        print(f"| {found['rows']} | {found['ratio']} | {found['gflops']} | {found['weights_gb_per_second']} |")


def interleaved(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """CPU seconds of both, in turn; a first round is thrown away."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for work, spent in zip((first, second), seconds, strict=True):
            started = time.thread_time()
            work()
            spent.append(time.thread_time() - started)
    return seconds[0][1:], seconds[1][1:]


if __name__ == "__main__":
    main()
