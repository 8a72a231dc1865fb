"""A scenario of the evaluation in real time, on the real API server: the operator decides as the simulator does.

An operator of its own scrapes the pods itself and records its decisions. What it saw is then given to the simulator's
controller, and what arrived to the simulator as a whole.
"""

import asyncio
import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tidegate_engine.bench import LoadOptions, Record, Server, run_load, scale_of
from tidegate_engine.load_client import Endpoint, open_session, percentile
from tidegate_engine.steptime import TERMS, Profile, load_profile
from tidegate_engine.workload import PlannedRequest
from tidegate_local import recording
from tidegate_operator.api import Spec, parse_spec
from tidegate_operator.cli import main
from tidegate_operator.journal import Entry, read
from tidegate_operator.observation import Action, Decision
from tidegate_operator.observing import Facts
from tidegate_sim.arrivals import Arrival
from tidegate_sim.controller import FleetView, GatewayView, PodView
from tidegate_sim.operator_controller import OperatorController, scrape_seconds
from tidegate_sim.results import Result
from tidegate_sim.scenarios import PROFILE, all_scenarios
from tidegate_sim.simulation import simulate
from tidegate_sim.specification import Balancing, FleetSpec, GatewaySpec, StartTimes

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]
PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
NAMESPACE, RELEASE, NAME = "recorded", "tidegate-recorder", "chat"
JOURNAL = "/tmp/decisions.jsonl.gz"


@dataclass(frozen=True)
class Excerpt:
    """A scenario in less time: every n-th of its requests, so many times as fast, on a GPU so many times as fast."""

    scenario: str
    span: tuple[float, float]
    """From when to when, in the scenario's own seconds."""
    speed: float
    every: int
    gpu_speed: float
    seed: int = 1

    def arrivals(self, longest: int) -> list[Arrival]:
        built = all_scenarios()[self.scenario].build(None, self.seed)
        begin, end = self.span
        return [
            replace(each, at_seconds=(each.at_seconds - begin) / self.speed)
            for each in built[:: self.every]
            if begin <= each.at_seconds < end and each.isl + each.osl <= longest
        ]

    def profile(self) -> Profile:
        profile = load_profile(PROFILE)
        terms = {
            term: getattr(profile.step, term) / (1 if term == "threshold_tokens" else self.gpu_speed) for term in TERMS
        }
        return replace(
            profile,
            name=f"{profile.name}-x{self.gpu_speed:g}",
            step=replace(profile.step, **terms),
            start_seconds={"weights": 3.0, "warmup": 0.0},
        )


EXCERPT = (
    Excerpt("S4", (0.0, 4500.0), speed=9.0, every=9, gpu_speed=3.0)
    if PROVE
    else Excerpt("S4", (450.0, 2250.0), speed=30.0, every=15, gpu_speed=4.0)
)
"""Chat with bursts of ten times the load: two in 500 s, or here one in a minute."""


@dataclass(frozen=True)
class Story:
    """What happened."""

    profile: Profile
    arrivals: Sequence[Arrival]
    """As they were sent, with the lengths that the engine counted."""
    began_at: float
    records: Sequence[Record]
    journal: Path
    entries: Sequence[Entry]
    last_decision: Mapping[str, Any]
    """As it stood in the status."""
    start_seconds: float
    """Of the pods that were added, in the mean."""


