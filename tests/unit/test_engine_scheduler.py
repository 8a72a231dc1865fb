"""The batch scheduler, driven by a runner that checks each position's keys and values before it 'computes' a step.

The fake runner's next token depends on the whole sequence and on nothing else, so that preemption, chunking, prefix
hits and changes of settings must leave every stream as it is.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate_engine.blocks import NULL_BLOCK, BlockPool, blocks_that_hold, windows_of
from tidegate_engine.host_pool import HostPool
from tidegate_engine.live_policy import LivePolicy, change_policy, policy_bounds
from tidegate_engine.ngrams import NgramSpeculation
from tidegate_engine.request import (
    Decodes,
    FinishReason,
    Request,
    RequestState,
    SampledToken,
    SamplingParams,
    Step,
    StepItem,
    TokenEvent,
    Window,
)
from tidegate_engine.scheduler import AGEING_SECONDS, MAX_BYPASSES, RESERVE_RATIO_START, RequestRefused, Scheduler
from tidegate_engine.settings import DEFAULT_SETTINGS, BatchSettings, Violation

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
BLOCK = 4
EOS = 0
POLICY_BOUNDS = policy_bounds(max_model_len=1000, max_num_batched_tokens=64)
WIDE = BatchSettings(max_num_seqs=64, max_num_batched_tokens=4096, long_prefill_token_threshold=4096)


def next_token(salt: str, ids: Sequence[int]) -> int:
    """The fake model: any function of the sequence."""
    return sum((index + 7) * (token + 3) for index, token in enumerate(ids)) * 31 % 11


def expected_output(request: Request) -> tuple[list[int], FinishReason]:
    """What the request yields when it runs alone."""
    output: list[int] = []
    params = request.params
    while True:
        token = next_token(request.cache_salt, [*request.prompt_ids, *output])
        output.append(token)
        stops = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        if stops and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
        if len(output) >= request.max_tokens:
            return output, FinishReason.LENGTH


class FakeRunner:
    """Keeps what each slot holds: (salt, group, ids up to there). Fails when a step reads what was not written.

    A group of layers reads as far back as its window says.
    """

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        self.windows = windows
        self.slots: dict[tuple[int, int], tuple[object, ...]] = {}
        self.host: dict[tuple[int, int], tuple[object, ...]] = {}

    def copy(self, step: Step) -> None:
        assert len({copy.slot for copy in step.stores}) == len(step.stores)
        for there in step.stores:
            for offset in range(BLOCK):
                self.host[there.slot, offset] = self.slots[there.block, offset]
        for back in step.loads:
            for offset in range(BLOCK):
                self.slots[back.block, offset] = self.host[back.slot, offset]

    def run(self, step: Step) -> dict[str, SampledToken]:
        self.copy(step)
        tokens = {}
        for item in step.items:
            request = item.request
            known = request.token_ids(0, request.total_tokens)
            ids = [*known, *item.drafts]
            assert item.count >= 1 and item.start + item.count <= len(ids)
            assert item.samples == (item.start + item.count == len(ids))
            for group, tokens_seen in enumerate(self.windows):
                window = Window(len(ids)) if tokens_seen is None else Window(tokens_seen)
                self.attend(item, ids, group=group, window=request.window or window)
            if item.samples:
                chosen = [next_token(request.cache_salt, known)]
                while len(chosen) <= len(item.drafts) and item.drafts[len(chosen) - 1] == chosen[-1]:
                    chosen.append(next_token(request.cache_salt, [*known, *chosen]))
                first, *following = [SampledToken(token, is_eos=token == EOS) for token in chosen]
                tokens[request.id] = first._replace(following=tuple(following))
        return tokens

    def attend(self, item: StepItem, ids: Sequence[int], *, group: int, window: Window) -> None:
        request = item.request
        for position in range(item.start + item.count):
            if window.sinks <= position <= item.start - window.tokens:
                continue
            block = item.blocks[position // BLOCK * len(self.windows) + group]
            assert block != NULL_BLOCK, f"{request.id} has no block for position {position} in group {group}"
            slot = block, position % BLOCK
            content = (request.cache_salt, request.window, group, *ids[: position + 1])
            if position < item.start:
                assert self.slots.get(slot) == content, f"{request.id} reads position {position}, never written"
            self.slots[slot] = content


def make_request(
    name: str,
    prompt: Iterable[int],
    *,
    max_tokens: int = 8,
    arrival: float = 0.0,
    priority: int = 0,
    ignore_eos: bool = True,
) -> Request:
    ids = tuple(prompt)
    params = SamplingParams(ignore_eos=ignore_eos)
    return Request(name, len(ids), max_tokens, arrival, prompt_ids=ids, params=params, priority=priority)


def make_scheduler(
    settings: BatchSettings = WIDE,
    *,
    blocks: int = 200,
    prefix_caching: bool = True,
    speculation: NgramSpeculation | None = None,
    host_slots: int = 0,
    windows: Sequence[int | None] = (None,),
) -> Scheduler:
    host = HostPool(host_slots) if host_slots else None
    pool = BlockPool(1 + blocks, BLOCK, prefix_caching=prefix_caching, host=host, windows=windows)
    return Scheduler(settings, pool, max_model_len=1000, speculation=speculation)


def drive(scheduler: Scheduler, runner: FakeRunner, *, steps: int = 1, now: float = 0.0) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    for _ in range(steps):
        step = scheduler.plan(now)
        events += scheduler.commit(step, runner.run(step), now)
        scheduler.check_integrity()
    return events


def drain(scheduler: Scheduler, runner: FakeRunner, *, limit: int = 5000) -> list[TokenEvent]:
    """Step until all is done; fails when `limit` steps do not suffice."""
    events: list[TokenEvent] = []
    for _ in range(limit):
        if not scheduler.has_work:
            return events
        events += drive(scheduler, runner)
    raise AssertionError(f"{scheduler.running} running and {scheduler.waiting} waiting after {limit} steps")


def shape(step: Step) -> list[tuple[str, int, int]]:
    return [(item.request.id, item.start, item.count) for item in step.items]


def plan_and_commit(scheduler: Scheduler, *, now: float = 0.0) -> list[tuple[str, int, int]]:
    step = scheduler.plan(now)
    scheduler.commit(step, None, now)
    return shape(step)


# --- batches


def test_a_request_runs_from_prompt_to_length() -> None:
    scheduler = make_scheduler()
    request = make_request("a", range(1, 10), max_tokens=3)
    scheduler.add(request)
    assert (scheduler.waiting, scheduler.waiting_prompt_tokens) == (1, 9)
    runner = FakeRunner()
    assert [event.finish_reason for event in drain(scheduler, runner)] == [None, None, FinishReason.LENGTH]
    assert request.output_ids == expected_output(request)[0]
    assert request.state is RequestState.FINISHED
    assert scheduler.blocks.used == 0
    assert not scheduler.plan(0.0).items


def test_decodes_come_first_then_prefills_then_waiting_ones() -> None:
    scheduler = make_scheduler(BatchSettings(8, 10, 8))
    scheduler.add(make_request("a", range(4)))
    assert plan_and_commit(scheduler) == [("a", 0, 4)]
    scheduler.add(make_request("b", range(100, 112)))
    scheduler.add(make_request("c", range(200, 206)))
    assert plan_and_commit(scheduler) == [("a", 4, 1), ("b", 0, 8), ("c", 0, 1)]
    assert plan_and_commit(scheduler) == [("a", 5, 1), ("b", 8, 4), ("c", 1, 5)]
    assert plan_and_commit(scheduler) == [("a", 6, 1), ("b", 12, 1), ("c", 6, 1)]


def test_a_chunk_ends_on_a_block_and_keeps_to_the_threshold() -> None:
    scheduler = make_scheduler(BatchSettings(8, 100, 10))
    scheduler.add(make_request("a", range(30)))
    chunks = [plan_and_commit(scheduler) for _ in range(4)]
    assert chunks == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 8)], [("a", 24, 6)]]


def test_only_the_last_chunk_samples() -> None:
    scheduler = make_scheduler(BatchSettings(8, 100, 8))
    scheduler.add(make_request("a", range(10), max_tokens=1))
    first = scheduler.plan(0.0)
    assert [item.samples for item in first.items] == [False]
    assert not scheduler.commit(first, {}, 0.0)
    second = scheduler.plan(0.0)
    assert [item.samples for item in second.items] == [True]
    assert [event.finish_reason for event in scheduler.commit(second, None, 0.0)] == [FinishReason.LENGTH]


def test_waiting_requests_start_by_priority_then_arrival() -> None:
    scheduler = make_scheduler(BatchSettings(1, 100, 100))
    scheduler.add(make_request("late", range(4), arrival=2.0, max_tokens=1))
    scheduler.add(make_request("early", range(4), arrival=1.0, max_tokens=1))
    scheduler.add(make_request("urgent", range(4), arrival=3.0, priority=-1, max_tokens=1))
    assert [plan_and_commit(scheduler)[0][0] for _ in range(3)] == ["urgent", "early", "late"]


def test_a_waiting_request_ages_past_more_urgent_ones_that_come_much_later() -> None:
    scheduler = make_scheduler(BatchSettings(1, 100, 100))
    scheduler.add(make_request("patient", range(4), priority=2, max_tokens=1))
    for name, arrival in (("soon", 0.9), ("late", 1.1)):
        scheduler.add(make_request(name, range(4), arrival=arrival * 2 * AGEING_SECONDS, max_tokens=1))
    assert [plan_and_commit(scheduler)[0][0] for _ in range(3)] == ["soon", "patient", "late"]


def test_a_step_plans_once_and_is_committed_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(4)))
    step = scheduler.plan(0.0)
    with pytest.raises(RuntimeError, match="not committed yet"):
        scheduler.plan(0.0)
    scheduler.commit(step, None, 0.0)
    with pytest.raises(RuntimeError, match="not the one in flight"):
        scheduler.commit(step, None, 0.0)


def test_times_are_booked_by_the_callers_clock() -> None:
    scheduler = make_scheduler()
    request = make_request("a", range(4), max_tokens=3, arrival=1.0)
    scheduler.add(request)
    intervals = []
    for now in (2.0, 3.0, 5.0):
        step = scheduler.plan(now)
        intervals += [event.interval_seconds for event in scheduler.commit(step, None, now + 0.5)]
    assert intervals == [None, 1.0, 2.0]
    times = request.scheduled_at, request.first_token_at, request.last_token_at, request.finished_at
    assert times == (2.0, 2.5, 5.5, 5.5)


# --- what ends a request


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        (SamplingParams(), [5, EOS], FinishReason.STOP),
        (SamplingParams(ignore_eos=True), [5, EOS, 7, 8], FinishReason.LENGTH),
        (SamplingParams(min_tokens=3), [5, EOS, EOS], FinishReason.STOP),
        (SamplingParams(stop_token_ids=(7,)), [5, 7], FinishReason.STOP),
        (SamplingParams(stop_token_ids=(7,), ignore_eos=True), [EOS, 7], FinishReason.STOP),
        (SamplingParams(stop_token_ids=(7,), min_tokens=3), [7, 7, 7], FinishReason.STOP),
        (SamplingParams(min_tokens=9), [EOS, EOS, EOS, EOS], FinishReason.LENGTH),
    ],
)
def test_a_request_ends_for_the_right_reason(params: SamplingParams, tokens: list[int], reason: FinishReason) -> None:
    scheduler = make_scheduler()
    request = Request("a", 4, 4, 0.0, prompt_ids=(1, 2, 3, 4), params=params)
    scheduler.add(request)
    given = iter([*tokens, 9, 9, 9, 9])
    while scheduler.has_work:
        token = next(given)
        scheduler.commit(scheduler.plan(0.0), {"a": SampledToken(token, is_eos=token == EOS)}, 0.0)
    assert (request.output_ids, request.finish_reason) == (tokens, reason)


@pytest.mark.parametrize("answer", [{}, {"a": SampledToken(0, error="NaN logits")}])
def test_one_bad_request_ends_alone(answer: Mapping[str, SampledToken]) -> None:
    scheduler = make_scheduler()
    bad, good = make_request("a", range(9)), make_request("b", range(50, 59))
    for request in (bad, good):
        scheduler.add(request)
    events = list(scheduler.commit(scheduler.plan(0.0), {"b": SampledToken(3), **answer}, 0.0))
    assert [(event.request.id, event.finish_reason) for event in events] == [("a", FinishReason.ERROR), ("b", None)]
    assert (events[0].token or SampledToken(0)).error
    assert (bad.output_ids, good.output_ids) == ([], [3])
    assert scheduler.blocks.match(make_request("c", range(9))) == []  # what it wrote is not offered to others
    scheduler.check_integrity()


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    scheduler = make_scheduler(BatchSettings(1, 100, 100))
    scheduler.add(make_request("a", range(9)))
    other = make_request("b", range(50, 59))
    scheduler.add(other)
    events = list(scheduler.fail(scheduler.plan(0.0), "out of memory", 1.0))
    assert [(event.request.id, event.finish_reason) for event in events] == [("a", FinishReason.ERROR)]
    assert events[0].token == SampledToken(-1, error="out of memory")
    assert scheduler.blocks.used == 0
    drain(scheduler, FakeRunner())
    assert other.output_ids == expected_output(other)[0]


# --- what can never fit


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason", "numbers"),
    [
        (1000, 1, "ContextTooLong", ("1000", "1000")),
        (5000, 1, "ContextTooLong", ("5000", "1000")),
        (801, 1, "KvCacheTooSmall", ("801", "800")),
        (0, 1, "EmptyRequest", ("0", "1")),
        (5, 0, "EmptyRequest", ("5", "0")),
    ],
)
def test_what_can_never_fit_is_refused_with_both_numbers(
    prompt: int, max_tokens: int, reason: str, numbers: tuple[str, str]
) -> None:
    scheduler = make_scheduler(blocks=200)
    with pytest.raises(RequestRefused) as refusal:
        scheduler.add(Request("a", prompt, max_tokens, 0.0))
    assert refusal.value.reason == reason
    assert all(number in str(refusal.value) for number in numbers)
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("blocks", "prompt", "asked", "given_tokens"), [(200, 800, 5, 1), (200, 790, 50, 11), (500, 990, 50, 10)]
)
def test_output_that_cannot_fit_is_cut_and_recorded(blocks: int, prompt: int, asked: int, given_tokens: int) -> None:
    scheduler = make_scheduler(blocks=blocks)
    request = make_request("a", [1] * prompt, max_tokens=asked)
    scheduler.add(request)
    assert (request.max_tokens, request.requested_max_tokens) == (given_tokens, asked)
    drain(scheduler, FakeRunner())
    assert request.output_tokens == given_tokens
    fits = make_request("b", [1] * 10, max_tokens=5)
    scheduler.add(fits)
    assert fits.requested_max_tokens is None


def test_an_id_in_use_is_refused_and_free_again_at_the_end() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(4)))
    with pytest.raises(ValueError, match="already here"):
        scheduler.add(make_request("a", range(4)))
    scheduler.abort("a")
    scheduler.add(make_request("a", range(4)))


# --- abort


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_abort_in_any_state_frees_all_and_is_idempotent(steps: int) -> None:
    scheduler = make_scheduler(BatchSettings(8, 100, 8))
    request = make_request("a", range(12))
    scheduler.add(request)
    drive(scheduler, FakeRunner(), steps=steps)
    assert scheduler.abort("a", now=3.0) is request
    assert scheduler.abort("a") is None
    assert scheduler.abort("unknown") is None
    assert (request.finish_reason, request.finished_at) == (FinishReason.ABORT, 3.0)
    assert (scheduler.has_work, scheduler.blocks.used, scheduler.waiting_prompt_tokens) == (False, 0, 0)
    scheduler.check_integrity()


def test_blocks_of_an_abort_in_flight_come_back_after_the_commit() -> None:
    scheduler = make_scheduler(blocks=4)
    scheduler.add(make_request("a", range(12), max_tokens=2))
    step = scheduler.plan(0.0)
    scheduler.abort("a", reason=FinishReason.STOP)
    assert step.items[0].blocks  # the runner may still use the table
    assert scheduler.blocks.available == 1
    assert not scheduler.commit(step, {"a": SampledToken(1)}, 0.0)
    assert scheduler.blocks.available == 4
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("reason", "is_experienced"), [(FinishReason.STOP, True), (FinishReason.ABORT, False), (FinishReason.ERROR, False)]
)
def test_an_answer_that_ends_at_a_stop_string_teaches_its_length(reason: FinishReason, is_experienced: bool) -> None:
    runner, scheduler = FakeRunner(), Scheduler(WIDE, BlockPool(20, BLOCK), max_model_len=40)
    answered, unheard = (Request(name, 2, 30, 0.0, prompt_ids=[5, 6]) for name in "ab")
    scheduler.add(answered)
    step = scheduler.plan(0.0)
    scheduler.commit(step, runner.run(step), 0.0)
    scheduler.add(unheard)
    scheduler.abort("b", reason=reason)
    assert not scheduler._lengths.is_experienced, "it had no answer"
    scheduler.abort("a", reason=reason)
    assert scheduler._lengths.is_experienced is is_experienced


def test_an_id_used_again_while_its_step_is_in_flight_gets_no_foreign_token() -> None:
    scheduler = make_scheduler()
    runner = FakeRunner()
    scheduler.add(make_request("a", range(12)))
    step = scheduler.plan(0.0)
    scheduler.abort("a")
    again = make_request("a", range(30, 42))
    scheduler.add(again)
    assert not scheduler.commit(step, runner.run(step), 0.0)
    drain(scheduler, runner)
    assert again.output_ids == expected_output(again)[0]


# --- live settings


def test_raising_the_cap_acts_at_the_next_step() -> None:
    scheduler = make_scheduler(BatchSettings(1, 100, 100))
    for name in "abc":
        scheduler.add(make_request(name, range(4)))
    plan_and_commit(scheduler)
    assert (scheduler.running, scheduler.waiting) == (1, 2)
    version = scheduler.apply(replace(WIDE, max_num_seqs=3))
    step = scheduler.plan(0.0)
    assert (scheduler.running, step.settings_version) == (3, version)


def test_lowering_the_cap_drains_and_admits_none_until_below() -> None:
    scheduler = make_scheduler()
    for number in range(4):
        scheduler.add(make_request(f"r{number}", range(4), max_tokens=2 + 2 * number))
    plan_and_commit(scheduler)
    scheduler.add(make_request("new", range(4)))
    scheduler.apply(BatchSettings(2, 100, 100))
    assert scheduler.over_cap == 2
    seen = []
    while scheduler.waiting:
        seen.append((len(plan_and_commit(scheduler)), scheduler.running))
    # 4 run on, one ends with each second step, and the new one starts when fewer than 2 are left
    assert seen == [(4, 3), (3, 3), (3, 2), (2, 2), (2, 1), (2, 2)]
    assert scheduler.preemptions == {"kv": 0, "policy": 0}


def test_every_decode_goes_on_when_the_budget_falls_below_their_number() -> None:
    scheduler = make_scheduler()
    for number in range(6):
        scheduler.add(make_request(f"r{number}", range(4)))
    plan_and_commit(scheduler)
    scheduler.apply(BatchSettings(2, 2, 2))
    assert len(plan_and_commit(scheduler)) == 6


def test_settings_that_no_batch_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        make_scheduler().apply(BatchSettings(0, 1, 1))


# --- sharing


def test_a_later_request_skips_the_prefix_it_shares() -> None:
    scheduler = make_scheduler()
    runner = FakeRunner()
    scheduler.add(make_request("a", range(20)))
    drive(scheduler, runner)
    other = make_request("b", [*range(18), 98, 99])
    scheduler.add(other)
    assert shape(scheduler.plan(0.0)) == [("a", 20, 1), ("b", 16, 4)]
    assert other.num_cached == 16


def test_requests_of_one_step_do_not_share_what_is_not_written_yet() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, range(20)))
    assert shape(scheduler.plan(0.0)) == [("a", 0, 20), ("b", 0, 20)]


def test_a_conversation_finds_its_own_answer_in_the_cache() -> None:
    scheduler = make_scheduler()
    runner = FakeRunner()
    first = make_request("a", range(10), max_tokens=9)
    scheduler.add(first)
    drain(scheduler, runner)
    follow_up = make_request("b", [*first.prompt_ids, *first.output_ids, 50])
    scheduler.add(follow_up)
    drain(scheduler, runner)
    assert follow_up.num_cached == 16  # of 18 computed before; the 19th never was
    assert follow_up.output_ids == expected_output(follow_up)[0]


def test_without_prefix_caching_nothing_is_shared() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    runner = FakeRunner()
    for name in "ab":
        scheduler.add(make_request(name, range(20)))
        drain(scheduler, runner)
    assert (scheduler.blocks.cached, scheduler.blocks.free) == (0, 200)


# --- host memory


def cycle(scheduler: Scheduler, runner: FakeRunner, ids: Sequence[int], *, name: str) -> Request:
    request = make_request(name, ids, max_tokens=4)
    scheduler.add(request)
    drain(scheduler, runner)
    return request


def test_an_evicted_prefix_comes_back_from_host_memory() -> None:
    scheduler = make_scheduler(blocks=14, host_slots=20)
    runner = FakeRunner()
    host = scheduler.blocks.host
    assert host is not None
    cycle(scheduler, runner, range(40), name="a")
    cycle(scheduler, runner, range(100, 140), name="b")
    assert host.stored_blocks > 0 and host.loaded_blocks == 0
    again = cycle(scheduler, runner, [*range(40), 7], name="again")
    assert again.num_cached == 40
    assert host.loaded_blocks == 10 - 3  # three of its blocks were still in the cache
    assert again.output_ids == expected_output(again)[0]


def test_the_host_pool_forgets_with_the_cache_and_holds_no_more_than_it_may() -> None:
    scheduler = make_scheduler(blocks=14, host_slots=5)
    runner = FakeRunner()
    host = scheduler.blocks.host
    assert host is not None
    for number in range(6):
        cycle(scheduler, runner, range(100 * number, 100 * number + 40), name=f"r{number}")
        assert host.used <= 5
    assert host.used == 5
    scheduler.flush_cache()
    assert host.used == 0
    again = cycle(scheduler, runner, range(500, 540), name="again")
    assert (again.num_cached, host.loaded_blocks) == (0, 0)


def test_a_step_that_failed_has_stored_nothing() -> None:
    scheduler = make_scheduler(blocks=14, host_slots=20)
    runner = FakeRunner()
    host = scheduler.blocks.host
    assert host is not None
    cycle(scheduler, runner, range(40), name="a")
    scheduler.add(make_request("b", range(100, 140)))
    step = scheduler.plan(0.0)
    assert len(step.stores) == host.used == 6
    scheduler.fail(step, "lost", 0.0)
    assert host.used == 0
    scheduler.check_integrity()


# --- pressure


def test_the_latest_of_the_lowest_priority_gives_way_and_the_oldest_never_does() -> None:
    scheduler = make_scheduler(blocks=12)
    runner = FakeRunner()
    requests = [
        make_request("old", range(12), max_tokens=30, arrival=0.0),
        make_request("mid", range(100, 108), max_tokens=30, arrival=1.0),
        make_request("low", range(200, 208), max_tokens=9, arrival=0.5, priority=5),
    ]
    for request in requests:
        scheduler.add(request)
        scheduler._reserve_ratio = 0.0  # let all in, so that they collide
        drive(scheduler, runner)
    assert scheduler.running == 3
    while not scheduler.preemptions["kv"]:
        drive(scheduler, runner)
    assert [request.preemptions for request in requests] == [0, 0, 1]
    ratio = scheduler.reserve_ratio
    assert ratio > 0.05
    drain(scheduler, runner)
    assert requests[0].preemptions == 0
    for request in requests:
        assert request.output_ids == expected_output(request)[0]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler = make_scheduler(blocks=20)
    runner = FakeRunner()
    old = make_request("old", range(8), max_tokens=60)
    new = make_request("new", range(100, 116), max_tokens=40, arrival=1.0)
    for request in (old, new):
        scheduler.add(request)
        scheduler._reserve_ratio = 0.0
        drive(scheduler, runner)
    while not new.preemptions:
        drive(scheduler, runner)
    scheduler.abort("old")
    held = new.total_tokens
    (item,) = scheduler.plan(0.0).items
    assert item.request is new and item.start >= held // 2


@pytest.mark.parametrize(("settings", "blocks"), [(BatchSettings(2, 100, 100), 200), (BatchSettings(8, 100, 100), 13)])
def test_an_urgent_request_takes_the_place_of_the_least_urgent_one_and_changes_no_token(
    settings: BatchSettings, blocks: int
) -> None:
    scheduler = make_scheduler(settings, blocks=blocks)
    runner = FakeRunner()
    first = make_request("first", range(8), max_tokens=10, priority=1)
    second = make_request("second", range(50, 58), max_tokens=10, priority=1, arrival=1.0)
    for request in (first, second):
        scheduler.add(request)
        scheduler._reserve_ratio = 0.0
        drive(scheduler, runner)
    urgent = make_request("urgent", range(100, 120), max_tokens=4, arrival=2.0)
    scheduler.add(urgent)
    for _ in range(3):
        scheduler._reserve_ratio = 0.0
        drive(scheduler, runner)
    assert [r.state for r in (first, second, urgent)] == [
        RequestState.RUNNING,
        RequestState.WAITING,
        RequestState.RUNNING,
    ]
    assert scheduler.preemptions == {"kv": 0, "policy": 1}
    drain(scheduler, runner)
    for request in (first, second, urgent):
        assert request.output_ids == expected_output(request)[0]


def test_a_request_of_its_age_is_not_sent_back_for_an_urgent_one() -> None:
    scheduler = make_scheduler(BatchSettings(1, 100, 100))
    scheduler.add(make_request("old", range(8), priority=1))
    plan_and_commit(scheduler)
    scheduler.add(make_request("urgent", range(8), arrival=AGEING_SECONDS + 1))
    plan_and_commit(scheduler)
    assert scheduler.preemptions == {"kv": 0, "policy": 0}


def test_a_cap_lowered_below_the_running_ones_sends_none_back_for_an_urgent_one() -> None:
    scheduler = make_scheduler()
    for number in range(3):
        scheduler.add(make_request(f"r{number}", range(8), priority=1))
    plan_and_commit(scheduler)
    scheduler.apply(BatchSettings(2, 100, 100))
    scheduler.add(make_request("urgent", range(8)))
    plan_and_commit(scheduler)
    assert (scheduler.running, scheduler.preemptions["policy"]) == (3, 0)


def test_admission_learns_that_answers_end_early() -> None:
    def admitted(lengths: Sequence[int]) -> int:
        scheduler = make_scheduler(blocks=40)
        for number, length in enumerate(lengths):
            short = make_request(f"l{number}", range(4), max_tokens=length)
            scheduler.add(short)
            drain(scheduler, FakeRunner())
        scheduler._reserve_ratio = RESERVE_RATIO_START
        scheduler.flush_cache()
        for number in range(12):
            prompt = range(number * 100, number * 100 + 8)
            scheduler.add(make_request(f"r{number}", prompt, max_tokens=60, ignore_eos=False))
        scheduler.plan(0.0)
        return scheduler.running

    assert admitted([]) == admitted([60] * 40) == 4
    assert admitted([3] * 40) > 6


def test_admission_keeps_room_for_output_to_come() -> None:
    scheduler = make_scheduler(blocks=40)
    for number in range(8):
        scheduler.add(make_request(f"r{number}", range(number * 100, number * 100 + 8), max_tokens=60))
    scheduler.plan(0.0)
    # 2 blocks each for the prompt; the ratio of 0.4 keeps back 6 blocks for each one's output, and 1 as a watermark.
    assert scheduler.running == 4
    assert scheduler.blocks.used == 8


def test_the_reserve_rises_with_preemption_and_decays() -> None:
    scheduler = make_scheduler()
    start = scheduler.reserve_ratio
    scheduler.add(make_request("a", range(4), max_tokens=500))
    for _ in range(450):
        plan_and_commit(scheduler)
    assert scheduler.reserve_ratio == pytest.approx(0.1)
    assert start == pytest.approx(0.4)


def test_a_request_without_room_is_overtaken_a_bounded_number_of_times() -> None:
    scheduler = make_scheduler(BatchSettings(4, 4096, 4096), blocks=60)
    runner = FakeRunner()
    scheduler.add(make_request("holder", range(1000, 1100), max_tokens=200))
    drive(scheduler, runner)
    big = make_request("big", range(2000, 2180), max_tokens=4)
    scheduler.add(big)
    overtakers = 0
    for number in range(400):
        small = make_request(f"s{number}", [3000 + number] * 4, max_tokens=1, arrival=1.0 + number)
        scheduler.add(small)
        drive(scheduler, runner)
        overtakers += small.state is RequestState.FINISHED and big.state is RequestState.WAITING
        if big.state is not RequestState.WAITING:
            break
    assert 1 <= overtakers <= MAX_BYPASSES
    drain(scheduler, runner)
    assert big.output_ids == expected_output(big)[0]


def test_a_flush_in_mid_stream_changes_no_token() -> None:
    scheduler = make_scheduler()
    runner = FakeRunner()
    request = make_request("a", range(10), max_tokens=20)
    scheduler.add(request)
    drive(scheduler, runner, steps=5)
    scheduler.flush_cache()
    drain(scheduler, runner)
    assert request.output_ids == expected_output(request)[0]
    assert scheduler.blocks.cached == 0


# --- gauges and leaps


def test_gauges_tell_what_is_held_and_what_waits() -> None:
    scheduler = make_scheduler(BatchSettings(2, 4096, 4096))
    for number in range(4):
        scheduler.add(make_request(f"r{number}", range(number * 50, number * 50 + 10 + number), max_tokens=100))
    for _ in range(20):
        plan_and_commit(scheduler)
    assert (scheduler.running, scheduler.waiting, scheduler.waiting_prompt_tokens) == (2, 2, 12 + 13)
    assert scheduler.running_context_tokens == 10 + 11 + 2 * 19
    past = scheduler.running_output_past_edges
    assert (past[0], past[16], past[64]) == (2, 2, 0)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@hypothesis_settings(max_examples=1000 if PROVE else 40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 40)), min_size=1, max_size=5),
    fraction=st.floats(0.0, 1.0),
    max_num_seqs=st.integers(1, 6),
)
def test_a_leap_is_that_many_steps(sizes: list[tuple[int, int]], fraction: float, max_num_seqs: int) -> None:
    def make() -> Scheduler:
        scheduler = make_scheduler(BatchSettings(max_num_seqs, 64, 64), blocks=40)
        for number, (prompt, output) in enumerate(sizes):
            hashes = [f"{number}.{index}".encode() for index in range((prompt + output) // BLOCK)]
            scheduler.add(Request(f"r{number}", prompt, output, 0.0, block_hashes=hashes))
        return scheduler

    def state(scheduler: Scheduler) -> object:
        live = [(r.id, r.num_computed, r.output_tokens, len(r.blocks), r.state) for r in scheduler.live_requests()]
        pool = scheduler.blocks
        return live, pool.used, pool.cached, pool.free, scheduler.step_id, round(scheduler.reserve_ratio, 9)

    leaping, stepping = make(), make()
    leapt = 0
    while stepping.has_work:
        steps = int(fraction * leaping.steps_until_event())
        leapt += steps
        leaping.leap(steps, 0.0)
        for _ in range(steps):
            planned = stepping.plan(0.0)
            assert all(item.count == 1 for item in planned.items)
            assert not [e for e in stepping.commit(planned, None, 0.0) if e.finish_reason]
        leaping.check_integrity()
        assert state(leaping) == state(stepping)
        assert plan_and_commit(leaping) == plan_and_commit(stepping)
    assert not leaping.has_work
    if fraction == 1.0 and len(sizes) == 1 and sizes[0][1] > 3:
        assert leapt == sizes[0][1] - 2


def test_a_leap_over_an_event_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(Request("a", 4, 10, 0.0))
    assert scheduler.steps_until_event() == 0
    plan_and_commit(scheduler)
    assert scheduler.steps_until_event() == 8
    with pytest.raises(ValueError, match="after 8"):
        scheduler.leap(9, 0.0)


class Hesitant(FakeRunner):
    """Has a token only every fourth time."""

    asked = 0

    def run(self, step: Step) -> dict[str, SampledToken]:
        tokens = super().run(step)
        for request_id in tokens:
            self.asked += 1
            if self.asked % 4:
                tokens[request_id] = SampledToken(-1, is_deferred=True)
        return tokens


def test_a_token_that_is_deferred_comes_later_and_changes_nothing() -> None:
    scheduler = make_scheduler(blocks=14, speculation=NgramSpeculation(3, 1, 2))
    requests = [make_request(f"r{number}", [number, 1, 2, 1, 2, 1], max_tokens=20) for number in range(3)]
    runner = Hesitant()
    for request in requests:
        scheduler.add(request)
        scheduler._reserve_ratio = 0.0  # let all in, so that they collide
        drive(scheduler, runner)
    drain(scheduler, runner)
    assert runner.asked > 60
    assert scheduler.preemptions["kv"] > 0
    assert [request.output_ids for request in requests] == [expected_output(request)[0] for request in requests]


# --- windows


@pytest.mark.parametrize("window", [1, BLOCK, BLOCK + 1, 11])
def test_a_long_answer_behind_a_window_takes_no_more_blocks_than_the_window_holds(window: int) -> None:
    most = -(-(window - 1) // BLOCK) + 1
    scheduler = make_scheduler(blocks=most, windows=[window])
    request = make_request("a", range(50), max_tokens=300)
    scheduler.add(request)
    drain(scheduler, FakeRunner([window]))
    assert request.output_ids == expected_output(request)[0]
    assert (request.finish_reason, scheduler.preemptions["kv"]) == (FinishReason.LENGTH, 0)


def test_layers_that_see_all_keep_their_blocks_and_those_with_a_window_give_theirs_back() -> None:
    windows = [None, 6, 6]
    scheduler = make_scheduler(blocks=200, windows=windows)
    runner = FakeRunner(windows)
    scheduler.add(make_request("a", range(10), max_tokens=90))
    used = []
    while scheduler.has_work:
        drive(scheduler, runner)
        used.append(scheduler.blocks.used)
    assert max(used) == 25 + 2 * 3  # a hundred tokens of one group, and a window of two
    assert make_scheduler(blocks=31, windows=windows).blocks.tokens_that_fit(make_request("a", [1])) == 100


def test_prompts_behind_a_window_share_its_blocks_by_turns_and_all_end() -> None:
    scheduler = make_scheduler(BatchSettings(4, 24, 16), blocks=9, windows=[8])
    requests = [make_request(f"r{number}", [number + 1] * 60, max_tokens=20) for number in range(4)]
    for request in requests:
        scheduler.add(request)
    drain(scheduler, FakeRunner([8]))
    assert [request.output_ids for request in requests] == [expected_output(request)[0] for request in requests]


# --- waste

CONVERSATION_INPUTS = (
    2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020,
    1045, 1071, 1097, 1130, 1189, 1315, 1876, 2734, 4083, 14050,
)  # fmt: skip
CONVERSATION_OUTPUTS = (
    7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 1000
)  # fmt: skip
"""Every twentieth of the tokens of 19,366 conversations: Azure's public LLM inference trace of 2023 (CC-BY-4.0)."""


