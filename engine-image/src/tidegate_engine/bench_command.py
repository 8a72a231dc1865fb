"""`tidegate-engine bench`: its flags, what they mean together, and the run in the terminal.

Reads flags and writes files; measuring is `bench`'s, figures are `bench_report`'s. `cli` gives it the engine to measure
when there is no server. Imports nothing that only a benchmark needs before one is run.
"""

import argparse
import asyncio
import json
import math
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tidegate_engine.workload import (
    MAX_REQUESTS,
    PlannedRequest,
    Window,
    WorkloadError,
    made_up,
    parse_lengths,
    poisson,
    read_trace,
)

if TYPE_CHECKING:
    from tidegate_engine.bench import Run, Target
    from tidegate_engine.engine import Engine

DEFAULT_COUNT = 100
QUIET_SECONDS = 10
"""Between two lines of progress where no terminal is."""
EXIT_FAILURES = 1
EXIT_INTERRUPTED = 130
DESCRIPTION = """\
Measure a server that speaks OpenAI's API (this one, vLLM, llama.cpp, ...), or a model file in this process.

What is sent is a trace (--trace) or made up (--isl, --osl). When it is sent is the trace's affair, or that of --rate
(open loop: a request goes out when it is due, however slow the answers are, and latencies count from then), or of
--concurrency (closed loop: one request follows another, which hides how long others would have waited)."""
EPILOG = """\
examples:
  one stream, prompts of 512 tokens, answers of 64
    tidegate-engine bench --url http://localhost:8000 --isl 512 --osl 64
  16 at a time, lengths that vary
    tidegate-engine bench --url http://localhost:8000 --concurrency 16 --isl lognormal:256,0.8 --osl uniform:16,256
  what share of 4 requests a second is served in time
    tidegate-engine bench --url http://localhost:8000 --rate 4 --duration 60 --goodput ttft:500 itl:50
  ten minutes of a trace in one, with a page of plots
    tidegate-engine bench --url http://localhost:8000 --trace conv.csv --speed 10 --duration 60 --html conv.html
  a model file, without HTTP
    tidegate-engine bench --model model.gguf --concurrency 16 --precision int8

exit code: 0 when every request succeeded, 1 when one failed, 130 after Ctrl-C, which prints what was measured."""


