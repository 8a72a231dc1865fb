"""The evaluation: every scenario under every policy, with several seeds, tuned on one workload and tested on others.

    python -m tidegate_sim.evaluation --data DIR --out docs/evaluation.md

Results are kept by a hash of all that they depend on, so that a run goes on where it was stopped and only what changed
is computed again. Owns the runs and the tuning; `matrix` holds what they found, `evaluation_report` writes it down.
"""

import argparse
import hashlib
import inspect
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from tidegate_engine.steptime import load_profile
from tidegate_sim import bounds, evaluation_report
from tidegate_sim.arrivals import Arrival
from tidegate_sim.baselines.plant import Plant
from tidegate_sim.baselines.schedule import Scheduled
from tidegate_sim.baselines.table import clairvoyant_schedule
from tidegate_sim.contenders import FIXED_CHOICES, Setup, contenders
from tidegate_sim.experiments import EXPERIMENTS
from tidegate_sim.matrix import Attempt, Figures, Matrix, Tuned, best_of
from tidegate_sim.results import Result
from tidegate_sim.scenarios import CLIENT_TIMEOUT_SECONDS, GOALS, PROFILE, Scenario, all_scenarios
from tidegate_sim.simulation import simulate
from tidegate_sim.sources import code_digest
from tidegate_sim.specification import FleetSpec, GatewaySpec, MetricsOutage, start_times

ATTAINMENT = 0.99
"""What tuning is for: the fewest GPU-hours that still serve so many requests in time."""
SEEDS = 5
TUNING_SEED = 0
WHOLE_DAY_SEEDS = 1
"""Of full replays: another seed is the same days, begun some minutes later."""
ORACLE = "oracle"
ORACLE_TRIES = 5
ORACLE_MARGINS = (0.0, 4.0)
LARGEST_BATCH = 256
"""Of the envelope that live settings may use: the bounds hold for them, too."""
AFTERMATH_SECONDS = ((0.0, 300.0), (300.0, 900.0))


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation."""

    scenario: str
    policy: str
    knob: float
    seed: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where traces and kept results lie."""

    data: Path | None
    cache: Path


def fleet_of(scenario: Scenario) -> FleetSpec:
    return FleetSpec(
        load_profile(PROFILE),
        initial_replicas=scenario.initial_replicas,
        settings=scenario.settings,
        start=start_times(scenario.start_seconds),
        gateway=GatewaySpec(timeout_seconds=CLIENT_TIMEOUT_SECONDS),
        faults=scenario.faults,
    )


@lru_cache(maxsize=4)
def _workload(scenario: str, data: Path | None, seed: int) -> Sequence[Arrival]:
    return all_scenarios()[scenario].build(data, seed)


def setup_of(scenario: Scenario, arrivals: Sequence[Arrival]) -> Setup:
    profile = load_profile(PROFILE)
    plant = Plant(
        step=profile.step,
        kv_tokens=profile.kv_blocks * profile.block_tokens,
        settings=scenario.settings,
        ttft_seconds=GOALS.ttft_seconds,
        itl_seconds=GOALS.itl_seconds,
        start_seconds=scenario.start_seconds,
        lowest_replicas=scenario.fixed_replicas or 1,
        highest_replicas=scenario.fixed_replicas or scenario.most_replicas,
    )
    return Setup(profile, plant, arrivals)


def run(job: Job, place: Place) -> Figures:
    """The figures of a simulation, from the cache when it was done before."""
    if job.scenario in EXPERIMENTS:
        key = code_digest(*EXPERIMENTS_CODE) + repr(asdict(job))
        path = place.cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        return _kept(path, job, lambda: EXPERIMENTS[job.scenario].run(job.policy, job.seed))
    scenario = all_scenarios()[job.scenario]
    arrivals = _workload(job.scenario, place.data, job.seed)
    fleet, setup = fleet_of(scenario), setup_of(scenario, arrivals)

    def simulated() -> Figures:
        if job.policy == ORACLE:
            return _oracle(scenario, fleet, setup, seed=job.seed)
        controller = contenders()[job.policy].make(setup, job.knob)
        return figures_of(simulate(arrivals, fleet, controller, seed=job.seed, goals=GOALS), scenario)

    return _kept(place.cache / f"{_digest(job, scenario, fleet, setup)}.json", job, simulated)