def draw_length(quantiles: Sequence[int], random: Random) -> int:
    place = random.uniform(0, len(quantiles) - 1)
    lower = min(int(place), len(quantiles) - 2)
    return round(quantiles[lower] + (place - lower) * (quantiles[lower + 1] - quantiles[lower]))


def test_conversations_leave_less_than_four_percent_of_their_blocks_of_sixteen_empty() -> None:
    random = Random(1)
    pool = BlockPool(60_000, 16)
    scheduler = Scheduler(DEFAULT_SETTINGS, pool, max_model_len=16384)
    used = empty = 0.0
    for number in range(300):
        prompt, output = (draw_length(each, random) for each in (CONVERSATION_INPUTS, CONVERSATION_OUTPUTS))
        scheduler.add(Request(f"r{number}", prompt, output, float(number), params=SamplingParams(ignore_eos=True)))
        while scheduler.waiting > 4:  # as many run as may
            plan_and_commit(scheduler)
            if scheduler.step_id % 5 == 0:
                used += pool.used
                empty += (scheduler.kv_waste_ratio or 0.0) * pool.used
    print(f"empty slots in used blocks: {empty / used:.2%}")
    assert scheduler.running == DEFAULT_SETTINGS.max_num_seqs
    assert 0.001 < empty / used < 0.04


