"""The scenarios of the evaluation: what arrives, what fails, and how long pods take to start.

Data and seeded workloads. Cuts of traces and made-up traffic of some 10,000 requests, for a GPU on which these
keep several replicas busy; `full` ones replay whole days. Those that need a trace say so. `evaluation` runs them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from tidegate_engine.settings import DEFAULT_SETTINGS, BatchSettings
from tidegate_sim import synthetic
from tidegate_sim.arrivals import Arrival
from tidegate_sim.specification import LOOSE, CrashLoop, Fault, MetricsOutage, OutageKind, PodCrash, Quota
from tidegate_sim.synthetic import Kind, Tail
from tidegate_sim.traces import Cut, read

PROFILE = "l4-qwen2.5-14b"
"""Slow enough that 10,000 requests keep a dozen replicas busy for most of an hour."""
GOALS = LOOSE
"""An L4 takes 62 ms for the shortest step of this model and 2.2 s for a prompt of 8,000 tokens."""
LONGEST_TOKENS = 8192
"""The model's context: requests that it cannot take are left out."""
CLIENT_TIMEOUT_SECONDS = 60.0
REQUESTS = 12_000
HOUR = 3600.0
SEED_SHIFT_SECONDS = 300.0
"""Cuts of a trace begin later by this for each seed."""
AZURE_2024 = "replay/azure2024_code_conv_days1to3_x1of20.csv.gz"
SERVEGEN = "replay/servegen_mlarge_days1to2_x1of50.csv.gz"
AZURE_2023_CODE = "azure2023/AzureLLMInferenceTrace_code.csv"

RAG = Kind("rag", Tail(4000), Tail(200))
LONG = Kind("long", Tail(300, 0.4, 2000), Tail(6000, 0.15, 8000))

Build = Callable[[Path | None, int], Sequence[Arrival]]
"""Of the folder with the traces, and a seed."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of the matrix."""

    name: str
    about: str
    build: Build
    training: str
    """The scenario on which policies are tuned; a scenario that is its own training is for nothing else."""
    start_seconds: float = 60.0
    initial_replicas: int = 6
    most_replicas: int = 24
    settings: BatchSettings = DEFAULT_SETTINGS
    """With which every policy begins."""
    fixed_replicas: int | None = None
    """Where only batch settings may move."""
    faults: tuple[Fault, ...] = ()
    events: tuple[float, ...] = ()
    """When something happens whose aftermath is looked at."""
    needs: str | None = None
    """The trace that it needs, below the data folder."""
    full: bool = False
    policies: tuple[str, ...] = ()
    """The only ones that it is about; empty = all."""

    @property
    def is_training(self) -> bool:
        return self.name == self.training


def with_starts_of(scenario: Scenario, seconds: int) -> Scenario:
    """The same where a pod takes so long to start, for the policies that this tells apart."""
    return replace(
        scenario,
        name=f"{scenario.name}-{seconds}",
        about=f"{scenario.name} with starts of {seconds} s",
        start_seconds=float(seconds),
        policies=START_POLICIES,
    )


def fits(arrival: Arrival) -> bool:
    return arrival.isl + arrival.osl <= LONGEST_TOKENS


def traced(path: str, *, start_hours: float, count: int | None = REQUESTS, duration_seconds: float = math.inf) -> Build:
    """A cut of a trace; another seed begins a little later."""

    def build(data: Path | None, seed: int) -> list[Arrival]:
        if data is None:
            raise ValueError(f"this scenario replays {path}: give the folder with the traces (--data)")
        start = start_hours * HOUR + seed * SEED_SHIFT_SECONDS
        cut = Cut(start, duration_seconds)
        arrivals = list(islice(filter(fits, read(data / path, cut, seed=seed)), count))
        first = arrivals[0].at_seconds
        return [replace(arrival, at_seconds=arrival.at_seconds - first) for arrival in arrivals]

    return build


def made_up(
    rate: synthetic.Rate, shares: synthetic.Shares, *, seconds: float, variation: float = 1.0, first_seed: int = 0
) -> Build:
    """Made-up traffic; `first_seed` keeps what policies are tuned on apart from what they are tested on."""

    def build(data: Path | None, seed: int) -> list[Arrival]:
        seeded = first_seed + seed
        made = synthetic.made_up(rate, shares, duration_seconds=seconds, seed=seeded, variation=variation)
        return [each for each in made if fits(each)]

    return build


