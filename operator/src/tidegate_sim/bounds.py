"""What no policy can undercut: the fewest GPU-seconds that a workload needs, found with all of it known beforehand.

Pure. A request is work in seconds of a replica (`Work`); a workload becomes work a slot, in replicas (`demand`).
Bounds, each above the one before: `by_work` (LB0) counts the work alone, `by_whole_replicas` (LB1) rounds each slot up,
`with_starts` (LB2) pays for starts as well. `with_misses` (LB(v)) may leave a share of the work undone, so that a
policy with misses is held against what is possible with as many. `with_slack` lets work wait. `smallest` is the search
of the achievable oracle, which runs the simulator. Used by `evaluation`, and for the clairvoyant baseline's schedule.

Level k of a demand is its k-th replica: needed where the demand exceeds k - 1. A fleet of N replicas is levels 1 to N,
a start is a level that comes on, and so each level is a problem of its own.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tidegate_engine.steptime import StepModel
from tidegate_sim.arrivals import Arrival

SLOT_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Work:
    """What requests cost a replica at least, in seconds, when every step is as full as it may be."""

    decode_seconds: float
    """Of a decoded token, beside its context."""
    kv_token_seconds: float
    """Of a token of context in a decode."""
    prefill_seconds: float
    """Of a prompt token."""
    attention_seconds: float
    """Of a pair of prompt tokens."""
    sequence_seconds: float
    """Of a prompt."""

    def seconds(self, isl: int, osl: int) -> float:
        return self.prompt_seconds(isl) + self.output_seconds(isl, osl)

    def prompt_seconds(self, isl: int) -> float:
        """Until the first token, which the last step of the prompt brings."""
        return self.sequence_seconds + isl * self.prefill_seconds + self.attention_seconds * isl * isl / 2

    def output_seconds(self, isl: int, osl: int) -> float:
        decodes = max(0, osl - 1)
        context = decodes * isl + decodes * (decodes + 1) / 2
        return decodes * self.decode_seconds + self.kv_token_seconds * context


def work_of(step: StepModel, *, largest_batch: float) -> Work:
    """A bound from below, for any batches of at most `largest_batch` sequences.

    A step of T tokens takes at least base + share x token x (T - T0) for any share in [0, 1]: the largest that leaves
    no step with a negative rest is taken. A step decodes at most `largest_batch` tokens, so each carries that part of
    the rest. Work that mixed steps add, and steps that are not full, are left out.
    """
    threshold = step.token_seconds * step.threshold_tokens
    share = min(1.0, step.base_seconds / threshold) if threshold > 0 else 1.0
    token = share * step.token_seconds
    rest = step.base_seconds - share * threshold
    return Work(
        decode_seconds=rest / largest_batch + token + step.sequence_seconds,
        kv_token_seconds=step.kv_token_seconds,
        prefill_seconds=token,
        attention_seconds=step.attention_seconds,
        sequence_seconds=step.sequence_seconds,
    )


def demand(
    arrivals: Iterable[Arrival], work: Work, *, itl_seconds: float, slot_seconds: float = SLOT_SECONDS
) -> list[float]:
    """Work a slot in replicas: prompts where they arrive, outputs over the time that the ITL goal gives them."""
    slots: list[float] = []
    for arrival in arrivals:
        _spread(slots, work.prompt_seconds(arrival.isl), arrival.at_seconds, arrival.at_seconds, slot_seconds)
        output = work.output_seconds(arrival.isl, arrival.osl)
        if output > 0:
            end = arrival.at_seconds + (arrival.osl - 1) * itl_seconds
            _spread(slots, output, arrival.at_seconds, end, slot_seconds)
    return [seconds / slot_seconds for seconds in slots]


def _spread(slots: list[float], seconds: float, begin: float, end: float, slot_seconds: float) -> None:
    first, last = int(begin // slot_seconds), int(end // slot_seconds)
    if len(slots) <= last:
        slots.extend([0.0] * (last + 1 - len(slots)))
    if end <= begin:
        slots[first] += seconds
        return
    for slot in range(first, last + 1):
        part = min(end, (slot + 1) * slot_seconds) - max(begin, slot * slot_seconds)
        slots[slot] += seconds * part / (end - begin)


def by_work(needs: Sequence[float], *, slot_seconds: float = SLOT_SECONDS) -> float:
    """LB0 in GPU-seconds: replicas may be divided at will."""
    return sum(needs) * slot_seconds


def whole_replicas(needs: Sequence[float], *, floor: int = 1) -> list[int]:
    """Replicas a slot, at least `floor`."""
    return [max(floor, math.ceil(need - 1e-9)) for need in needs]


def by_whole_replicas(needs: Sequence[float], *, floor: int = 1, slot_seconds: float = SLOT_SECONDS) -> float:
    """LB1 in GPU-seconds: whole replicas, that come and go for nothing."""
    return sum(whole_replicas(needs, floor=floor)) * slot_seconds


@dataclass(frozen=True, slots=True)
class Costs:
    """What a fleet pays beside its work: a start, in seconds of a GPU; `floor` replicas are always there."""

    start_seconds: float
    floor: int = 1
    initial: int = 1
    """Replicas that are there, ready, when the workload begins."""
    slot_seconds: float = SLOT_SECONDS


def with_starts(needs: Sequence[float], costs: Costs) -> float:
    """LB2 in GPU-seconds: a gap of a level is bridged where that is cheaper than to start again."""
    wanted = bridged(needs, costs)
    starts = sum(max(0, after - before) for before, after in zip([costs.initial, *wanted], wanted, strict=False))
    return sum(wanted) * costs.slot_seconds + starts * costs.start_seconds


def bridged(needs: Sequence[float], costs: Costs) -> list[int]:
    """The fleet of `with_starts`: replicas a slot."""
    wanted = whole_replicas(needs, floor=costs.floor)
    result = list(wanted)
    for level in range(costs.floor + 1, max(wanted, default=0) + 1):
        # As if needed just before the beginning, where the replica is there already.
        last = -1 if level <= costs.initial else None
        for slot, count in enumerate(wanted):
            if count < level:
                continue
            if last is not None and (slot - last - 1) * costs.slot_seconds < costs.start_seconds:
                for between in range(last + 1, slot):
                    result[between] = max(result[between], level)
            last = slot
    return result


def with_misses(needs: Sequence[float], costs: Costs, *, missed_share: float) -> float:
    """LB(v) in GPU-seconds: up to `missed_share` of the work may stay undone.

    The Lagrangian dual: work is paid for by a price, each level is on where that pays (a shortest path over on and
    off, exact), and the price that makes the bound largest is searched. A bound from below at any price.
    """
    if not 0 <= missed_share <= 1:
        raise ValueError(f"the share that may be missed lies between 0 and 1, not at {missed_share}")
    levels = [
        [min(1.0, max(0.0, need - level + 1)) * costs.slot_seconds for need in needs]
        for level in range(1, max(whole_replicas(needs, floor=costs.floor), default=0) + 1)
    ]
    forced = costs.floor * len(needs) * costs.slot_seconds
    free = sum(map(sum, levels[: costs.floor]))
    optional = levels[costs.floor :]
    owed = max(0.0, (1 - missed_share) * sum(map(sum, levels)) - free)
    if owed <= 0:
        return forced
    present = [costs.initial > costs.floor + index for index in range(len(optional))]

    def value(price: float) -> tuple[float, float]:
        """The dual at a price, and its slope."""
        paid, done = 0.0, 0.0
        for work, there in zip(optional, present, strict=True):
            cost, served = _cheapest(work, costs, price=price, there=there)
            paid += cost
            done += served
        return paid + price * owed, owed - done

    low, high = 0.0, 1.0
    while value(high)[1] > 0 and high < 1e9:
        low, high = high, high * 4
    best = max(value(low)[0], value(high)[0])
    for _ in range(40):
        middle = (low + high) / 2
        bound, slope = value(middle)
        best = max(best, bound)
        if slope > 0:
            low = middle
        else:
            high = middle
        if high - low < 1e-4 * high:
            break
    return forced + best


def _cheapest(work: Sequence[float], costs: Costs, *, price: float, there: bool) -> tuple[float, float]:
    """One level at a price for work done: (GPU-seconds paid less the work's worth, work done)."""
    slot, start = costs.slot_seconds, costs.start_seconds
    off = (0.0, 0.0)
    on = (0.0, 0.0) if there else (math.inf, 0.0)
    for amount in work:
        come = (off[0] + start, off[1])
        before = min(on, come)
        off = min(off, on)
        on = (before[0] + slot - price * amount, before[1] + amount)
    return min(off, on)


@dataclass(frozen=True, slots=True)
class Task:
    """Work, in slots of a replica, to be done in the slots from `first` to `last`."""

    first: int
    last: int
    work: float


def with_slack(tasks: Iterable[Task], *, slots: int, floor: int = 1, slot_seconds: float = SLOT_SECONDS) -> float:
    """LB1 where work may wait: the fewest GPU-seconds of whole replicas that do each task within its slots.

    By deadlines, what is left of earlier replicas first, then new ones as late as possible, where most later tasks
    can use the rest of them. Starts cost nothing.
    """
    counts = [floor] * slots
    left = [float(floor)] * slots
    for task in sorted(tasks, key=lambda item: (item.last, -item.first)):
        owed = task.work
        for slot in range(task.first, task.last + 1):
            used = min(owed, left[slot])
            left[slot] -= used
            owed -= used
        more = math.ceil(owed - 1e-9)
        if more > 0:
            counts[task.last] += more
            left[task.last] += more - owed
    return sum(counts) * slot_seconds


def tasks_of(
    needs: Sequence[float], *, slack_seconds: float, slot_seconds: float = SLOT_SECONDS
) -> tuple[list[Task], int]:
    """One task a slot of `demand` that may wait for `slack_seconds`, in whole slots, and the number of slots."""
    slack = int(slack_seconds // slot_seconds)
    return [Task(slot, slot + slack, need) for slot, need in enumerate(needs)], len(needs) + slack


@dataclass(frozen=True, slots=True)
class Achieved:
    """What a run with a margin came to."""

    margin: float
    attainment: float
    gpu_seconds: float


def smallest(
    run: Callable[[float], Achieved], *, attainment: float, low: float = 0.0, high: float = 1.0, tries: int = 6
) -> Achieved | None:
    """The achievable oracle: bisect the margin over a known schedule for the smallest that attains; None if none does.

    `run` serves the workload with the schedule for (1 + margin) times the demand.
    """
    best = run(high)
    if best.attainment < attainment:
        return None
    for _ in range(tries):
        middle = (low + high) / 2
        found = run(middle)
        if found.attainment >= attainment:
            high, best = middle, found
        else:
            low = middle
    return best
