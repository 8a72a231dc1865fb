"""The demo's words and objects: what is printed, and that the objects are ones that the operator reads as meant."""

import io
import json

import pytest
from rich.console import Console

from tidegate_local import demo, demo_objects, load, terminal
from tidegate_local.recording import PodFact, Sample, Settings
from tidegate_operator import api

SAMPLE = Sample(
    at=0,
    arrivals_per_second=1.5,
    mix={"ShortInLongOut": 0.9, "LongInShortOut": 0.08, "LongInLongOut": 0.02},
    ttft_p95_seconds=0.25,
    waiting=3,
    desired_replicas=2,
    ready_replicas=1,
    settings=Settings(16, 2048, 256),
    reason="DemandAboveCapacity",
    message="1 → 2 replicas",
    pods=(PodFact("a", "1", True, 0), PodFact("b", "2", False, 0), PodFact("c", "3", True, 0, terminating=True)),
)


def console(*, live: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=live, width=200, height=40), stream


def test_a_line_says_everything_that_the_operator_sees_and_decides() -> None:
    line = terminal.plain_line(SAMPLE, phase="burst", elapsed_seconds=75)
    for part in (
        "75 s",
        "burst",
        "1.50/s",
        "ShortInLongOut 90 %",
        "0.25 s",
        "waiting   3",
        "1/2",
        "16 seq",
        "DemandAbove",
    ):
        assert part in line
    assert "LongInLongOut" not in line


def test_what_is_unknown_is_shown_as_unknown() -> None:
    line = terminal.plain_line(Sample(at=0), phase="starting", elapsed_seconds=0)
    assert "None" not in line and " 0/s" not in line and "–" in line


def test_replicas_tell_who_starts_and_who_drains() -> None:
    assert terminal.replicas_text(SAMPLE) == "1 ready of 2 wanted, 1 starting, 1 draining"


def test_without_a_terminal_a_line_comes_every_few_seconds_and_news_at_once() -> None:
    target, stream = console(live=False)
    view = terminal.View(target)
    with view.shown():
        for second in range(0, 12, 2):
            view.sample(SAMPLE, phase="burst", elapsed_seconds=second)
        view.news("Scaled: 1 → 2", elapsed_seconds=11)
    lines = stream.getvalue().splitlines()
    assert sum("burst" in line for line in lines) == 2
    assert any("Scaled: 1 → 2" in line for line in lines)


def test_on_a_terminal_the_panel_is_drawn_with_its_reason() -> None:
    target, stream = console(live=True)
    view = terminal.View(target)
    with view.shown():
        view.sample(SAMPLE, phase="burst", elapsed_seconds=3)
    assert "DemandAboveCapacity" in stream.getvalue() and "2 wanted" in stream.getvalue()


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [1.0, 2.0, 0.0]])
def test_a_sparkline_has_a_bar_for_each_value(values: list[float]) -> None:
    assert len(terminal.sparkline(values)) == len(values)


def test_the_objects_are_read_as_meant() -> None:
    tide = api.parse_spec(demo_objects.tide(demo_objects.Images(), gpus=1)["spec"])
    assert tide.envelope().max_num_seqs == (32, 64)
    assert tide.replica_bounds() == (1, 3)
    assert tide.autoscaling.sync_period_seconds == 5
    chat = api.parse_spec(demo_objects.chat(demo_objects.Images())["spec"])
    assert chat.fixed_replicas() == 1 and chat.resources.gpu.count == 0


def test_the_load_pod_carries_the_program_and_phases_that_it_can_read() -> None:
    config, pod = demo_objects.load_objects(demo_objects.Images())
    assert load.parse_phases(json.loads(config["data"]["phases.json"])) == demo_objects.PHASES
    compile(config["data"]["load.py"], "load.py", "exec")
    assert "tidegate_local" not in config["data"]["load.py"]
    assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_phases_are_the_patterns_that_they_are_called() -> None:
    assert [phase.name for phase in demo_objects.PHASES] == [
        "short in, long out",
        "long in, short out",
        "burst",
        "quiet",
    ]
    assert demo_objects.SHORT_LONG.output_tokens[0] >= 256 and demo_objects.SHORT_LONG.input_tokens[1] < 1024
    assert demo_objects.LONG_SHORT.input_tokens[0] >= 1024 and demo_objects.LONG_SHORT.output_tokens[1] < 256


def test_with_a_context_no_gpu_is_asked_for_unless_said() -> None:
    def options(*words: str) -> demo.Options:
        return demo.options_of(demo.build_parser().parse_args(words))

    assert options().gpus == 1 and options("--context", "mine").gpus == 0
    assert options("--context", "mine", "--gpus-per-replica", "2").gpus == 2
    assert options("--context", "").context is None