@pytest.fixture(scope="module")
def story(fleet: Any, objects: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    recorder = replace(fleet, namespace=NAMESPACE, release=RELEASE)
    recorder.install("journal.enabled=true", "crds.enabled=false")
    recorder.give_profile(asdict(EXCERPT.profile()))
    recorder.apply(scaled_object(objects))
    try:
        yield tell(recorder, tmp_path_factory.mktemp("replayed"))
    finally:
        recorder.kubectl("delete", "lld", NAME, "--wait=false")
        recorder.reached.helm("uninstall", RELEASE, f"--namespace={NAMESPACE}")


def scaled_object(objects: Any) -> Any:
    return objects.modelled(
        NAME,
        replicas=None,
        batching={"mode": "Auto", "minIntervalSeconds": 10, "verificationSeconds": 15},
        objectives={"ttft": {"milliseconds": 1000}, "interTokenLatency": {"milliseconds": 50}},
        autoscaling={
            "mode": "Auto",
            "minReplicas": 1,
            "maxReplicas": 5,
            "syncPeriodSeconds": 3,
            "behavior": {
                "scaleDown": {
                    "stabilizationWindowSeconds": 5,
                    "policies": [{"type": "Pods", "value": 4, "periodSeconds": 5}],
                }
            },
        },
        metrics={"staleAfterSeconds": 10},
        drain={"timeoutSeconds": 30, "endpointRemovalSeconds": 1},
    )


def tell(recorder: Any, folder: Path) -> Story:
    recorder.wait_ready(NAME)
    profile = EXCERPT.profile()
    arrivals = EXCERPT.arrivals(profile.max_model_len - 64)
    planned = [
        PlannedRequest(number, each.at_seconds, each.isl, each.osl, source=each.source)
        for number, each in enumerate(arrivals)
    ]
    began_at, records = asyncio.run(send(recorder.url(NAME), planned))
    recorder.until(
        "the fleet is small again",
        lambda: recorder.get(NAME, "deployment")["spec"]["replicas"] == 1 and len(recorder.pods(NAME)) == 1,
        timeout_seconds=120,
        name=NAME,
    )
    journal = folder / "decisions.jsonl.gz"
    journal.write_bytes(
        base64.b64decode(recorder.kubectl("exec", f"deployment/{RELEASE}", "--", "base64", "-w0", JOURNAL))
    )
    entries = list(read([journal]))
    started = {
        pod.uid: pod.ready_at - pod.created_at
        for entry in entries
        for pod in entry.facts.replicas
        if pod.ready_at is not None and pod.created_at > began_at
    }
    return Story(
        profile=profile,
        arrivals=[
            replace(each, isl=record.answer.prompt_tokens or each.isl)
            for each, record in zip(arrivals, records, strict=True)
        ],
        began_at=began_at,
        records=records,
        journal=journal,
        entries=entries,
        last_decision=recorder.get(NAME)["status"]["autoscaling"]["lastDecision"],
        start_seconds=mean(started.values()),
    )


async def send(url: str, planned: Sequence[PlannedRequest]) -> tuple[float, list[Record]]:
    """Send each when it is due; when that began, and what became of them in their order."""
    endpoint = Endpoint(url, NAME, timeout_seconds=300.0)
    # A connection a request: a kept one would stay with the replicas of the first minute.
    async with open_session(endpoint, keep_alive=False) as session:
        server = Server(endpoint, session)
        scale = await scale_of(server, seed=0)
        run = await run_load(server, iter(planned), LoadOptions(), scale=scale, stop=asyncio.Event())
    return run.began_at, sorted(run.records, key=lambda record: record.request.index)


def view_of(facts: Facts, spec: Spec) -> FleetView:
    """What a simulated fleet would show a controller at that moment."""
    samples = facts.measured.samples
    return FleetView(
        now=facts.now,
        desired_replicas=facts.workload.current_replicas,
        pods=tuple(PodView(replica, samples.get(replica.name, ())) for replica in facts.replicas),
        gateway=GatewayView(arrivals_total=0.0, in_flight=0.0, in_flight_seconds_total=0.0),
        settings=spec.initial_settings(),
    )


def simulators(entries: Sequence[Entry], spec: Spec) -> Iterator[Decision]:
    """What the simulator's controller decides on these observations, with a memory of its own from the first on."""
    (info,) = {entry.facts.info for entry in entries if entry.facts.info is not None}
    controller = OperatorController(spec, info)
    for entry in entries:
        controller.decide(view_of(entry.facts, spec))
        assert controller.last is not None
        yield controller.last


def stood(entries: Sequence[Entry]) -> list[Entry]:
    """Without those whose pass was void, since somebody else had written the object in the meantime."""
    return [entry for entry, after in pairwise(entries) if after.memory == entry.decision.memory] + [entries[-1]]


def test_the_operator_decides_as_the_simulator_for_the_same_observations(story: Story) -> None:
    entries = stood(story.entries)
    assert len(entries) > 0.9 * len(story.entries) > 20
    (raw,) = {json.dumps(entry.spec, sort_keys=True) for entry in entries}
    spec = parse_spec(json.loads(raw))
    recorded = [entry.decision for entry in entries]
    assert list(simulators(entries, spec)) == recorded
    other = parse_spec({**json.loads(raw), "objectives": {"ttft": {"milliseconds": 100}}})
    pairs = zip(simulators(entries, other), recorded, strict=True)
    assert any(mine != theirs for mine, theirs in pairs), "other goals must lead to others, or equality says nothing"


def test_the_scenario_moved_replicas_both_ways(story: Story) -> None:
    actions = {entry.decision.action for entry in story.entries}
    assert {Action.SCALE_UP, Action.SCALE_DOWN} <= actions
    assert any(len(entry.facts.measured.samples) > 1 for entry in story.entries), "several pods were scraped"
    assert [record.answer.failure for record in story.records if record.answer.failure] == []


def test_what_is_on_record_is_what_was_done(story: Story) -> None:
    """Each number that was decided is the number that the API server tells next."""
    for entry, after in pairwise(stood(story.entries)):
        assert after.facts.workload.current_replicas == entry.decision.replicas
    told = story.last_decision
    at = recording.unix_seconds(told["time"])
    (shown,) = [entry.decision for entry in story.entries if int(entry.facts.now) == at][-1:]
    assert (shown.replicas, shown.reason, shown.message) == (told["replicas"], told["reason"], told["message"])
    assert {name: shown.inputs[name] for name in told["inputs"]} == pytest.approx(told["inputs"], rel=1e-3)


def test_tidegate_replay_finds_no_difference(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(story.journal)]) == 0
    assert f"{len(story.entries)} decisions" in capsys.readouterr().out


