"""Decisions on record: what was written comes back, a file is bounded, and `tidegate replay` makes them again.

The decisions are those of a simulated fleet under a burst, so that samples, starting pods and changes are all in them.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tidegate_engine.steptime import load_profile
from tidegate_operator.api import parse_spec
from tidegate_operator.cli import main
from tidegate_operator.demand import Measured
from tidegate_operator.journal import Entry, Journal, UnreadableJournal, read
from tidegate_operator.replay import replay
from tidegate_sim import synthetic
from tidegate_sim.controller import FleetView, Order
from tidegate_sim.operator_controller import OperatorController, scrape_seconds
from tidegate_sim.replica import engine_info
from tidegate_sim.simulation import simulate
from tidegate_sim.specification import FleetSpec, PodCrash, start_times

L4 = load_profile("l4-llama-3.1-8b")
OBJECT: dict[str, Any] = {
    "model": {"uri": "file:///models/none"},
    "objectives": {"ttft": {"milliseconds": 2000}, "interTokenLatency": {"milliseconds": 150}},
    "batching": {"minIntervalSeconds": 10, "verificationSeconds": 20},
    "autoscaling": {
        "minReplicas": 1,
        "maxReplicas": 6,
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 30}},
    },
}
MOST_BYTES = 1 << 30


class Recorded(OperatorController):
    """Notes each decision as the operator would."""

    def __init__(self) -> None:
        super().__init__(parse_spec(OBJECT), engine_info(L4))
        self.entries: list[Entry] = []

    def decide(self, view: FleetView) -> Order:
        memory = {} if self.last is None else self.last.memory
        order = super().decide(view)
        assert self.last is not None
        self.entries.append(Entry("team/chat", OBJECT, self.facts(view), memory, self.last))
        return order


@lru_cache(maxsize=1)
def entries() -> Sequence[Entry]:
    """Of five minutes with a burst, a pod that crashes in it, and the way down."""
    spec = parse_spec(OBJECT)
    rate = synthetic.steps([(0, 0.5), (60.0, 20.0), (120.0, 0.3)])
    kind = synthetic.Kind("chat", synthetic.Tail(400, 0.5), synthetic.Tail(60, 0.5))
    workload = synthetic.made_up(rate, synthetic.only(kind), duration_seconds=240.0, seed=2)
    fleet = FleetSpec(
        L4,
        settings=spec.initial_settings(),
        start=start_times(10.0),
        scrape_seconds=scrape_seconds(spec),
        faults=[PodCrash(130.0)],
    )
    recorded = Recorded()
    simulate(workload, fleet, recorded, seed=1, duration_seconds=300.0)
    assert len({entry.decision.replicas for entry in recorded.entries}) > 2
    assert len({entry.decision.settings for entry in recorded.entries}) > 1
    return tuple(recorded.entries)


def write(path: Path, recorded: Sequence[Entry], *, most_bytes: int = MOST_BYTES) -> Path:
    journal = Journal(path, most_bytes=most_bytes)
    for entry in recorded:
        journal.write(entry)
    return path


def test_what_is_written_comes_back_as_it_was(tmp_path: Path) -> None:
    assert list(read([write(tmp_path / "j", entries())])) == list(entries())


def test_windows_without_samples_come_back_too_and_so_does_an_error(tmp_path: Path) -> None:
    def as_prometheus(entry: Entry) -> Entry:
        return replace(entry, facts=replace(entry.facts, measured=Measured(entry.facts.measured.windows)))

    recorded = [as_prometheus(entry) for entry in entries()]
    recorded.append(replace(recorded[-1], facts=replace(recorded[-1].facts, measured=Measured(error="down"))))
    assert list(read([write(tmp_path / "j", recorded)])) == recorded


def test_a_sample_is_written_once(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("".join(lines(write(tmp_path / "j", entries()))))
    written = [
        (pod, at)
        for line in plain.read_text().splitlines()
        for pod, told in json.loads(line)["samples"].items()
        for at, _ in told["new"]
    ]
    assert len(written) == len(set(written)) > len(entries())
    assert list(read([plain])) == list(entries()), "uncompressed lines are read as well"


def lines(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return file.readlines()


def test_an_operator_that_starts_again_goes_on_in_the_same_file(tmp_path: Path) -> None:
    first, second = entries()[:5], [entry for entry in entries()[5:] if entry.facts.now > entries()[4].facts.now + 70]
    path = write(tmp_path / "j", first)
    assert list(read([write(path, second)])) == [*first, *second]


def test_the_newest_decisions_are_kept_within_the_bound(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", entries()).stat().st_size
    bound = whole // 2
    path = write(tmp_path / "j", entries(), most_bytes=bound)
    older = tmp_path / "j.1"
    longest = max(path.stat().st_size / len(lines(path)) * 4, 1)
    assert path.stat().st_size + older.stat().st_size <= bound + 2 * longest
    kept = list(read([older, path]))
    assert len(kept) < len(entries())
    assert kept == list(entries()[-len(kept) :])


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "j", entries())
    path.write_bytes(path.read_bytes()[:-20])
    assert list(read([path])) == list(entries()[:-1])


@pytest.mark.parametrize("content", [b"hello\n", b'{"name": "a/b"}\n', b"\x1f\x8bnot gzip at all, though it says so"])
def test_what_is_no_journal_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(UnreadableJournal, match=str(path)):
        list(read([path]))


def test_a_journal_that_cannot_be_written_is_given_up_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "nowhere" / "j", entries()[:3])
    (record,) = caplog.records
    assert "recorded no longer" in record.message and "No such file" in record.message


def test_the_same_rules_decide_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "j", entries())
    assert [each.now for each in replay(read([path]))] == [entry.decision for entry in entries()]
    assert main(["replay", str(path)]) == 0
    assert f"team/chat: {len(entries())} decisions" in (out := capsys.readouterr().out)
    assert f"{len(entries())} are the same" in out


def test_other_rules_are_shown_where_they_decide_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after an upgrade: here the bound on replicas is what is new."""
    bounded = {**OBJECT, "autoscaling": {**OBJECT["autoscaling"], "maxReplicas": 2}}
    path = write(tmp_path / "j", [replace(entry, spec=bounded) for entry in entries()])
    expected = [entry for entry in entries() if entry.decision.replicas > 2]
    different = [each for each in replay(read([path])) if each.acts_differently]
    assert {each.at for each in different} >= {entry.facts.now for entry in expected}
    assert all(each.now.replicas <= 2 for each in different)
    assert main(["replay", str(path), "--all"]) == 1
    out = capsys.readouterr().out
    assert out.count("recorded: ") == out.count("now: ") == len(different) > 0
    assert "MaxReplicas" in out


def test_decisions_that_never_counted_do_not_carry_memory(tmp_path: Path) -> None:
    """A pass whose status could not be written is made again from the memory before it."""
    recorded = list(entries())
    void = replace(recorded[5], decision=replace(recorded[5].decision, memory={"version": 1, "generation": 99}))
    path = write(tmp_path / "j", [*recorded[:5], void, *recorded[5:9]])
    assert [each.now for each in replay(read([path]))][6:] == [entry.decision for entry in recorded[5:9]]


def test_only_the_object_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [each for entry in entries()[:4] for each in (entry, replace(entry, name="team/other"))]
    path = write(tmp_path / "j", both)
    assert main(["replay", str(path), "--object=team/other"]) == 0
    assert "team/chat" not in capsys.readouterr().out
    assert main(["replay", str(path), "--object=team/none"]) == 2
    assert "no decision is on record" in capsys.readouterr().err