def test_what_is_empty_is_what_no_token_lies_in() -> None:
    scheduler = make_scheduler(windows=[None, 5])
    assert scheduler.kv_waste_ratio is None
    scheduler.add(make_request("a", range(9), max_tokens=20))
    plan_and_commit(scheduler)  # three blocks of the one, with nine tokens, and the two last of the other, with five
    assert scheduler.kv_waste_ratio == (3 + 3) / (4 * (3 + 2))


# --- guessing ahead


@pytest.mark.prove
@pytest.mark.timeout(3600)
@hypothesis_settings(max_examples=1000 if PROVE else 40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=30), min_size=1, max_size=5),
    tokens=st.integers(1, 6),
    lookup=st.integers(1, 3),
    blocks=st.integers(20, 60),
    budget=st.integers(8, 40),
    aborted=st.integers(0, 40),
)
def test_guessing_ahead_changes_no_token(
    prompts: list[list[int]], tokens: int, lookup: int, blocks: int, budget: int, aborted: int
) -> None:
    scheduler = make_scheduler(
        BatchSettings(5, budget, 16), blocks=blocks, speculation=NgramSpeculation(tokens, lookup, lookup + 1)
    )
    scheduler._reserve_ratio = 0.0  # so that some are preempted
    requests = [make_request(f"r{number}", prompt, max_tokens=40) for number, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    runner = FakeRunner()
    gone = None
    if len(prompts) > 1:
        drive(scheduler, runner, steps=aborted)
        gone = scheduler.abort("r0")
    drain(scheduler, runner)
    for request in requests:
        output = expected_output(request)[0]
        assert request.output_ids == (output[: request.output_tokens] if request is gone else output)
    assert scheduler.blocks.used == 0 and not scheduler._ngrams
    assert 0 <= scheduler.accepted_tokens <= scheduler.drafted_tokens


class Echo(FakeRunner):
    """Says 1 2 3 1 2 3 ... whatever was asked: what every guess should find."""

    def run(self, step: Step) -> dict[str, SampledToken]:
        tokens = {}
        for item in step.items:
            said = item.request.output_tokens
            chosen = [(said + place) % 3 + 1 for place in range(len(item.drafts) + 1)]
            right = 0
            while right < len(item.drafts) and item.drafts[right] == chosen[right]:
                right += 1
            first, *following = map(SampledToken, chosen[: right + 1])
            if item.samples:
                tokens[item.request.id] = first._replace(following=tuple(following))
        return tokens


def test_right_guesses_save_steps_and_their_tokens_come_together() -> None:
    scheduler = make_scheduler(speculation=NgramSpeculation(4, 2, 3))
    scheduler.add(make_request("a", [9, 9], max_tokens=40))
    events = drain(scheduler, Echo())
    assert [event.token.token_id for event in events if event.token] == [place % 3 + 1 for place in range(40)]
    assert scheduler.step_id < 20
    assert scheduler.accepted_tokens == 40 - scheduler.step_id
    assert [event.finish_reason for event in events] == [None] * 39 + [FinishReason.LENGTH]
    assert sum(event.interval_seconds or 0.0 for event in events) == 0.0


def test_guesses_take_only_what_budget_and_blocks_leave_over() -> None:
    scheduler = make_scheduler(BatchSettings(4, 6, 64), blocks=3, speculation=NgramSpeculation(8, 1, 1))
    scheduler.add(make_request("a", [1, 2, 3, 1], max_tokens=7))
    scheduler.add(make_request("b", [1, 2, 3, 1], max_tokens=2, arrival=1.0))
    runner = Echo()
    drive(scheduler, runner)
    (item, *_) = scheduler.plan(0.0).items
    # One token and five guesses fill the budget; but blocks are left for no more than the table holds.
    assert item.request.id == "a" and len(item.drafts) <= 3


def test_an_end_among_the_guesses_ends_the_request_there() -> None:
    scheduler = make_scheduler(speculation=NgramSpeculation(6, 1, 1))
    ids = (5, EOS, 6, 5, EOS, 6, 5, EOS)
    request = Request("a", len(ids), 30, 0.0, prompt_ids=ids)
    scheduler.add(request)
    scheduler.commit(scheduler.plan(0.0), {"a": SampledToken(6)}, 0.0)
    step = scheduler.plan(0.0)
    assert list(step.items[0].drafts) == [5, EOS, 6, 5, EOS, 6]
    following = (SampledToken(EOS, is_eos=True), SampledToken(6))
    events = scheduler.commit(step, {"a": SampledToken(5, following=following)}, 0.0)
    assert [(event.token.token_id, event.finish_reason) for event in events if event.token] == [
        (5, None),
        (EOS, FinishReason.STOP),
    ]
    assert request.output_ids == [6, 5, EOS]
    assert scheduler.blocks.used == 0


def test_a_final_token_ends_the_answer_before_its_minimum_length() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(min_tokens=5, ignore_eos=True)
    scheduler.add(Request("a", 2, 9, 0.0, prompt_ids=(1, 2), params=params))
    (event,) = scheduler.commit(scheduler.plan(0.0), {"a": SampledToken(EOS, is_eos=True, is_final=True)}, 0.0)
    assert event.finish_reason is FinishReason.STOP


# --- anything, in any order


LONGEST_PROMPT = 23
"""Tokens of the machine's requests."""


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, aborts, settings, policies, pauses and flushes between plan and commit, and other pools between
    two steps, which are too small for all."""

    @initialize(
        blocks=st.integers(12, 40),
        prefix_caching=st.booleans(),
        speculation=st.sampled_from([None, NgramSpeculation(4, 1, 2)]),
        host_slots=st.sampled_from([0, 1, 5, 30, 200]),
        windows=st.sampled_from([(None,), (None,), (9,), (1,), (None, 6), (5, None, 5), (3, 8)]),
    )
    def set_up(
        self,
        blocks: int,
        prefix_caching: bool,
        speculation: NgramSpeculation | None,
        host_slots: int,
        windows: tuple[int | None, ...],
    ) -> None:
        self.scheduler = make_scheduler(
            BatchSettings(4, 16, 8),
            blocks=blocks * len(windows),
            prefix_caching=prefix_caching,
            speculation=speculation,
            host_slots=host_slots,
            windows=windows,
        )
        self.runner = FakeRunner(windows)
        self.requests: list[Request] = []
        self.ends: dict[str, FinishReason] = {}
        self.step: Step | None = None
        self.policy = replace(LivePolicy(), enable_prefix_caching=prefix_caching)
        self.is_held = False

    @rule(
        head=st.sampled_from([(1, 2, 3, 4, 5), (1,), (5, 5, 5, 5, 5, 5, 5, 5, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9)]),
        tail=st.lists(st.integers(1, 3), max_size=LONGEST_PROMPT - 9),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 1),
        age=st.sampled_from([0.0, 0.0, 0.0, 2 * AGEING_SECONDS]),
        salt=st.sampled_from(["", "", "x"]),
        params=st.builds(
            SamplingParams,
            min_tokens=st.integers(0, 4),
            ignore_eos=st.booleans(),
            stop_token_ids=st.sampled_from([(), (3,)]),
        ),
        window=st.sampled_from([None, None, Window(6, sinks=3), Window(2)]),
    )
    def add(
        self,
        head: tuple[int, ...],
        tail: list[int],
        max_tokens: int,
        priority: int,
        age: float,
        salt: str,
        params: SamplingParams,
        window: Window | None,
    ) -> None:
        ids = (*head, *tail)
        name = f"r{len(self.requests)}"
        request = Request(
            name,
            len(ids),
            max_tokens,
            len(self.requests) - age,
            prompt_ids=ids,
            params=params,
            priority=priority,
            cache_salt=salt,
            window=window if self.runner.windows == (None,) else None,
        )
        self.scheduler.add(request)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        ended = self.scheduler.abort(request.id)
        assert (ended is not None) == (request.id not in self.ends)
        if ended is not None:
            self.ends[request.id] = FinishReason.ABORT

    @rule(seqs=st.integers(1, 8), extra=st.integers(0, 30), threshold=st.integers(1, 20))
    def apply(self, seqs: int, extra: int, threshold: int) -> None:
        self.scheduler.apply(BatchSettings(seqs, seqs + extra, threshold))

    @rule(
        data=st.fixed_dictionaries(
            {},
            optional={
                "max_num_partial_prefills": st.none() | st.integers(1, 3),
                "max_prefill_tokens_per_step": st.none() | st.integers(1, 20),
                "kv_admission_limit": st.floats(0.05, 1.0),
                "watermark": st.floats(0.0, 0.5),
                "reserve_ratio": st.none() | st.floats(0.0, 1.0),
                "enable_prefix_caching": st.booleans(),
                "max_num_queued_reqs": st.none() | st.integers(0, 9),
            },
        ),
        wrong=st.sampled_from([{}, {}, {}, {"watermark": 0.6}, {"reserve_ratio": -0.1}, {"enable_prefix_caching": 1}]),
    )
    def patch(self, data: dict[str, object], wrong: dict[str, object]) -> None:
        """As a PATCH does; what is out of bounds changes nothing."""
        policy = change_policy(self.policy, {**data, **wrong}, bounds=POLICY_BOUNDS)
        assert isinstance(policy, Violation) == bool(wrong)
        if not isinstance(policy, Violation):
            self.policy = policy
            self.scheduler.admit_by(policy.admission)
        assert self.scheduler.blocks.prefix_caching == self.policy.enable_prefix_caching
        acting = self.scheduler.limits
        assert acting == {**acting, **{name: self.policy.limits[name] for name in acting.keys() & self.policy.limits}}

    @rule()
    def switch_prefix_caching(self) -> None:
        self.patch({"enable_prefix_caching": not self.policy.enable_prefix_caching}, {})

    @rule()
    def pause(self) -> None:
        self.scheduler.hold(True)
        self.is_held = True

    @rule()
    def resume(self) -> None:
        self.scheduler.hold(False)
        self.is_held = False

    @precondition(lambda self: self.step is None)
    @rule(share=st.floats(0.0, 1.0), waits=st.booleans())
    def resize(self, share: float, waits: bool) -> None:
        """To anything between what the largest request needs and more than there was at the start."""
        if waits:
            self.pause()
            while self.scheduler.running:
                self.plan()
                self.commit()
        was_running = self.scheduler.running
        assert self.scheduler.preempt_all() == was_running
        groups = len(self.runner.windows)
        longest = max((r.prompt_tokens + r.max_tokens for r in self.scheduler.live_requests()), default=0)
        least = blocks_that_hold(max(longest - 1, LONGEST_PROMPT), BLOCK, windows_of(self.runner.windows))
        epoch = self.scheduler.blocks.epoch
        total = 1 + least + round(share * 50 * groups)
        self.scheduler.resize(total)
        self.runner.slots.clear()  # it is other memory
        assert (self.scheduler.blocks.usable, self.scheduler.blocks.free) == (total - 1, total - 1)
        assert self.scheduler.blocks.epoch > epoch, "no prefix of the old pool is found in the new one"
        if waits:
            self.resume()

    @rule()
    def flush(self) -> None:
        self.scheduler.flush_cache()
        assert self.scheduler.blocks.host is None or self.scheduler.blocks.host.used == 0

    @rule()
    def ignore_the_reserve(self) -> None:
        self.scheduler._reserve_ratio = 0.0  # more preemptions than any load would bring

    @precondition(lambda self: self.step is None)
    @rule()
    def plan(self) -> None:
        settings, before = self.scheduler.settings, self.scheduler.running
        live = self.scheduler.live_requests()
        waiting = {request.id for request in live if request.state is RequestState.WAITING}
        oldest = min(live, key=lambda r: (r.arrival + AGEING_SECONDS * r.priority, r.sequence), default=None)
        is_running = oldest is not None and oldest.state is RequestState.RUNNING
        step = self.scheduler.plan(0.0)
        if oldest is not None and is_running:
            assert oldest.state is RequestState.RUNNING, "the oldest never gives way"
            over_cap = before > settings.max_num_seqs
            assert over_cap or any(item.request is oldest for item in step.items), "the oldest always advances"
        plain = [item.count - len(item.drafts) for item in step.items]
        decodes = sum(
            count == 1 and item.start >= item.request.prompt_tokens
            for count, item in zip(plain, step.items, strict=True)
        )
        assert sum(item.count for item in step.items) <= max(settings.max_num_batched_tokens, decodes)
        assert all(count <= settings.long_prefill_token_threshold for count in plain)
        assert self.scheduler.running <= (before if self.is_held else max(settings.max_num_seqs, before))
        most = self.policy.max_prefill_tokens_per_step
        prefilled = sum(
            count
            for count, item in zip(plain, step.items, strict=True)
            if count > 1 or (item.start < item.request.prompt_tokens - 1)
        )
        assert most is None or prefilled <= most
        if not self.policy.enable_prefix_caching:
            assert self.scheduler.blocks.cached == 0 and all(
                item.start == 0 for item in step.items if item.request.id in waiting
            )
        assert bool(step.items) == self.scheduler.has_work, "work that waits for nothing must go on"
        assert len({item.request.id for item in step.items}) == len(step.items)
        self.step = step if step.items else None

    @precondition(lambda self: self.step is not None)
    @rule()
    def commit(self) -> None:
        assert self.step is not None
        live = [item for item in self.step.items if item.request.state is RequestState.RUNNING]
        tokens = self.runner.run(replace(self.step, chunks=live, decodes=Decodes()))
        for event in self.scheduler.commit(self.step, tokens, 0.0):
            assert event.request.id not in self.ends
            if event.finish_reason is not None:
                self.ends[event.request.id] = event.finish_reason
        self.step = None

    @precondition(lambda self: self.step is not None)
    @rule(copied=st.booleans())
    def fail(self, copied: bool) -> None:
        assert self.step is not None
        if copied:
            self.runner.copy(self.step)
        for event in self.scheduler.fail(self.step, "lost", 0.0):
            assert event.request.id not in self.ends
            self.ends[event.request.id] = FinishReason.ERROR
        self.step = None

    @rule(count=st.integers(1, 20))
    def run(self, count: int) -> None:
        for _ in range(count):
            if self.step is not None:
                self.commit()
            self.plan()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        pool = self.scheduler.blocks
        assert pool.used + pool.cached + pool.free == pool.usable
        assert pool.prefix_caching or not pool.cached
        for request in self.requests:
            output, _ = expected_output(request)
            assert request.output_ids == output[: request.output_tokens]
            assert (request.state is RequestState.FINISHED) == (request.id in self.ends)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.resume()
        for _ in range(3000):
            if self.step is not None:
                self.commit()
            if not self.scheduler.has_work:
                break
            self.plan()
        assert not self.scheduler.has_work
        assert self.scheduler.blocks.used == 0
        for request in self.requests:
            assert request.finish_reason is self.ends[request.id]
            if request.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
                assert (request.output_ids, request.finish_reason) == expected_output(request)


TestSchedulerMachine = pytest.mark.prove(pytest.mark.timeout(3600)(SchedulerMachine.TestCase))
TestSchedulerMachine.settings = hypothesis_settings(
    max_examples=2000 if PROVE else 60, stateful_step_count=80 if PROVE else 40, deadline=None
)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@hypothesis_settings(max_examples=1000 if PROVE else 40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=24), min_size=1, max_size=6),
    blocks=st.integers(10, 60),
    budget=st.integers(8, 64),
    threshold=st.integers(1, 24),
    prefix_caching=st.booleans(),
)
def test_every_chunk_size_and_pool_gives_the_same_tokens(
    prompts: list[list[int]], blocks: int, budget: int, threshold: int, prefix_caching: bool
) -> None:
    scheduler = make_scheduler(BatchSettings(6, budget, threshold), blocks=blocks, prefix_caching=prefix_caching)
    requests = [make_request(f"r{number}", prompt, max_tokens=12) for number, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    drain(scheduler, FakeRunner())
    assert [request.output_ids for request in requests] == [expected_output(request)[0] for request in requests]
