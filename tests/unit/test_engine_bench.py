"""`tidegate-engine bench` against the real server and an engine in this process; its loops, figures and page."""

import asyncio
import json
import random
import re
import signal
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tidegate_engine import bench_report
from tidegate_engine.bench import GapHistogram, LoadOptions, Record, Run, run_load
from tidegate_engine.cli import main
from tidegate_engine.load_client import Answer, percentile
from tidegate_engine.serve import Process
from tidegate_engine.workload import PlannedRequest, PromptScale

StartEngine = Callable[..., Awaitable[Process]]
SCALE = PromptScale()


def requests(*at_seconds: float) -> Iterator[PlannedRequest]:
    return (PlannedRequest(index, at, 5, 3) for index, at in enumerate(at_seconds))


class Gate:
    """A target whose answers wait until `enough` requests are there at once."""

    def __init__(self, enough: int) -> None:
        self.due: list[float] = []
        self.most = 0
        self._here = 0
        self._enough = enough
        self._open = asyncio.Event()

    async def send(self, prompt: str, *, output_tokens: int, due: float) -> Answer:
        self.due.append(due)
        self._here += 1
        self.most = max(self.most, self._here)
        if self._here >= self._enough:
            self._open.set()
        await self._open.wait()
        await asyncio.sleep(0)
        self._here -= 1
        return Answer(ttft_seconds=0.1, e2e_seconds=0.3, gaps_seconds=[0.1, 0.1], output_tokens=3)

    async def count_tokens(self, text: str) -> int | None:
        return None


async def test_an_open_loop_sends_when_due_whatever_the_answers_do() -> None:
    gate = Gate(enough=4)  # nobody is answered before the last one was sent
    began = time.monotonic()
    run = await run_load(gate, requests(0.0, 0.01, 0.02, 0.02), LoadOptions(), scale=SCALE, stop=asyncio.Event())
    assert [record.answer.failure for record in run.records] == [None] * 4
    offsets = [due - gate.due[0] for due in gate.due]
    assert offsets == pytest.approx([0.0, 0.01, 0.02, 0.02], abs=1e-6)  # latencies count from here
    assert gate.due[0] >= began


async def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    gate = Gate(enough=3)
    run = await run_load(gate, requests(*[0.0] * 20), LoadOptions(concurrency=3), scale=SCALE, stop=asyncio.Event())
    assert gate.most == 3
    assert sorted(record.request.index for record in run.records) == list(range(20))
    assert run.gaps.total == 40


@pytest.mark.parametrize("concurrency", [None, 2])
async def test_a_stopped_run_keeps_what_it_measured_and_counts_what_it_cut(concurrency: int | None) -> None:
    stop = asyncio.Event()

    class Stops(Gate):
        async def send(self, prompt: str, *, output_tokens: int, due: float) -> Answer:
            if len(self.due) == 2:
                stop.set()
                self._enough, self._open = 99, asyncio.Event()
            return await super().send(prompt, output_tokens=output_tokens, due=due)

    run = await run_load(
        Stops(enough=1), requests(*[0.0] * 9), LoadOptions(concurrency=concurrency), scale=SCALE, stop=stop
    )
    assert run.is_interrupted
    assert len(run.records) + run.unfinished == run.sent and run.unfinished >= 1
    assert run.running == 0


async def test_no_request_begins_after_the_duration() -> None:
    plan = requests(0.0, 0.0, 1000.0, 1001.0)
    run = await run_load(Gate(1), plan, LoadOptions(duration_seconds=5), scale=SCALE, stop=asyncio.Event())
    assert len(run.records) == 2 and not run.is_interrupted


async def test_a_bug_in_a_target_is_not_a_measurement() -> None:
    class Broken(Gate):
        async def send(self, prompt: str, *, output_tokens: int, due: float) -> Answer:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        await run_load(Broken(1), requests(0.0), LoadOptions(), scale=SCALE, stop=asyncio.Event())


def test_percentiles_of_gaps_are_right_to_a_percent() -> None:
    rng = random.Random(5)
    gaps = [rng.lognormvariate(-4, 1) for _ in range(5000)]
    histogram = GapHistogram()
    histogram.add(gaps)
    for percent in bench_report.PERCENTS:
        assert histogram.percentile(percent) == pytest.approx(percentile(gaps, percent), rel=0.01)
    assert histogram.sum_seconds == pytest.approx(sum(gaps))
    assert GapHistogram().percentile(50) is None