class BenchError(Exception):
    """Flags that do not make a benchmark, or a server that cannot be measured: `Reason: sentence`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")


@dataclass(frozen=True, slots=True)
class EngineHere:
    """A loaded engine that is not started, and what makes ids of a text."""

    engine: "Engine"
    encode: Callable[[str], list[int]]


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """All but those of an engine in this process."""
    target = parser.add_argument_group("what is measured")
    target.add_argument("--url", "--base-url", metavar="URL", help="server, with or without /v1; default: --model here")
    target.add_argument(
        "--model", metavar="NAME|FILE", help="with --url the served name (default: the first); else a file or folder"
    )
    target.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="which call is made (completions)"
    )
    target.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    target.add_argument(
        "--extra-body", metavar="JSON", default="{}", help="added to every request, such as '{\"top_p\": 0.9}'"
    )
    target.add_argument("--timeout", type=_above_zero, default=600.0, metavar="SECONDS", help="for one request (600)")
    content = parser.add_argument_group("what is sent")
    content.add_argument(
        "--trace", "--dataset-path", type=Path, metavar="FILE",
        help="CSV with arrival,isl,osl, Azure's or BurstGPT's, or Mooncake's JSON lines, whose shared prefixes are "
        "kept; may be gzipped",
    )  # fmt: skip
    content.add_argument(
        "--isl", "--random-input-len", default="128", metavar="LENGTHS",
        help="tokens of a prompt: 512, uniform:128,1024 or lognormal:512,0.8 (median, sigma) (128)",
    )  # fmt: skip
    content.add_argument(
        "--osl", "--random-output-len", default="128", metavar="LENGTHS", help="tokens of an answer, likewise (128)"
    )
    content.add_argument("--num-prompts", type=_count, metavar="N", help=f"requests ({DEFAULT_COUNT}; a trace: all)")
    content.add_argument(
        "--start", type=_not_negative, default=0.0, metavar="SECONDS", help="leave out a trace's begin"
    )
    content.add_argument("--speed", type=_above_zero, default=1.0, metavar="X", help="replay a trace X times as fast")
    content.add_argument(
        "--length-scale", type=_above_zero, default=1.0, metavar="X", help="multiply a trace's lengths by X"
    )
    content.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same requests (0)")
    pace = parser.add_argument_group("when it is sent")
    pace.add_argument(
        "--rate", "--request-rate", type=_above_zero, metavar="R", help="requests a second, by a Poisson process"
    )
    pace.add_argument(
        "--burstiness", type=_above_zero, default=1.0, metavar="X",
        help="with --rate: gamma distributed gaps, 1 is Poisson, less comes in bursts, inf at even distances (1)",
    )  # fmt: skip
    pace.add_argument(
        "--concurrency", "--max-concurrency", type=_count, metavar="N", help="N requests at a time (1 without --rate)"
    )
    pace.add_argument(
        "--duration", type=_above_zero, default=math.inf, metavar="SECONDS", help="no request begins later"
    )
    pace.add_argument(
        "--num-warmups", type=_not_negative_count, default=4, metavar="N", help="requests that do not count, first (4)"
    )
    result = parser.add_argument_group("results")
    result.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="goals for ttft, tpot, itl (the request's 95th percentile) and e2el, such as ttft:500 itl:50",
    )  # fmt: skip
    result.add_argument("--json", metavar="FILE", help="all figures, named as vLLM's; - is standard output")
    result.add_argument("--html", type=Path, metavar="FILE", help="a page with plots")


def run_bench(args: argparse.Namespace, load_engine: Callable[[], EngineHere]) -> int:
    """Measure and print; returns the exit code. Raises BenchError."""
    from tidegate_engine import bench_report
    from tidegate_engine.bench import TargetError

    options = _options(args)
    try:
        goals = bench_report.parse_goals(args.goodput)
        requests, skipped = _requests(args)
    except WorkloadError as error:
        raise BenchError("WorkloadInvalid", str(error)) from error
    except ValueError as error:
        raise BenchError("FlagsInvalid", f"--goodput: {error}") from error
    here = None if args.url is not None else load_engine()
    try:
        run, title = asyncio.run(_measure(args, requests, here))
    except TargetError as error:
        raise BenchError("TargetUnavailable", str(error)) from error
    summary = bench_report.summarise(run, goals)
    if skipped:
        title += f"; {skipped} requests of the trace left out: they have no tokens, or are too long"
    as_json = json.dumps(bench_report.as_json(run, summary, options), indent=2)
    print(bench_report.text(summary, title=title), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json == "-":
        print(as_json)
    elif args.json is not None:
        _write(Path(args.json), as_json + "\n")
    if args.html is not None:
        _write(args.html, bench_report.html(run, summary, options, title=title))
    if run.is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURES if summary.failed or not summary.completed else 0


def _options(args: argparse.Namespace) -> Mapping[str, object]:
    """What was asked for, without secrets and what was left unsaid; refuses what contradicts itself."""
    if args.url is None and args.model is None and args.runner != "modelled":
        raise BenchError("FlagsInvalid", "give --url of a server, or --model with a file to measure it in this process")
    if args.rate is not None and args.concurrency is not None:
        raise BenchError(
            "FlagsInvalid",
            "--rate and --concurrency contradict each other: requests that wait for a place are not sent when due",
        )
    if args.rate is not None and args.trace is not None:
        raise BenchError("FlagsInvalid", "a trace has its own arrivals; use --speed in place of --rate")
    unsaid = {"command", "api_key", *(("rate", "isl", "osl", "burstiness") if args.trace is not None else ())}
    known = {name: value for name, value in vars(args).items() if value not in (None, [], False, math.inf)}
    return {name: _plain(value) for name, value in known.items() if name not in unsaid}


def _plain(value: object) -> object:
    return value if isinstance(value, (str, int, float, bool, list)) else str(value)


def _requests(args: argparse.Namespace) -> tuple[Iterator[PlannedRequest], int]:
    """What to send, and how many rows of the trace cannot be."""
    if args.trace is not None:
        window = Window(
            start_seconds=args.start,
            duration_seconds=args.duration,
            speed=args.speed,
            length_scale=args.length_scale,
            max_model_len=args.max_model_len,
            count=args.num_prompts,
        )
        trace = read_trace(args.trace, window)
        return iter(trace.requests), trace.skipped
    rng = random.Random(args.seed)
    arrivals = repeat(0.0) if args.rate is None else poisson(args.rate, burstiness=args.burstiness, rng=rng)
    count = args.num_prompts or (DEFAULT_COUNT if math.isinf(args.duration) else MAX_REQUESTS)
    lengths = parse_lengths(args.isl), parse_lengths(args.osl)
    # Lengths have a generator of their own, so that another rate sends the same requests.
    return made_up(*lengths, arrivals=islice(arrivals, count), rng=random.Random(args.seed + 1)), 0


async def _measure(
    args: argparse.Namespace, requests: Iterator[PlannedRequest], here: EngineHere | None
) -> tuple["Run", str]:
    """The run, and a sentence about what was measured."""
    from tidegate_engine.bench import InProcess, LoadOptions, run_load, scale_of

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        target: Target
        if here is None:
            target, what = await _server(args, stack)
        else:
            here.engine.start()
            stack.callback(here.engine.stop)
            target, what = InProcess(here.engine, here.encode), f"{args.model} in this process"
        scale = await scale_of(target, seed=args.seed)
        warmups = list(islice(requests, args.num_warmups))
        requests = chain(warmups, requests)
        progress = Progress(sys.stderr)

        def interrupt() -> None:
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends at once

        loop.add_signal_handler(signal.SIGINT, interrupt)
        if warmups:
            progress.say(f"Warming up with {len(warmups)} requests")
            first = [replace(each, index=-1 - each.index, prefix_ids=()) for each in warmups]
            await run_load(
                target, iter(first), LoadOptions(concurrency=len(first), seed=args.seed), scale=scale, stop=stop
            )
        concurrency = args.concurrency or (None if args.rate is not None or args.trace is not None else 1)
        options = LoadOptions(concurrency=concurrency, duration_seconds=args.duration, seed=args.seed)
        progress.say(f"Measuring {what}; Ctrl-C ends it and shows what was measured")
        try:
            run = await run_load(target, requests, options, scale=scale, stop=stop, watch=progress.show)
        finally:
            progress.end()
    return run, f"{what}, {_pace(args, concurrency)}"


async def _server(args: argparse.Namespace, stack: AsyncExitStack) -> tuple["Target", str]:
    from tidegate_engine.bench import Server, served_model
    from tidegate_engine.load_client import Endpoint, open_session

    url = args.url.rstrip("/").removesuffix("/v1")
    try:
        extra = json.loads(args.extra_body)
    except ValueError as error:
        raise BenchError("FlagsInvalid", f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise BenchError("FlagsInvalid", "--extra-body must be a JSON object")
    name = args.model or await served_model(url, api_key=args.api_key)
    endpoint = Endpoint(url, name, args.endpoint == "chat", args.timeout, args.api_key, extra)
    session = await stack.enter_async_context(open_session(endpoint, keep_alive=True))
    return Server(endpoint, session), f"{name} at {url}"


def _pace(args: argparse.Namespace, concurrency: int | None) -> str:
    what = f"the trace {args.trace.name}" if args.trace is not None else f"prompts of {args.isl}, answers of {args.osl}"
    if concurrency is not None:
        return f"{what}, {concurrency} at a time"
    return f"{what}, {f'{args.rate:g} a second' if args.rate is not None else f'{args.speed:g} times as fast'}"


class Progress:
    """Lines about the run: one that is redrawn on a terminal, one every ten seconds elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._shown_at = 0.0

    def say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def show(self, run: "Run") -> None:
        seconds, failed = run.duration_seconds, sum(record.answer.failure is not None for record in run.records[-1000:])
        line = f"{seconds:6.0f} s  {len(run.records)} ended, {run.running} in flight" + (", some failed" * bool(failed))
        if self._is_terminal:
            print(f"\r\x1b[K{line}", end="", file=self._out, flush=True)
        elif seconds - self._shown_at >= QUIET_SECONDS:
            self._shown_at = seconds
            self.say(line)

    def end(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=self._out, flush=True)


def refuse_with_url(args: argparse.Namespace, engine_flags: Sequence[argparse.Action]) -> None:
    """A server was started with flags of its own: with --url, forget those of an engine here. Raises BenchError."""
    if args.url is None:
        return
    given = [action.option_strings[0] for action in engine_flags if getattr(args, action.dest) != action.default]
    if given:
        raise BenchError(
            "FlagsInvalid", f"{', '.join(given)} has no effect on the server at --url; give it to the server"
        )
    for action in engine_flags:
        setattr(args, action.dest, None)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise BenchError("OutputFailed", f"{path} cannot be written: {error.strerror}") from error


def _above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_REQUESTS:
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_REQUESTS}, not {text}")
    return value


def _not_negative_count(text: str) -> int:
    return 0 if text == "0" else _count(text)