def wave(mean: float, *, swing: float, period_seconds: float, peak_seconds: float) -> synthetic.Rate:
    """A day's wave in less than a day."""
    return lambda at: mean * (1 + swing * math.cos(2 * math.pi * (at - peak_seconds) / period_seconds))


def bursts(low: float, high: float, *, at_seconds: Sequence[float], seconds: float) -> synthetic.Rate:
    return lambda at: high if any(begin <= at < begin + seconds for begin in at_seconds) else low


def there_and_back(
    before: Kind, after: Kind, *, at_seconds: float, back_seconds: float, over_seconds: float
) -> synthetic.Shares:
    """From one kind to another and, later, back again, each over a while."""

    def shares(at: float) -> Mapping[Kind, float]:
        over = max(over_seconds, 1e-9)
        done = min(1.0, max(0.0, (at - at_seconds) / over)) - min(1.0, max(0.0, (at - back_seconds) / over))
        return {before: 1.0 - done, after: done}

    return shares


def drifting(kinds: Sequence[Kind], *, period_seconds: float) -> synthetic.Shares:
    """All kinds at all times, each with its own hour of the day at which it is most of the traffic."""

    def shares(at: float) -> Mapping[Kind, float]:
        weights = {}
        for number, kind in enumerate(kinds):
            phase = 2 * math.pi * (at / period_seconds - number / len(kinds))
            weights[kind] = math.exp(2.0 * math.cos(phase))
        return weights

    return shares


def _every(seconds: float, *, first: float, count: int) -> tuple[float, ...]:
    return tuple(first + seconds * number for number in range(count))


BURSTS = _every(1800.0, first=900.0, count=2)
BURST_TRAFFIC = bursts(0.8, 8.0, at_seconds=BURSTS, seconds=300.0)
DAY_SECONDS = 1.75 * HOUR
"""Of the day in less than a day."""
DAY_KINDS = (synthetic.TAILED_CHAT, synthetic.CODE, synthetic.LONG_ANSWERS, RAG)
RAMP = synthetic.ramp(1.5, 7.0, begin_seconds=300.0, over_seconds=1200.0)
PLATEAU = synthetic.steps([(0.0, 2.0), (600.0, 6.0), (1800.0, 2.0)])
OUTAGE_POLICIES = (
    "tidegate", "static", "hpa-concurrency", "hpa-work", "rps", "keda", "knative", "wva", "dynamo-throughput",
    "dynamo-both", "aibrix-apa", "token-velocity",
)  # fmt: skip
MIX_POLICIES = (
    "tidegate", "tidegate-fixed", "static", "hpa-concurrency", "hpa-work", "rps", "knative", "dynamo-both",
    "token-velocity",
)  # fmt: skip
START_POLICIES = (
    "tidegate", "static", "hpa-concurrency", "hpa-work", "rps", "knative", "dynamo-both", "token-velocity",
)  # fmt: skip
WHOLE_DAY_POLICIES = ("tidegate", "hpa-concurrency", "wva", "dynamo-corrected")
"""Those that came nearest to 99 % with the fewest GPU-hours on the cuts of the same traces, and the one of the goal."""
SETTINGS_POLICIES = ("tidegate", "static-settings", "chiron")

FIRST_SETTINGS = {
    "train-chat": BatchSettings(24, 512, 256),
    "train-azure": BatchSettings(12, 4096, 256),
    "train-servegen": BatchSettings(32, 512, 256),
    "train-mixed": BatchSettings(32, 512, 256),
    "train-settings": BatchSettings(32, 512, 256),
}
"""The best of eight on each training workload, by attainment with a fixed fleet that is a little too small for it; on
`train-settings` the policies choose their own."""


