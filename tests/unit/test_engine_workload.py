"""What a benchmark sends: traces as their publishers write them, made-up lengths, and prompts."""

import gzip
import itertools
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.workload import (
    PlannedRequest,
    PromptScale,
    Window,
    WorkloadError,
    made_up,
    measured_scale,
    parse_lengths,
    poisson,
    prompt_text,
    read_trace,
)

ROWS = [(0.0, 374, 44), (4.5, 396, 109), (4.75, 10, 1)]
PLAIN = "arrival,isl,osl\n100,374,44\n104.5,396,109\n104.75,10,1\n"
REPLAY = "t_s,isl,osl,service\n0.0,374,44,conv\n4.5,396,109,code\n4.75,10,1,conv\n"
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.5000000,374,44\r\n"
    "2023-11-16 18:15:51.0000000,396,109\r\n2023-11-16 18:15:51.2500000,10,1\r\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.500000+00:00,374,44\n"
    "2024-05-10 00:00:05+00:00,396,109\n2024-05-10 00:00:05.250000+00:00,10,1\n"
)
BURST_GPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,374,44,418,Conversation log\n"
    "9.5,GPT-4,396,109,505,API log\n9.6,GPT-4,396,0,396,API log\n9.75,GPT-4,10,1,11,API log\n"
)
MOONCAKE = (
    '{"timestamp": 27000, "input_length": 374, "output_length": 44, "hash_ids": [46]}\n'
    '{"timestamp": 31500, "input_length": 396, "output_length": 109, "hash_ids": [46]}\n\n'
    '{"timestamp": 31750, "input_length": 10, "output_length": 1}\n'
)
ALL = Window()


def trace_file(folder: Path, content: str) -> Path:
    path = folder / "trace"
    path.write_text(content, newline="")
    return path


@pytest.mark.parametrize("content", [PLAIN, REPLAY, AZURE_2023, AZURE_2024, BURST_GPT, MOONCAKE])
def test_every_publishers_format_gives_the_same_requests(content: str, tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path, content), ALL)
    assert [(each.at_seconds, each.input_tokens, each.output_tokens) for each in trace.requests] == ROWS
    assert [each.index for each in trace.requests] == [0, 1, 2]
    assert trace.skipped == (1 if content == BURST_GPT else 0)


def test_a_gzipped_trace_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(PLAIN.encode()))
    assert len(read_trace(path, ALL).requests) == 3
    path.write_bytes(gzip.compress(PLAIN.encode())[:-20])
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(path, ALL)


def test_a_window_is_cut_out_sped_up_and_scaled(tmp_path: Path) -> None:
    rows = "".join(f"{n},{100 + n},10\n" for n in range(100))
    path = trace_file(tmp_path, "arrival,isl,osl\n" + rows)
    window = Window(start_seconds=20, duration_seconds=5, speed=2, length_scale=0.5)
    found = read_trace(path, window).requests
    assert [each.at_seconds for each in found] == [n / 2 for n in range(11)]
    assert found[0].input_tokens == 60 and found[0].output_tokens == 5
    assert len(read_trace(path, Window(count=7)).requests) == 7


def test_requests_that_do_not_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path, PLAIN), Window(max_model_len=420))
    assert [each.input_tokens for each in trace.requests] == [374, 10]
    assert trace.skipped == 1


def test_arrivals_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path, "arrival,isl,osl\n5,1,1\n7,2,1\n6,3,1\n"), ALL)
    assert [(each.at_seconds, each.input_tokens) for each in trace.requests] == [(0.0, 1), (1.0, 3), (2.0, 2)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("a,b,c\n1,2,3\n", "no column arrival"),
        ("arrival,isl\n1,2\n", "no column osl"),
        ("arrival,isl,osl\n1,2\n", "line 2"),
        ("arrival,isl,osl\n1,2,3\nyesterday,2,3\n", "line 3"),
        ("arrival,isl,osl\nnan,2,3\n", "line 2"),
        ("arrival,isl,osl\n1,inf,3\n", "line 2"),
        ("arrival,isl,osl\n1,0,0\n", "no request"),
        ('{"timestamp": 1}\n', "line 1"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 3}\n', "line 1"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n{\n', "line 2"),
        ("x" * (1 << 21), "no trace"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(content: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=says):
        read_trace(trace_file(tmp_path, content), ALL)


def test_a_missing_or_binary_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(tmp_path / "none", ALL)
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00\x01" * 100)
    with pytest.raises(WorkloadError, match="not UTF-8"):
        read_trace(path, ALL)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_distribution_or_refused(text: str) -> None:
    try:
        lengths = parse_lengths(text)
    except WorkloadError:
        return
    assert all(1 <= lengths.draw(random.Random(n)) <= 1 << 20 for n in range(5))


@pytest.mark.parametrize(
    "text", ["0", "-5", "uniform:9,3", "uniform:1", "lognormal:5,9", "normal:5,1", "1e9", "nan", ""]
)
def test_senseless_lengths_are_refused(text: str) -> None:
    with pytest.raises(WorkloadError):
        parse_lengths(text)


def test_lengths_follow_their_distribution() -> None:
    rng = random.Random(1)
    draws = {
        text: [parse_lengths(text).draw(rng) for _ in range(4000)] for text in ("7", "uniform:5,9", "lognormal:100,0.5")
    }
    assert set(draws["7"]) == {7}
    assert set(draws["uniform:5,9"]) == {5, 6, 7, 8, 9}
    assert 95 < statistics.median(draws["lognormal:100,0.5"]) < 105
    assert 105 < statistics.mean(draws["lognormal:100,0.5"]) < 122  # median * exp(sigma² / 2) = 113


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (float("inf"), 0.0)])
def test_arrivals_keep_their_rate_and_their_spread(burstiness: float, spread: float) -> None:
    at = list(itertools.islice(poisson(5.0, burstiness=burstiness, rng=random.Random(3)), 20_001))
    gaps = [after - before for before, after in itertools.pairwise(at)]
    assert at[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.05, abs=1e-6)


def test_the_same_seed_makes_the_same_requests() -> None:
    def make(seed: int) -> list[PlannedRequest]:
        lengths = parse_lengths("uniform:1,999")
        return list(made_up(lengths, lengths, arrivals=[0.0, 1.0, 2.0], rng=random.Random(seed)))

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_prompts_share_no_beginning_unless_the_trace_says_so() -> None:
    scale = PromptScale()
    own = [prompt_text(PlannedRequest(n, 0.0, 600, 1), scale, seed=1) for n in range(3)]
    assert len({" ".join(text.split()[:8]) for text in own}) == 3
    assert all(len(text.split()) == 600 for text in own)
    shared = [prompt_text(PlannedRequest(n, 0.0, 1200, 1, (5, 6 + n)), scale, seed=1).split() for n in range(2)]
    assert shared[0][:512] == shared[1][:512]
    assert shared[0][512:1024] != shared[1][512:1024]
    assert shared[0][1024:] != shared[1][1024:]  # no id: the request's own
    assert [len(words) for words in shared] == [1200, 1200]


def test_the_scale_is_learnt_from_what_the_server_counts() -> None:
    scale = measured_scale({16: 30, 144: 222})
    assert (scale.tokens_per_word, scale.overhead_tokens) == (1.5, 6.0)
    assert scale.words(306) == 200
    assert scale.words(1) == 1
    assert measured_scale({16: 30, 144: 30}) == PromptScale()