def _kept(path: Path, job: Job, simulated: Callable[[], Figures]) -> Figures:
    if path.exists():
        return dict(json.loads(path.read_text()))
    began = time.monotonic()
    figures = {**simulated(), "job": asdict(job), "took_seconds": round(time.monotonic() - began, 2)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(figures))
    partial.rename(path)
    return figures


def figures_of(result: Result, scenario: Scenario) -> dict[str, Any]:
    overall = result.overall
    costs = costs_of(scenario)
    needs = demand_of(result)
    attained = result.attainment or 0.0
    return {
        "requests": overall.arrived,
        "attainment": attained,
        "patterns": {name: service.attainment for name, service in result.patterns.items()},
        "outcomes": dict(overall.outcomes),
        "gpu_hours": result.gpu_hours,
        "goodput_per_second": result.goodput,
        "scalings_per_hour": result.scalings_per_hour,
        "reversals": result.reversals,
        "largest_step": result.largest_step,
        "settings_changes": len(result.retunings),
        "preemptions": result.preemptions,
        "ttft": asdict(overall.ttft),
        "itl": asdict(overall.itl),
        "lb0_hours": bounds.by_work(needs) / 3600,
        "lb1_hours": bounds.by_whole_replicas(needs) / 3600,
        "lb2_hours": bounds.with_starts(needs, costs) / 3600,
        "lbv_hours": bounds.with_misses(needs, costs, missed_share=1 - attained) / 3600,
        "blind_removals": _blind_removals(result),
        "events": [_aftermath(result, at) for at in scenario.events],
        "reasons": dict(result.reasons),
    }


def costs_of(scenario: Scenario) -> bounds.Costs:
    floor = scenario.fixed_replicas or 1
    return bounds.Costs(scenario.start_seconds, floor=floor, initial=max(floor, scenario.initial_replicas))


def demand_of(result: Result) -> list[float]:
    """The workload's, for the bounds, up to its end: what is done later costs no GPU that is counted."""
    records, profile = result.records, result.fleet.profile
    arrivals = [Arrival(*item) for item in zip(records.at, records.isl, records.osl, strict=True)]
    works = bounds.works_of(
        profile.step, largest_batch=LARGEST_BATCH, kv_tokens=profile.kv_blocks * profile.block_tokens
    )
    needs = bounds.demand(arrivals, works, itl_seconds=result.goals.itl_seconds)
    return needs[: math.ceil(result.duration_seconds / bounds.SLOT_SECONDS)]


def _aftermath(result: Result, at: float) -> dict[str, Any]:
    """What followed an event: the first minutes, and when all was well again."""
    services = [result.between(at + begin, at + end) for begin, end in AFTERMATH_SECONDS]
    recovered = result.recovered_at(at)
    return {
        "at": at,
        "ttft_p99": [service.ttft.p99 for service in services],
        "missed": [service.arrived - service.met for service in services],
        "recovered_after": None if recovered is None else recovered - at,
    }


def _blind_removals(result: Result) -> int:
    """Orders for fewer replicas while metrics were missing, stale or those of some pods alone."""
    outages = [fault for fault in result.fleet.faults if isinstance(fault, MetricsOutage)]
    return sum(
        change.after < change.before and outage.at_seconds <= change.at < outage.until_seconds
        for outage in outages
        for change in result.changes
    )


def _oracle(scenario: Scenario, fleet: FleetSpec, setup: Setup, *, seed: int) -> dict[str, Any]:
    """The smallest known-beforehand schedule that attains, found by bisecting its margin."""
    results: dict[float, Result] = {}

    def attempt(margin: float) -> bounds.Achieved:
        steps = clairvoyant_schedule(setup.plant, margin, setup.arrivals)
        begins = replace(fleet, initial_replicas=steps[0][1])
        result = results[margin] = simulate(setup.arrivals, begins, Scheduled(steps), seed=seed, goals=GOALS)
        return bounds.Achieved(margin, result.attainment or 0.0, result.gpu_seconds)

    low, high = ORACLE_MARGINS
    found = bounds.smallest(attempt, attainment=ATTAINMENT, low=low, high=high, tries=ORACLE_TRIES)
    margin = high if found is None else found.margin
    return {**figures_of(results[margin], scenario), "margin": margin}


# --- what a result depends on ----------------------------------------------------------------------------------------