def _training() -> list[Scenario]:
    chat = synthetic.only(synthetic.TAILED_CHAT)

    def rate(at: float) -> float:
        return wave(3.2, swing=0.6, period_seconds=2400.0, peak_seconds=1500.0)(at) + (
            3.0 if 2640 <= at < 2880 else 0.0
        )

    mixed_day = drifting(DAY_KINDS[::-1], period_seconds=DAY_SECONDS)
    alternating = synthetic.alternating([synthetic.CODE, synthetic.LONG_ANSWERS], period_seconds=900.0)
    return [
        Scenario(
            "train-chat",
            "waves and a burst of chat",
            made_up(rate, chat, seconds=3600.0, variation=1.5, first_seed=1000),
            "train-chat",
        ),
        Scenario(
            "train-azure",
            "Azure 2024, the rise of day 2",
            traced(AZURE_2024, start_hours=36.3),
            "train-azure",
            needs=AZURE_2024,
            initial_replicas=8,
        ),
        Scenario(
            "train-servegen",
            "ServeGen m-large, a morning of day 1",
            traced(SERVEGEN, start_hours=8.8),
            "train-servegen",
            needs=SERVEGEN,
            initial_replicas=6,
        ),
        Scenario(
            "train-mixed",
            "a day of four kinds, in another order",
            made_up(
                wave(1.9, swing=0.5, period_seconds=DAY_SECONDS, peak_seconds=1300.0),
                mixed_day,
                seconds=DAY_SECONDS,
                first_seed=1000,
            ),
            "train-mixed",
        ),
        Scenario(
            "train-settings",
            "code and long answers by turns, on eight replicas",
            made_up(synthetic.steady(2.0), alternating, seconds=3600.0, first_seed=1000),
            "train-settings",
            fixed_replicas=8,
            initial_replicas=8,
            policies=SETTINGS_POLICIES,
        ),
    ]


def _steady_and_traced() -> list[Scenario]:
    chat = synthetic.only(synthetic.CHAT)
    azure = Scenario(
        "S2",
        "Azure 2024, the rise of day 3",
        traced(AZURE_2024, start_hours=60.3),
        "train-azure",
        needs=AZURE_2024,
        initial_replicas=8,
    )
    servegen = Scenario(
        "S3",
        "ServeGen m-large, end of day 2",
        traced(SERVEGEN, start_hours=45.9),
        "train-servegen",
        needs=SERVEGEN,
        initial_replicas=6,
    )
    return [
        Scenario(
            "S1-poisson",
            "5 requests/s of chat, 1000 in and 250 out, Poisson",
            made_up(synthetic.steady(5.0), chat, seconds=2400.0),
            "train-chat",
            initial_replicas=10,
        ),
        Scenario(
            "S1-bursty",
            "the same with gaps of a variation of 3.5",
            made_up(synthetic.steady(5.0), chat, seconds=2400.0, variation=3.5),
            "train-chat",
            initial_replicas=10,
        ),
        azure,
        with_starts_of(azure, 180),
        servegen,
        with_starts_of(servegen, 180),
        Scenario(
            "S2-full",
            "Azure 2024, three days",
            traced(AZURE_2024, start_hours=0.0, count=None),
            "train-azure",
            needs=AZURE_2024,
            initial_replicas=2,
            full=True,
            policies=WHOLE_DAY_POLICIES,
        ),
        Scenario(
            "S3-full",
            "ServeGen m-large, two days",
            traced(SERVEGEN, start_hours=0.0, count=None),
            "train-servegen",
            needs=SERVEGEN,
            initial_replicas=6,
            full=True,
            policies=WHOLE_DAY_POLICIES,
        ),
        Scenario(
            "S4",
            "chat at 0.8 requests/s, and ten times as much for five minutes, twice",
            made_up(BURST_TRAFFIC, synthetic.only(synthetic.TAILED_CHAT), seconds=4500.0),
            "train-chat",
            initial_replicas=2,
            events=BURSTS,
        ),
        Scenario(
            "S4-code",
            "Azure 2023 code, an hour with minutes of five times the median",
            traced(AZURE_2023_CODE, start_hours=0.0, count=None),
            "train-azure",
            needs=AZURE_2023_CODE,
            initial_replicas=4,
        ),
    ]


