"""Traces and made-up workloads: every format is read in order, cut and scaled, and a bad line is named."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tidegate_engine.steptime import load_profile
from tidegate_engine.workload import WorkloadError
from tidegate_sim import synthetic
from tidegate_sim.controller import FleetView, Order
from tidegate_sim.simulation import simulate
from tidegate_sim.specification import FleetSpec
from tidegate_sim.traces import Counted, Cut, read

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,27
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
PLAIN = "t,isl,osl\n0,10,1\n1,20,2\n2.5,30,3\n"
REPLAY = "t_s,isl,osl,client\n0.000,227,106,95\n0.003,560,3,143\n"


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "name", "first", "last"),
    [
        (AZURE, "azure.csv", (0.0, 4808, 10, ""), (2.0, 110, 27, "")),
        (BURST, "burst.csv", (0.0, 472, 18, "ChatGPT"), (113.0, 417, 276, "GPT-4")),
        (PLAIN, "plain.csv", (0.0, 10, 1, ""), (2.5, 30, 3, "")),
        (REPLAY, "replay.csv.gz", (0.0, 227, 106, "95"), (0.003, 560, 3, "143")),
    ],
)
def test_known_formats_are_read(
    tmp_path: Path, text: str, name: str, first: tuple[object, ...], last: tuple[object, ...]
) -> None:
    found = [(round(a.at_seconds, 6), a.isl, a.osl, a.source) for a in read(written(tmp_path, text, name))]
    assert (found[0], found[-1]) == (first, last)


def test_rows_without_tokens_are_left_out_and_counted(tmp_path: Path) -> None:
    counted = Counted()
    assert len(list(read(written(tmp_path, BURST), counted=counted))) == 2
    assert (counted.used, counted.skipped) == (2, 1)


def test_a_bad_line_is_named_with_what_is_wanted(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN + "3,many,3\n")
    with pytest.raises(WorkloadError, match=r"trace\.csv, line 5: .*'many'.* are wanted in the columns t, isl, osl"):
        list(read(path))
    with pytest.raises(WorkloadError, match="has no column arrival or timestamp"):
        list(read(written(tmp_path, "a,b\n1,2\n")))
    with pytest.raises(WorkloadError, match="cannot be read"):
        list(read(tmp_path / "nowhere.csv"))
    with pytest.raises(WorkloadError, match="no request in the chosen part"):
        list(read(written(tmp_path, PLAIN), Cut(start_seconds=50)))


def test_rows_a_little_out_of_order_are_sorted_and_others_refused(tmp_path: Path) -> None:
    rows = [f"{at},10,1\n" for at in (100, 102, 101, 500, 499)]
    found = [a.at_seconds for a in read(written(tmp_path, "t,isl,osl\n" + "".join(rows)))]
    assert found == [0, 1, 2, 399, 400]
    with pytest.raises(WorkloadError, match="sort the file by time"):
        list(read(written(tmp_path, "t,isl,osl\n0,1,1\n1000,1,1\n5000,1,1\n20,1,1\n9000,1,1\n")))


def test_a_cut_is_taken_and_scaled(tmp_path: Path) -> None:
    path = written(tmp_path, "t,isl,osl\n" + "".join(f"{n},{100 + n},10\n" for n in range(1000)))
    cut = list(read(path, Cut(start_seconds=100, duration_seconds=500, speed=2, length_scale=0.5)))
    assert len(cut) == 500
    assert (cut[0].at_seconds, cut[0].isl, cut[0].osl) == (0.0, 100, 5)
    assert cut[-1].at_seconds == 499 / 2
    assert len(list(read(path, Cut(count=7)))) == 7
    for scale in (0.3, 2.5):
        scaled = list(read(path, Cut(rate_scale=scale), seed=3))
        assert 0.85 < len(scaled) / (1000 * scale) < 1.15
        assert scaled == list(read(path, Cut(rate_scale=scale), seed=3))
        assert [a.at_seconds for a in scaled] == sorted(a.at_seconds for a in scaled)


def test_a_prompt_that_begins_as_another_finds_its_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 9000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 9]},
        {"timestamp": 18000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
    ]
    path = written(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "mooncake.jsonl")
    arrivals = list(read(path))
    first, second, third = (arrival.block_hashes for arrival in arrivals)
    assert len(first) == 1500 // 16 and first[:64] == second[:64] and first[64] != second[64]
    assert not set(first) & set(third)
    seen: list[float] = []

    class Watching:
        name, period_seconds = "watching", 5.0

        def decide(self, view: FleetView) -> Order:
            seen.extend(sample.values[("cached_prompt_tokens",)] for sample in view.pods[0].samples[-1:])
            return Order(1)

    result = simulate(arrivals, FleetSpec(load_profile("h100-llama-3.1-8b")), Watching(), duration_seconds=30.0)
    assert seen[-1] == 1024
    assert result.records.ttft[1] < result.records.ttft[2] * 0.6


def test_made_up_workloads_follow_their_rate_and_their_mix() -> None:
    rate = synthetic.steps([(0, 5.0), (1000, 20.0)])
    shares = synthetic.shifting(synthetic.CHAT, synthetic.RAG, at_seconds=1000)
    made = list(synthetic.made_up(rate, shares, duration_seconds=2000, seed=4))
    before = [a for a in made if a.at_seconds < 1000]
    after = made[len(before) :]
    assert len(before) == pytest.approx(5000, rel=0.05) and len(after) == pytest.approx(20000, rel=0.03)
    assert {a.source for a in before} == {"chat"} and {a.source for a in after} == {"rag"}
    assert made == list(synthetic.made_up(rate, shares, duration_seconds=2000, seed=4))


def test_gaps_vary_as_much_as_asked() -> None:
    for variation in (1.0, 3.5):
        made = synthetic.made_up(
            synthetic.steady(10.0),
            synthetic.only(synthetic.SHORT),
            duration_seconds=3000,
            seed=1,
            variation=variation,
        )
        times = [arrival.at_seconds for arrival in made]
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert deviation / mean == pytest.approx(variation, rel=0.15)


def test_days_ramps_and_alternating_kinds() -> None:
    day = synthetic.daily(10.0, swing=0.5, peak_hour=14.0)
    assert day(14 * 3600) == pytest.approx(15.0) and day(2 * 3600) == pytest.approx(5.0)
    climb = synthetic.ramp(1.0, 3.0, begin_seconds=100, over_seconds=100)
    assert (climb(0), climb(150), climb(900)) == (1.0, 2.0, 3.0)
    shares = synthetic.alternating([synthetic.CHAT, synthetic.RAG], period_seconds=60)
    named = Counter(next(iter(shares(at))).name for at in range(0, 240, 10))
    assert named == {"chat": 12, "rag": 12}
    slow = synthetic.shifting(synthetic.CHAT, synthetic.RAG, at_seconds=0, over_seconds=100)
    assert slow(25)[synthetic.RAG] == pytest.approx(0.25)