def make_run() -> Run:
    """Ten good requests in ten seconds, the n-th with a TTFT of n tenths and gaps of n hundredths; two that failed."""
    run = Run(began_at=1.7e9, duration_seconds=10.0, sent=13, unfinished=1)
    for n in range(1, 11):
        answer = Answer(
            ttft_seconds=n / 10,
            e2e_seconds=n / 10 + 4 * n / 100,
            output_tokens=5,
            prompt_tokens=100,
            finish_reason="length",
        )
        run.records.append(Record(PlannedRequest(n, n / 2, 100, 5), n / 2, 0.0, n / 100, answer))
        run.gaps.add([n / 100] * 4)
    for n in (11, 12):
        answer = Answer(failure=f"HTTP 429: request {n} is too many")
        run.records.append(Record(PlannedRequest(n, n / 2, 100, 5), n / 2, 0.0, None, answer))
    return run


def test_figures_are_of_the_successful_requests() -> None:
    summary = bench_report.summarise(make_run(), bench_report.parse_goals(["ttft:800", "itl:50ms", "e2el:2s"]))
    assert (summary.completed, summary.failed, summary.unfinished) == (10, 2, 1)
    assert summary.failures == {"HTTP 429": (2, "HTTP 429: request 11 is too many")}
    assert (summary.requests_per_second, summary.output_tokens_per_second) == (1.0, 5.0)
    assert summary.total_tokens_per_second == 105.0
    ttft, tpot = summary.latencies["ttft"], summary.latencies["tpot"]
    assert ttft.percentiles_seconds == {50: 0.5, 90: 0.9, 95: 1.0, 99: 1.0}
    assert tpot.percentiles_seconds[50] == pytest.approx(0.05)
    assert (ttft.met_share, summary.latencies["itl"].met_share) == (0.8, 0.5)
    assert summary.good == 5 and summary.goodput_per_second == 0.5  # both goals


def test_without_goals_there_is_no_goodput() -> None:
    summary = bench_report.summarise(make_run(), {})
    assert summary.goodput_per_second is None
    assert "goodput" not in bench_report.text(summary, title="t")
    assert bench_report.as_json(make_run(), summary, {})["request_goodput"] is None


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "tftt:5", "itl:inf"])
def test_a_goal_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no goal"):
        bench_report.parse_goals([text])


def test_goals_are_milliseconds_unless_they_say_seconds() -> None:
    assert bench_report.parse_goals(["ttft:500", "itl:50ms", "e2el:2s"]) == {"ttft": 0.5, "itl": 0.05, "e2el": 2.0}


def test_the_text_says_what_makes_the_figures_doubtful() -> None:
    run = make_run()
    assert bench_report.warnings(bench_report.summarise(run, {})) == []
    short = Answer(ttft_seconds=1.0, e2e_seconds=1.0, output_tokens=1, prompt_tokens=900)
    run.records.append(Record(PlannedRequest(13, 0.0, 100, 50), 0.0, 3.0, None, short))
    found = " ".join(bench_report.warnings(bench_report.summarise(run, {})))
    assert "prompts had 1900 tokens" in found and "ignore_eos" in found and "late" in found


def test_nothing_measured_is_unknown_and_not_zero() -> None:
    run = Run(began_at=0.0)
    summary = bench_report.summarise(run, {"ttft": 1.0})
    assert summary.latencies["ttft"].mean_seconds is None and summary.latencies["ttft"].met_share is None
    assert bench_report.text(summary, title="t") and bench_report.html(run, summary, {}, title="t")


def test_the_page_is_whole_and_has_the_plots() -> None:
    run = make_run()
    summary = bench_report.summarise(run, {"ttft": 0.8})
    page = bench_report.html(run, summary, {"url": "http://<host>"}, title="a & b")
    root = ElementTree.fromstring("<main>" + page.split("<main>", 1)[1].split("</main>", 1)[0] + "</main>")
    assert len(root.findall(".//svg")) == 5
    assert len(root.findall(".//circle[@class='dot']")) == 30
    assert "http://&lt;host&gt;" in page and "HTTP 429" in page
    assert "http:" not in re.sub(r"http://&lt;host&gt;", "", page)  # nothing is fetched


# --- the command