SIMULATING = ("tidegate_sim.simulation", "tidegate_sim.bounds", "tidegate_sim.baselines.table")
OTHERS_CODE = SIMULATING, ("tidegate_sim", "tidegate_engine")
OWN_CODE = (*SIMULATING, "tidegate_sim.contenders"), ("tidegate_sim", "tidegate_engine", "tidegate_operator")
EXPERIMENTS_CODE = (*SIMULATING, "tidegate_sim.experiments"), OWN_CODE[1]
"""Modules, and the packages whose code counts: of the operator's, baselines use no more than the shape of a sample."""


def _digest(job: Job, scenario: Scenario, fleet: FleetSpec, setup: Setup) -> str:
    """By the workload and the fleet as they are, not by the code that made them."""
    own = job.policy in contenders() and contenders()[job.policy].own
    workload = hashlib.sha256()
    for each in setup.arrivals:
        workload.update(repr(each).encode())
    figuring = (figures_of, costs_of, demand_of, _aftermath, _blind_removals, _oracle)
    parts = [
        code_digest(*(OWN_CODE if own else OTHERS_CODE)),
        *(inspect.getsource(each) for each in figuring),
        repr((job.policy, job.knob, job.seed, fleet, setup.plant, scenario.events, GOALS, FIXED_CHOICES)),
        repr((ATTAINMENT, ORACLE_TRIES, ORACLE_MARGINS, LARGEST_BATCH, AFTERMATH_SECONDS)),
        workload.hexdigest(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


# --- many runs -------------------------------------------------------------------------------------------------------


def _run_quietly(item: tuple[Job, Place]) -> tuple[Job, Figures]:
    job, place = item
    return job, run(job, place)


def run_all(jobs: Iterable[Job], place: Place, *, processes: int) -> dict[Job, Figures]:
    """All of them, those of one workload one after the other; says how far it has come on stderr."""
    ordered = sorted(set(jobs), key=lambda job: (job.scenario, job.seed, job.policy, job.knob))
    found: dict[Job, Figures] = {}
    began, said = time.monotonic(), 0.0
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for job, figures in pool.imap_unordered(_run_quietly, [(job, place) for job in ordered]):
            found[job] = figures
            if time.monotonic() - said > 15 or len(found) == len(ordered):
                said = time.monotonic()
                print(f"  {len(found)} of {len(ordered)} runs, {said - began:.0f} s", file=sys.stderr, flush=True)
    return found


def tune_all(scenarios: Sequence[Scenario], policies: Sequence[str], place: Place, *, processes: int) -> list[Tuned]:
    """Each policy's knob on each training workload that a chosen scenario needs."""
    everyone, known = contenders(), all_scenarios()
    wanted = [
        (training, policy)
        for training in dict.fromkeys(scenario.training for scenario in scenarios)
        for policy in takes_part(known[training], policies)
        if any(policy in takes_part(each, policies) for each in scenarios if each.training == training)
    ]
    jobs = {
        (training, policy, knob): Job(training, policy, float(knob), TUNING_SEED)
        for training, policy in wanted
        for knob in everyone[policy].grid
    }
    found = run_all(jobs.values(), place, processes=processes)
    tuned = []
    for training, policy in wanted:
        sweep = []
        for knob in everyone[policy].grid:
            figures = found[jobs[training, policy, knob]]
            sweep.append(Attempt(float(knob), float(figures["attainment"]), float(figures["gpu_hours"])))
        tuned.append(Tuned(policy, training, best_of(sweep, attainment=ATTAINMENT), tuple(sweep)))
    return tuned


def takes_part(scenario: Scenario, policies: Sequence[str]) -> list[str]:
    """Of the chosen policies, those that this scenario is about."""
    if scenario.policies:
        return [policy for policy in policies if policy in scenario.policies]
    return [policy for policy in policies if policy != "static-settings"]


# --- the command -----------------------------------------------------------------------------------------------------


def evaluate(
    scenarios: Sequence[Scenario],
    policies: Sequence[str],
    place: Place,
    *,
    seeds: int,
    oracle_seeds: int,
    processes: int,
    experiments: Sequence[str] = (),
) -> Matrix:
    """Tune, then run the matrix, and the experiments."""
    known = all_scenarios()
    runnable: list[Scenario] = []
    missing: list[Scenario] = []
    for scenario in scenarios:
        needed = {path for path in (scenario.needs, known[scenario.training].needs) if path}
        there = place.data is not None and all((place.data / path).exists() for path in needed)
        (runnable if there or not needed else missing).append(scenario)

    def seeds_of(scenario: Scenario) -> range:
        return range(1, (min(seeds, WHOLE_DAY_SEEDS) if scenario.full else seeds) + 1)

    print(f"tuning {len(policies)} policies", file=sys.stderr)
    tuned = tune_all(runnable, policies, place, processes=processes)
    knobs = {(item.training, item.policy): item.knob for item in tuned}
    jobs = {
        (scenario.name, policy, seed): Job(scenario.name, policy, knobs[scenario.training, policy], seed)
        for scenario in runnable
        for policy in takes_part(scenario, policies)
        for seed in seeds_of(scenario)
    }
    oracle_jobs = {
        (scenario.name, seed): Job(scenario.name, ORACLE, 0.0, seed)
        for scenario in runnable
        if scenario.fixed_replicas is None and not scenario.full and not scenario.faults
        for seed in range(1, oracle_seeds + 1)
    }
    experiment_jobs = {
        (name, choice, seed): Job(name, choice, 0.0, seed)
        for name in experiments
        for choice in EXPERIMENTS[name].choices
        for seed in range(1, seeds + 1)
    }
    print(f"{len(runnable)} scenarios, {len(experiments)} experiments", file=sys.stderr)
    found = run_all([*jobs.values(), *oracle_jobs.values(), *experiment_jobs.values()], place, processes=processes)
    return Matrix(
        scenarios=tuple(runnable),
        contenders=contenders(),
        tuned=tuple(tuned),
        figures={
            (scenario.name, policy): tuple(found[jobs[scenario.name, policy, seed]] for seed in seeds_of(scenario))
            for scenario in runnable
            for policy in takes_part(scenario, policies)
        },
        oracles={
            scenario.name: tuple(found[oracle_jobs[scenario.name, seed]] for seed in range(1, oracle_seeds + 1))
            for scenario in runnable
            if (scenario.name, 1) in oracle_jobs
        },
        settings={each.training: each.settings for each in runnable},
        seeds=seeds,
        missing=tuple(scenario.name for scenario in missing),
        experiments={
            (name, choice): tuple(found[experiment_jobs[name, choice, seed]] for seed in range(1, seeds + 1))
            for name in experiments
            for choice in EXPERIMENTS[name].choices
        },
    )


def choose(names: str, known: Mapping[str, Any], what: str) -> list[str]:
    """A list of names separated by commas, each of which may be a pattern: S8* is all of S8."""
    parts = names.split(",")
    unknown = [part for part in parts if not any(fnmatchcase(name, part) for name in known)]
    if unknown:
        raise ValueError(f"there is no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    return list(dict.fromkeys(name for part in parts for name in known if fnmatchcase(name, part)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tidegate_sim.evaluation",
        description="Every scenario under every policy, with several seeds, each tuned on other traffic. Results "
        "are kept, so that it goes on where it was stopped. docs/simulator.md says more.",
    )
    parser.add_argument(
        "--data", type=Path, help="folder with the public traces; without it those scenarios are left out"
    )
    parser.add_argument("--out", type=Path, help="the Markdown file to write, with its plots beside it")
    parser.add_argument("--cache", type=Path, help="folder of kept results (default: ~/.cache/tidegate/evaluation)")
    parser.add_argument(
        "--scenarios", help="and experiments, by names or patterns with commas between (default: all but full ones)"
    )
    parser.add_argument("--policies", help="names, with commas between (default: all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each scenario (%(default)s)")
    parser.add_argument("--oracle-seeds", type=int, default=1, help="seeds for which the achievable oracle is searched")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="simulations at a time")
    parser.add_argument("--full", action="store_true", help="replay whole days as well: hours")
    options = parser.parse_args(arguments)
    known = {name: each for name, each in all_scenarios().items() if not each.is_training}
    try:
        every = {**known, **EXPERIMENTS}
        names = choose(options.scenarios, every, "scenario") if options.scenarios else list(every)
        policies = choose(options.policies, contenders(), "policy") if options.policies else list(contenders())
    except ValueError as error:
        parser.error(str(error))
    cache = options.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate/evaluation"
    scenarios = [known[name] for name in names if name in known and (options.full or not known[name].full)]
    began = time.monotonic()
    matrix = evaluate(
        scenarios,
        policies,
        Place(options.data, cache),
        seeds=options.seeds,
        oracle_seeds=options.oracle_seeds,
        processes=options.jobs,
        experiments=[name for name in names if name in EXPERIMENTS],
    )
    print(f"done in {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.out is None:
        print(evaluation_report.tables(matrix))
    else:
        evaluation_report.write(matrix, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