def test_the_same_arrivals_in_virtual_time_take_about_as_many_replicas(story: Story) -> None:
    """Told beside each other; the bounds are loose, since a Service spreads connections by chance."""
    spec = parse_spec(story.entries[0].spec)
    info = next(entry.facts.info for entry in story.entries if entry.facts.info is not None)
    fleet = FleetSpec(
        story.profile,
        settings=spec.initial_settings(),
        patterns=spec.patterns(),
        start=StartTimes(0.0, 0.0, story.start_seconds),
        scrape_seconds=scrape_seconds(spec),
        gateway=GatewaySpec(balancing=Balancing.ROUND_ROBIN),
        epoch_seconds=story.began_at,
    )
    seconds = story.entries[-1].facts.now - story.began_at
    result = simulate(story.arrivals, fleet, OperatorController(spec, info), seed=1, duration_seconds=seconds)
    print("\n".join(told(story, result)))
    assert result.gpu_seconds == pytest.approx(pod_seconds(story), rel=0.2 if PROVE else 0.4)
    live = [entry.facts.workload.current_replicas for entry in story.entries]
    simulated = [change.after for change in result.changes]
    assert abs(max(live) - max(simulated)) <= 2


def told(story: Story, result: Result) -> Iterator[str]:
    seconds = story.entries[-1].facts.now - story.began_at
    yield f"{len(story.arrivals)} requests of {EXCERPT} in {story.arrivals[-1].at_seconds:.0f} s"
    yield f"{len(story.entries)} decisions, {len(stood(story.entries))} of which stood"
    yield f"replicas live:      {path(changes_of(story))}"
    yield f"replicas simulated: {path([(change.at, change.after) for change in result.scalings])}"
    yield f"pod-seconds in {seconds:.0f} s: live {pod_seconds(story):.0f}, simulated {result.gpu_seconds:.0f}"
    retunes = sum(b.decision.settings != a.decision.settings for a, b in pairwise(story.entries))
    simulated = sum(change.settings_before != change.settings_after for change in result.changes)
    yield f"changes of batch settings: live {retunes}, simulated {simulated}"
    live = [record.answer.ttft_seconds for record in story.records if record.answer.ttft_seconds is not None]
    virtual = [ttft for ttft in result.records.ttft if ttft == ttft]
    for name, found in (("live", live), ("simulated", virtual)):
        tail = " ".join(f"p{percent} {percentile(found, percent):.2f}" for percent in (50, 95, 99))
        yield f"TTFT in s, {name:10} mean {mean(found):.2f} {tail}"


def pod_seconds(story: Story) -> float:
    """Of pods that stood, from the first request on."""
    seen = [entry.facts for entry in story.entries if entry.facts.now > story.began_at]
    return sum(len(facts.replicas) * (after.now - facts.now) for facts, after in pairwise(seen))


def changes_of(story: Story) -> list[tuple[float, int]]:
    return [
        (after.facts.now - story.began_at, after.decision.replicas)
        for before, after in pairwise(story.entries)
        if after.decision.replicas != before.decision.replicas
    ]


def path(changes: Sequence[tuple[float, int]]) -> str:
    return ", ".join(f"{replicas} at {at:.0f} s" for at, replicas in changes)