async def bench(*flags: str, interrupt_at: str | None = None) -> tuple[int, str, str]:
    """Run the command; returns exit code, output and what went to the terminal."""
    command = [sys.executable, "-m", "tidegate_engine.cli", "bench", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said = b""
    if interrupt_at is not None:
        while interrupt_at.encode() not in said:
            line = await process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), (said + err).decode()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_server_is_measured_with_the_lengths_that_were_asked_for(
    endpoint: str, start_engine: StartEngine, tmp_path: Path
) -> None:
    process = await start_engine()
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    code, out, err = await bench(
        "--url", f"http://127.0.0.1:{process.api_port}/v1/", "--endpoint", endpoint,
        "--isl", "uniform:40,80", "--osl", "9", "--rate", "200", "--num-prompts", "12", "--num-warmups", "2",
        "--goodput", "ttft:60s", "--json", str(result), "--html", str(page),
    )  # fmt: skip
    assert code == 0, err
    figures = json.loads(result.read_text())
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (12, 0, 108)
    assert 12 * 40 * 0.9 < figures["total_input_tokens"] < 12 * 80 * 1.1
    assert figures["warnings"] == [] or "late" in figures["warnings"][0]
    assert figures["goal_ttft_met_share"] == 1.0 and figures["request_goodput"] == figures["request_throughput"]
    assert 0 < figures["median_ttft_ms"] <= figures["median_e2el_ms"] <= figures["p99_e2el_ms"]
    assert "12 completed, 0 failed" in out and "fast at http" in out
    assert page.read_text().startswith("<!doctype html>")


async def test_errors_are_told_by_kind_and_by_the_exit_code(start_engine: StartEngine, tmp_path: Path) -> None:
    process = await start_engine()
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,isl,osl\n0,20,3\n0.01,4000,3\n0.02,20,3\n")
    code, out, err = await bench(
        "--url", f"http://127.0.0.1:{process.api_port}", "--trace", str(trace), "--num-warmups", "0", "--json", "-"
    )
    assert code == 1, err
    figures = json.loads(out)  # the text went to the terminal
    assert (figures["completed"], figures["failures"]) == (2, {"HTTP 400": 1})
    assert "1 x HTTP 400" in err
    code, out, _ = await bench(
        "--url", f"http://127.0.0.1:{process.api_port}", "--trace", str(trace), "--max-model-len", "512"
    )
    assert code == 0 and "1 requests of the trace left out" in out


async def test_an_engine_in_this_process_is_measured_and_ctrl_c_shows_what_there_is(fast_profile_file: Path) -> None:
    here = ("--runner", "modelled", "--profile", str(fast_profile_file), "--json", "-")
    code, out, err = await bench(*here, "--isl", "50", "--osl", "9", "--concurrency", "4", "--num-prompts", "8")
    assert code == 0, err
    figures = json.loads(out)
    assert (figures["completed"], figures["total_output_tokens"]) == (8, 72)
    code, out, err = await bench(
        *here, "--isl", "9", "--osl", "400", "--duration", "600", "--num-warmups", "0", interrupt_at="Measuring"
    )
    assert code == 130, err
    figures = json.loads(out)
    assert figures["interrupted"] and figures["unfinished"] == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "give --url"),
        (("--url", "http://x", "--rate", "1", "--concurrency", "2"), "contradict"),
        (("--url", "http://x", "--trace", "t", "--rate", "1"), "its own arrivals"),
        (("--url", "http://x", "--precision", "int8"), "--precision has no effect"),
        (("--url", "http://127.0.0.1:9"), "TargetUnavailable"),
        (("--url", "http://127.0.0.1:9", "--model", "m"), "TargetUnavailable"),
        (("--url", "http://x", "--model", "m", "--extra-body", "["), "--extra-body"),
        (("--url", "http://x", "--isl", "many"), "WorkloadInvalid"),
        (("--url", "http://x", "--goodput", "ttft"), "--goodput"),
        (("--url", "http://x", "--concurrency", "0"), "--concurrency"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == 2
    assert says in capsys.readouterr().err


async def test_a_models_file_is_measured_without_a_server() -> None:
    from tidegate_local import model

    flags = ("--num-prompts", "2", "--num-warmups", "0", "--isl", "20", "--osl", "4", "--json", "-")
    code, out, err = await bench("--model", str(model.path()), "--num-gpu-blocks-override", "40", *flags)
    assert code == 0, err
    assert json.loads(out)["completed"] == 2


def test_the_api_key_is_in_no_result() -> None:
    assert not any("api_key" in name for name in _options_of("--url", "http://x", "--api-key", "secret"))


def _options_of(*flags: str) -> dict[str, Any]:
    from tidegate_engine import bench_command, cli

    args = cli._parser().parse_args(["bench", *flags])
    return dict(bench_command._options(args))
