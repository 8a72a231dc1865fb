"""The largest rate of one replica as `capacity` predicts it, beside the one that the engine's scheduler carries.

Prints a line for each mix, targets and settings, and how many predictions lie within 15 %. One line takes some seconds.
"""

import argparse
import time

from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import Profile, load_profile, profile_names
from tidegate_operator.capacity import Targets, capacity_of, scenario
from tidegate_operator.mix import Cell, Mix
from tidegate_operator.observation import EngineInfo
from tidegate_sim.saturation import Lengths, Replica, largest_rate, requests_of

MIXES: dict[str, tuple[Lengths, int]] = {
    "chat": (((1.0, 1000, 250),), 1500),
    "rag": (((1.0, 8000, 200),), 1000),
    "reasoning": (((1.0, 300, 2000),), 700),
    "mixed": (((0.55, 1000, 250), (0.2, 8000, 200), (0.05, 300, 2000), (0.2, 200, 100)), 1500),
}
"""Kinds of requests, and how many it takes to see the 95th percentile at rest."""
TARGETS = {
    "1 s, 50 ms": Targets(1.0, 0.05),
    "1 s": Targets(1.0),
    "3 s, 100 ms": Targets(3.0, 0.1),
    "2 s, 30 ms": Targets(2.0, 0.03),
    "8 s, 200 ms": Targets(8.0, 0.2),
}
SETTINGS = tuple(
    BatchSettings(*figures)
    for figures in ((64, 4096, 1024), (128, 2048, 512), (256, 8192, 8192), (32, 1024, 256), (16, 4096, 2048))
)
TOLERANCE = 0.15


def engine_of(profile: Profile) -> EngineInfo:
    return EngineInfo(
        kv_blocks=profile.kv_blocks,
        block_tokens=profile.block_tokens,
        max_model_len=profile.max_model_len,
        kv_token_bytes=profile.kv_token_bytes,
        weight_bytes=profile.weight_bytes,
        gpu_product=profile.gpu,
        gpu_count=profile.gpus,
        version="bench",
        step_model=profile.step,
        step_model_residual_ratio=None,
        step_model_samples=None,
    )


def compare(profile: Profile, mix: str, *, targets: Targets, settings: BatchSettings, seed: int) -> float | None:
    """Predicted over simulated, less one; None when an idle replica misses a target already. Prints it."""
    lengths, count = MIXES[mix]
    cells = tuple(Cell(share, isl, osl, 0, 0) for share, isl, osl in lengths)
    scene = scenario(profile.step, engine_of(profile), mix=Mix(1.0, cells), targets=targets)
    assert scene is not None
    capacity = capacity_of(scene, settings)
    if capacity.unreachable:
        print(f"out of reach for an idle replica: {', '.join(capacity.unreachable)}")
        return None
    replica = Replica(profile.step, profile.kv_blocks, profile.block_tokens, profile.max_model_len, settings)
    predicted, began = capacity.requests_per_second, time.perf_counter()
    requests = requests_of(lengths, count=count, seed=seed)
    real = largest_rate(replica, requests, targets=targets, between=(0.4 * predicted, 2.5 * predicted))
    seconds = time.perf_counter() - began
    error = predicted / real - 1
    print(f"{predicted:8.3f} {real:8.3f} {error:+5.0%}  {capacity.bottleneck:8} {seconds:5.1f} s", flush=True)
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=profile_names(), action="append")
    parser.add_argument("--mix", choices=list(MIXES), action="append")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    errors = []
    for name in options.profile or ["h100-llama-3.1-8b"]:
        for mix in options.mix or list(MIXES):
            for words, targets in TARGETS.items():
                for settings in SETTINGS:
                    shown = "/".join(map(str, settings.as_dict().values()))
                    print(f"{name:18.18} {mix:10} {words:12} {shown:14}", end=" ")
                    error = compare(load_profile(name), mix, targets=targets, settings=settings, seed=options.seed)
                    errors += [] if error is None else [abs(error)]
    within = sum(error <= TOLERANCE for error in errors)
    print(f"{within} of {len(errors)} within {TOLERANCE:.0%}; on average {sum(errors) / len(errors):.1%}")


if __name__ == "__main__":
    main()
