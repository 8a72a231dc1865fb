"""Traces as workloads: read line by line, cut, scaled, in order of time. The formats are `tidegate_engine.workload`'s.

CSV with a time and two lengths (ours, Azure 2023, BurstGPT, the replays), and Mooncake's JSON lines with prefix hashes.
Raises WorkloadError with file, line and what is wanted.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tidegate_engine.workload import HASH_BLOCK_TOKENS, PlannedRequest, WorkloadError, stream_rows
from tidegate_sim.arrivals import Arrival

COPY_SPREAD_SECONDS = 5.0
"""Copies of a request, where the rate is raised, come within so long after it."""
MAX_TOKENS = 1 << 30
"""Of a prompt or an answer, scaled; more is no request of any model."""
DISORDER_SECONDS = 60.0
"""Rows may stand so far out of order."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a trace is used, and how. Seconds are the trace's, before `speed`."""

    start_seconds: float = 0.0
    duration_seconds: float = math.inf
    speed: float = 1.0
    """Time is divided by this: a shorter day."""
    rate_scale: float = 1.0
    """So many times the requests in the same time: below 1 some are left out by chance, above 1 some come again."""
    length_scale: float = 1.0
    count: int | None = None
    sources: Sequence[str] = ()
    """Only these; empty = all."""


@dataclass(slots=True)
class Counted:
    """How many rows of a cut were used, and how many could not be: logs have rows of failed calls, without tokens."""

    used: int = 0
    skipped: int = 0


def read(
    path: Path, cut: Cut | None = None, *, block_tokens: int = 16, seed: int = 0, counted: Counted | None = None
) -> Iterator[Arrival]:
    """The arrivals of a trace in order, one by one; the first row of the file is at 0. Raises WorkloadError."""
    cut, counted = cut or Cut(), counted or Counted()
    random = Random(f"{seed} copies")
    waiting: list[tuple[float, int, Arrival]] = []
    number, last = 0, 0.0
    for at, row in _chosen(path, cut, counted):
        longest = max(row.input_tokens, row.output_tokens)
        if longest > MAX_TOKENS or longest * cut.length_scale > MAX_TOKENS:
            raise WorkloadError(f"{path}: a request has {longest} tokens, and {MAX_TOKENS:,} are the most")
        arrival = _arrival(row, at / cut.speed, scale=cut.length_scale, block_tokens=block_tokens)
        times = int(cut.rate_scale) + (random.random() < cut.rate_scale % 1)
        for copy in range(times):
            delay = random.uniform(0.0, COPY_SPREAD_SECONDS) if copy else 0.0
            number += 1
            # Copies have the first one's blocks, so a scaled-up trace with prefixes finds more of them cached.
            heapq.heappush(waiting, (arrival.at_seconds + delay, number, arrival))
        while waiting and waiting[0][0] <= (at - DISORDER_SECONDS) / cut.speed:
            due, _, found = heapq.heappop(waiting)
            if due < last:
                raise WorkloadError(
                    f"{path}: a request at {due:.3f} s stands more than {DISORDER_SECONDS:.0f} s after later ones; "
                    "sort the file by time"
                )
            last = due
            yield _moved(found, due)
            counted.used += 1
            if cut.count is not None and counted.used >= cut.count:
                return
    for due, _, found in sorted(waiting)[: None if cut.count is None else cut.count - counted.used]:
        counted.used += 1
        yield _moved(found, max(due, last))
    if not counted.used:
        raise WorkloadError(f"{path} has no request in the chosen part ({counted.skipped} rows have no tokens)")


def _chosen(path: Path, cut: Cut, counted: Counted) -> Iterator[tuple[float, PlannedRequest]]:
    """Rows of the cut, with the seconds since its start."""
    zero: float | None = None
    for row in stream_rows(path):
        zero = row.at_seconds if zero is None else zero
        if row.at_seconds < zero - DISORDER_SECONDS:
            # It would be left out without a word: the file's first request is where its time begins.
            raise WorkloadError(
                f"{path}: a request at {row.at_seconds:g} s stands after the first one, at {zero:g} s; "
                "sort the file by time"
            )
        at = row.at_seconds - zero - cut.start_seconds
        if at >= cut.duration_seconds + DISORDER_SECONDS:
            return
        if not 0 <= at < cut.duration_seconds or (cut.sources and row.source not in cut.sources):
            continue
        if row.input_tokens < 1 or row.output_tokens < 1:
            counted.skipped += 1
            continue
        yield at, row


def _arrival(row: PlannedRequest, at: float, *, scale: float, block_tokens: int) -> Arrival:
    isl = max(1, round(row.input_tokens * scale))
    osl = max(1, round(row.output_tokens * scale))
    hashes = _block_hashes(row.prefix_ids, isl, block_tokens) if row.prefix_ids else ()
    return Arrival(at, isl, osl, row.source, hashes)


def _moved(arrival: Arrival, at: float) -> Arrival:
    if arrival.at_seconds == at:
        return arrival
    return Arrival(at, arrival.isl, arrival.osl, arrival.source, arrival.block_hashes)


def _block_hashes(ids: Sequence[int], isl: int, block_tokens: int) -> tuple[bytes, ...]:
    """An id stands for 512 tokens and all before them: so does each block in them, by its place."""
    parts = HASH_BLOCK_TOKENS // block_tokens
    whole = min(isl // block_tokens, len(ids) * parts)
    return tuple(b"%d.%d" % (ids[block // parts], block % parts) for block in range(whole))