def _mixes() -> list[Scenario]:
    scenarios = []
    for minutes in (0, 10, 30):
        shares = there_and_back(
            synthetic.CHAT, RAG, at_seconds=900.0, back_seconds=900.0 + 2400.0, over_seconds=60.0 * minutes
        )
        scenarios.append(
            Scenario(
                f"S5-{minutes}min",
                f"1.5 requests/s that turn from chat to RAG, 4000 in, within {minutes} minutes, and back",
                made_up(synthetic.steady(1.5), shares, seconds=4500.0 + 60.0 * minutes),
                "train-mixed",
                events=(900.0,),
                policies=() if minutes == 0 else MIX_POLICIES,
            )
        )
    alternating = synthetic.alternating([synthetic.LONG_ANSWERS, synthetic.CODE], period_seconds=900.0)
    scenarios.append(
        Scenario(
            "S6",
            "long answers and code by turns every quarter of an hour, on eight replicas: only batch settings move",
            made_up(synthetic.steady(2.0), alternating, seconds=3600.0),
            "train-settings",
            fixed_replicas=8,
            initial_replicas=8,
            policies=SETTINGS_POLICIES,
        )
    )
    scenarios.append(
        Scenario(
            "S13",
            "a day of four kinds, each with its own hour",
            made_up(
                wave(1.9, swing=0.5, period_seconds=DAY_SECONDS, peak_seconds=3500.0),
                drifting(DAY_KINDS, period_seconds=DAY_SECONDS),
                seconds=DAY_SECONDS,
            ),
            "train-mixed",
        )
    )
    return scenarios


def _failures() -> list[Scenario]:
    chat = synthetic.only(synthetic.TAILED_CHAT)
    scenarios = [
        Scenario(
            f"S7-{seconds}",
            f"the bursts of S4 with starts of {seconds} s",
            made_up(BURST_TRAFFIC, chat, seconds=4500.0),
            "train-chat",
            start_seconds=float(seconds),
            initial_replicas=2,
            events=BURSTS,
            policies=START_POLICIES,
        )
        for seconds in (45, 120, 180, 300, 600)
    ]
    outages: tuple[tuple[str, str, synthetic.Rate, OutageKind, int], ...] = (
        ("S8-ramp", "no scrapes for five minutes of a rise", RAMP, OutageKind.NO_SCRAPE, 4),
        ("S8-steady", "no scrapes for five minutes of steady load", synthetic.steady(5.0), OutageKind.NO_SCRAPE, 10),
        ("S8-stale", "scrapes that bring the same for five minutes of a rise", RAMP, OutageKind.STALE, 4),
        ("S8-half", "scrapes of every other pod for five minutes of a rise", RAMP, OutageKind.HALF, 4),
    )
    scenarios += [
        Scenario(
            name,
            about,
            made_up(rate, chat, seconds=2100.0),
            "train-chat",
            initial_replicas=initial,
            faults=(MetricsOutage(900.0, 1200.0, kind),),
            events=(900.0,),
            policies=OUTAGE_POLICIES,
        )
        for name, about, rate, kind, initial in outages
    ]
    crashes: tuple[tuple[str, str, Fault], ...] = (
        ("S9-one", "a pod's container dies at the peak", PodCrash(1300.0)),
        ("S9-third", "30 % of the pods' containers die at the peak", PodCrash(1300.0, share=0.3)),
        ("S9-loop", "new pods crash for ten minutes of the peak", CrashLoop(630.0, 1230.0)),
    )
    scenarios += [
        Scenario(
            name,
            about,
            made_up(PLATEAU, chat, seconds=2700.0),
            "train-chat",
            initial_replicas=5,
            faults=(fault,),
            events=(fault.at_seconds,),
            policies=OUTAGE_POLICIES,
        )
        for name, about, fault in crashes
    ]
    scenarios += [
        Scenario(
            "S10",
            "a peak that needs a dozen pods, and nodes for eight",
            made_up(PLATEAU, chat, seconds=2700.0),
            "train-chat",
            initial_replicas=5,
            faults=(Quota(0.0, 8),),
            policies=OUTAGE_POLICIES,
        ),
        Scenario(
            "S11",
            "Azure 2024, the fall of day 3: the load of six hours later than what was tuned on",
            traced(AZURE_2024, start_hours=66.8),
            "train-azure",
            needs=AZURE_2024,
            initial_replicas=12,
        ),
        Scenario(
            "S12",
            "answers of 6000 tokens while the load falls: none may be cut",
            made_up(synthetic.steps([(0.0, 0.08), (2400.0, 0.01)]), synthetic.only(LONG), seconds=5400.0),
            "train-chat",
            initial_replicas=12,
            events=(2400.0,),
        ),
    ]
    return scenarios


def all_scenarios() -> dict[str, Scenario]:
    """By name, in the order of the tables."""
    scenarios = [*_training(), *_steady_and_traced(), *_mixes(), *_failures()]
    return {each.name: replace(each, settings=FIRST_SETTINGS[each.training]) for each in scenarios}
