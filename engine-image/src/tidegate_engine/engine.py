"""The engine loop: one thread that plans, runs and commits steps, and the mailbox through which others reach it.

Only this thread touches scheduler and runner. Tokens go to their consumers on the event loop in one call a step. It
knows no text and no HTTP: `engine_host` has it serve the HTTP process.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

from tidegate_engine.blocks import BlockPool, blocks_that_hold, windows_of
from tidegate_engine.host_pool import HostPool
from tidegate_engine.metrics import (
    Counts,
    EngineMetrics,
    FinishedRequest,
    HostUse,
    LoraUse,
    Snapshot,
    isl_cell,
)
from tidegate_engine.ngrams import NgramSpeculation
from tidegate_engine.pooled_batcher import PooledBatcher, PooledLimits
from tidegate_engine.process_memory import resident_bytes
from tidegate_engine.request import Booked, FinishReason, Request, RequestState, SampledToken, Step, TokenEvent
from tidegate_engine.runner import AdapterInfo, Adapters, ModelInfo, Runner
from tidegate_engine.scheduler import RequestRefused, Scheduler
from tidegate_engine.settings import AdmissionPolicy, BatchSettings, SettingsFile
from tidegate_engine.steptime import OnlineFit, shape_of_step
from tidegate_engine.weights import ModelError

MAX_FAILED_STEPS = 3
"""Steps that may fail one after the other before the engine gives up."""
IDLE_WAIT_SECONDS = 0.05
"""How long the loop waits for mail when it has work that cannot be planned."""
NO_ADAPTERS = "LoRA adapters are off; start the engine with --enable-lora"
MAX_FRUITLESS_PLANS = 20
"""Empty plans in a row, with nothing running, after which the head of the queue fails: it would block all others."""

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Output(NamedTuple):
    """A token, the end of a request, or both. `error` says why a request failed.

    A named tuple, since one is made for each token.
    """

    token: SampledToken | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_refusal: bool = False
    """The request itself can never be served, so the error is the client's."""


class Sink(Protocol):
    """Consumer of a request's outputs. Called on the event loop."""

    def push(self, output: Output) -> None: ...


@dataclass(slots=True)
class _Live:
    sink: Sink
    cell: int
    adapter: str | None


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    reason: FinishReason
    error: str | None


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Health:
    """What probes ask. `stalled_seconds` is 0 while there is nothing to do: idle is not hung."""

    alive: bool
    stalled_seconds: float
    step_id: int
    failure: str | None = None
    silent_seconds: float = 0.0
    """Since the process of the engine last gave a sign of life."""


@dataclass(frozen=True, slots=True)
class Status:
    """The batch at one moment, and how the loop is."""

    running: int
    waiting: int
    taken: int
    """Requests that the loop has taken from the mailbox so far."""
    cached_blocks: int
    settings: BatchSettings
    health: Health
    is_frozen: bool = False
    """No step is computed; requests are kept as they are."""
    waiting_tokens: int = 0
    """Prompt tokens of the waiting requests."""

    @property
    def over_cap(self) -> int:
        return max(0, self.running - self.settings.max_num_seqs)


@dataclass(frozen=True, slots=True)
class Report:
    """All that metrics show of the engine."""

    counts: Counts
    snapshot: Snapshot


class Engine:
    """Runs requests to their end. `start` needs a running event loop; all public methods may be called from it."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        metrics: EngineMetrics,
        pooled: PooledLimits | None = None,
        on_idle: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.metrics = metrics
        self.fit = OnlineFit()
        self.failure: str | None = None
        self.failed = asyncio.Event()
        self._on_idle = on_idle
        self._clock = clock
        self._mailbox: SimpleQueue[_Add | _Abort | _Call | None] = SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._outbox: list[tuple[Sink, Output]] = []
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._pooled = PooledBatcher(pooled or PooledLimits())
        self._is_frozen = False
        self._frozen_at = 0.0
        self._taken = 0
        self._is_busy = False
        self._progress_at = clock()
        self._last_step_end: float | None = None
        self._failed_steps = 0
        self._fruitless_plans = 0

    # --- called from the event loop

    def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step in flight, and wait for it a short while."""
        self._mailbox.put(None)
        self._thread.join(timeout=5)

    def submit(self, request: Request, sink: Sink) -> None:
        if self.failure is not None:
            sink.push(Output(None, FinishReason.ERROR, "the engine failed"))
            return
        self._put(_Add(request, sink))

    def abort(self, request_id: str, *, reason: FinishReason = FinishReason.ABORT, error: str | None = None) -> None:
        """End a request in any state; one that has ended already is left alone."""
        self._put(_Abort(request_id, reason, error))

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` between two steps and return what it returns."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001  # it belongs to the caller, who gets it
                future.set_exception(error)

        self._put(_Call(run))
        return await asyncio.wrap_future(future)

    def health(self) -> Health:
        alive = self._thread.is_alive() and self.failure is None
        has_work = self._is_busy or not self._mailbox.empty()
        stalled = max(0.0, self._clock() - self._progress_at) if has_work else 0.0
        return Health(alive, stalled, self.scheduler.step_id, self.failure)

    def status(self) -> Status:
        scheduler = self.scheduler
        return Status(
            running=scheduler.running,
            waiting=scheduler.waiting + self._pooled.waiting,
            taken=self._taken,
            cached_blocks=scheduler.blocks.cached,
            settings=scheduler.settings,
            health=self.health(),
            is_frozen=self._is_frozen,
            waiting_tokens=scheduler.waiting_prompt_tokens + self._pooled.tokens,
        )

    async def apply(self, settings: BatchSettings) -> int:
        """Use `settings` from the next step on; returns its id."""

        def swap() -> int:
            if self.scheduler.settings != settings:
                self.scheduler.apply(settings)
            return self.scheduler.step_id + 1

        return await self.call(swap)

    async def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Hold a LoRA adapter from the next step on, read beside the steps; raises ModelError."""
        adapters = self.runner.adapters
        if adapters is None:
            raise ModelError("AdaptersOff", NO_ADAPTERS)
        return await self.call(await asyncio.to_thread(adapters.read, name, folder))

    async def unload_adapter(self, name: str) -> None:
        """Let go of an adapter; raises ModelError while a request has it."""

        def unload() -> None:
            adapters = self.runner.adapters
            users = sum(live.adapter == name for live in self._live.values())
            if users:
                raise ModelError("AdapterInUse", f"{users} requests are answered with the adapter {name!r}")
            if adapters is not None:
                adapters.remove(name)

        await self.call(unload)

    async def admit_by(self, policy: AdmissionPolicy) -> None:
        """Start waiting requests by `policy` from the next step on."""
        await self.call(lambda: self.scheduler.admit_by(policy))

    async def freeze(self, is_frozen: bool) -> None:
        """Compute no further step and keep all requests as they are, or go on with them."""

        def switch() -> None:
            now = self._clock()
            if is_frozen and not self._is_frozen:
                self._frozen_at = now
            elif self._is_frozen and not is_frozen:
                for request in (*self.scheduler.live_requests(), *self._pooled.held):
                    request.excused_seconds += max(0.0, now - max(self._frozen_at, request.arrival))
            self._is_frozen = is_frozen

        await self.call(switch)

    async def hold(self, is_held: bool) -> None:
        """Start no waiting request, while running ones go on; or start them again."""
        await self.call(lambda: self.scheduler.hold(is_held))

    def kv_block_bounds(self) -> tuple[int, int]:
        """The fewest KV blocks that `resize` takes, with which a request may fill the context, and the most.

        A cache that was smaller at the start may stay so.
        """
        info = self.runner.info
        groups = len(info.kv_windows)
        needed = blocks_that_hold(info.max_model_len, info.block_tokens, windows_of(info.kv_windows))
        least = -(-(needed + 1) // groups)  # one of them is the null block
        return min(least, info.kv_blocks), self.runner.most_kv_blocks(written=self.scheduler.blocks.touched)

    async def resize(self, kv_blocks: int) -> ModelInfo:
        """Have a KV cache of so many blocks, an empty one, from the next step on; what runs is computed again.

        Raises ModelError; then the old size is back, empty, and requests go on as after any other resize.
        """

        def swap() -> ModelInfo:
            low, high = self.kv_block_bounds()
            if not low <= kv_blocks <= high:
                message = f"the KV cache can have {low} to {high} blocks, and {kv_blocks} are asked for"
                raise ModelError("KvBlocksImpossible", message)
            if self._is_frozen:
                raise ModelError("KvCacheKept", "the engine is paused and keeps what its requests have computed")
            self.scheduler.preempt_all()
            try:
                self.runner.resize(kv_blocks)
            finally:
                self.scheduler.resize(self.runner.info.group_blocks)
                self._last_step_end = None
                self._progress_at = self._clock()
            return self.runner.info

        return await self.call(swap)

    async def flush_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks held one."""

        def flush() -> int:
            cached = self.scheduler.blocks.cached
            self.scheduler.flush_cache()
            return cached

        return await self.call(flush)

    def report(self) -> Report:
        scheduler, runner = self.scheduler, self.runner
        pool, info, settings = scheduler.blocks, runner.info, scheduler.settings
        memory = {"weights": info.weight_bytes, "kv": info.group_block_bytes * info.group_blocks}
        if runner.adapters is not None:
            memory["lora"] = runner.adapters.size_bytes
        if (grown := runner.grown_bytes()) is not None:
            kept = info.group_block_bytes * (pool.touched + (0 if pool.host is None else pool.host.used))
            if runner.adapters is not None:
                kept += runner.adapters.most_bytes
            memory["workspace"] = max(0, grown - kept)
        if (resident := resident_bytes()) is not None:
            memory["host"] = resident
        snapshot = Snapshot(
            running=scheduler.running,
            waiting=scheduler.waiting + self._pooled.waiting,
            waiting_prompt_tokens=scheduler.waiting_prompt_tokens + self._pooled.tokens,
            running_context_tokens=scheduler.running_context_tokens,
            running_output_past_edges=scheduler.running_output_past_edges,
            kv_used=pool.used,
            kv_cached=pool.cached,
            kv_free=pool.free,
            preemptions=scheduler.preemptions,
            spec=settings,
            effective=settings,
            capacity=settings,
            settings_generation=0,
            step_model=runner.step_model or self.fit.model,
            step_model_residual_ratio=self.fit.residual_ratio,
            step_model_samples=self.fit.samples,
            memory_bytes=memory,
            start_seconds=runner.start_seconds,
            drafted_tokens=scheduler.drafted_tokens,
            accepted_tokens=scheduler.accepted_tokens,
            host=None if pool.host is None else _host_use(pool.host, info),
            lora=None if runner.adapters is None else _lora_use(runner.adapters, scheduler.live_requests()),
            kv_waste_ratio=scheduler.kv_waste_ratio,
            policy_limits={"effective": scheduler.limits},
        )
        return Report(self.metrics.counts, snapshot)

    # --- the loop's thread

    def _put(self, mail: _Add | _Abort | _Call) -> None:
        if not self._is_busy and self._mailbox.empty():
            self._progress_at = self._clock()
        self._mailbox.put(mail)

    def _run(self) -> None:
        try:
            while self._read_mail():
                self._give_up_overdue()
                for request in self._pooled.take(self._clock()):
                    self._queue(request)
                if self._has_work:
                    self._step()
                self._deliver()
        except EngineFailed as error:
            logger.error("the engine gives up: %s", error)
            self._give_up(str(error))
        except Exception as error:
            logger.exception("the engine loop failed")
            self._give_up(f"{type(error).__name__}: {error}")

    def _read_mail(self) -> bool:
        """Act on everything in the mailbox; waits for something when idle, or until a batch is due. False = stop."""
        wait = not self._has_work
        timeout: float | None = None
        if wait:
            self._last_step_end = None
            if self._pooled.due_at is not None and not self._is_frozen:
                timeout = max(0.0, self._pooled.due_at - self._clock())
            else:
                self._is_busy = False
                if self._on_idle is not None:
                    self._on_idle()
        while True:
            try:
                mail = self._mailbox.get(block=wait, timeout=timeout)
            except Empty:
                return True
            if wait:
                self._is_busy = True
                self._progress_at = self._clock()
                wait = False
            if mail is None:
                return False
            self._act(mail)

    @property
    def _has_work(self) -> bool:
        return self.scheduler.has_work and not self._is_frozen

    def _act(self, mail: _Add | _Abort | _Call) -> None:
        match mail:
            case _Add(request, sink):
                self._add(request, sink)
            case _Abort(request_id, reason, error):
                request_or_none = self._pooled.remove(request_id) or self.scheduler.abort(
                    request_id, now=self._clock(), reason=reason
                )
                if request_or_none is not None:
                    self._end(request_or_none, Output(None, reason, error))
            case _Call(run):
                run()

    def _add(self, request: Request, sink: Sink) -> None:
        self._taken += 1
        try:
            self._check_adapter(request)
            if request.pooling is None:
                self.scheduler.add(request)
            else:
                self._pooled.add(request, self._clock())
        except RequestRefused as error:
            self._outbox.append((sink, Output(None, FinishReason.ERROR, str(error), is_refusal=True)))
            return
        cell = isl_cell(request.prompt_tokens)
        adapter = None if request.adapter is None else request.adapter.name
        self._live[request.id] = _Live(sink, cell, adapter)
        self.metrics.counts.arrived[cell] += 1

    def _check_adapter(self, request: Request) -> None:
        """Whoever sends a request knows what is loaded; one that does not must not fail the whole step."""
        wanted = request.adapter
        if wanted is None:
            return
        held = [] if self.runner.adapters is None else self.runner.adapters.infos()
        if not any((info.name, info.digest) == (wanted.name, wanted.digest) for info in held):
            message = f"the adapter {wanted.name!r} is not loaded"
            raise RequestRefused("AdapterUnknown", message, wanted=1, allowed=0)

    def _give_up_overdue(self) -> None:
        """End requests that have waited too long for their first step; frozen time is nobody's fault."""
        if self._is_frozen:
            return
        now = self._clock()
        for request in self.scheduler.overdue(now):
            self.scheduler.abort(request.id, now=now)
            seconds = now - request.arrival - request.excused_seconds
            waited = f"the request has waited {seconds:.1f} s and was given up: the server is busy"
            self._end(request, Output(None, FinishReason.ABORT, waited))

    def _queue(self, request: Request) -> None:
        """A pooled request has waited long enough."""
        try:
            self.scheduler.add(request)
        except RequestRefused as error:
            self._end(request, Output(None, FinishReason.ERROR, str(error), is_refusal=True))

    def _step(self) -> None:
        planned_at = self._clock()
        step = self.scheduler.plan(planned_at)
        if step.is_empty:
            self._wait_for_room()
            return
        self._fruitless_plans = 0
        try:
            tokens = self.runner.run(step)
        except Exception as error:
            logger.exception("step %d failed", step.id)
            self._fail(step, f"{type(error).__name__}: {error}")
            return
        now = self._clock()
        self._publish(self.scheduler.commit(step, tokens, now))
        self._failed_steps = 0
        self.metrics.counts.steps += 1
        # Steps follow each other directly while there is work, so the host's time between them is the step's, too.
        began = planned_at if self._last_step_end is None else self._last_step_end
        self._last_step_end = self._progress_at = now
        self.fit.add(shape_of_step(step), now - began)

    def _wait_for_room(self) -> None:
        """There is work but no plan. With nothing running only mail can change that, or never."""
        self._last_step_end = None
        self._fruitless_plans += 1
        if self._fruitless_plans > MAX_FRUITLESS_PLANS and not self.scheduler.running:
            head = self.scheduler.live_requests()[0]
            self.scheduler.abort(head.id, now=self._clock(), reason=FinishReason.ERROR)
            self._end(head, Output(None, FinishReason.ERROR, "the request cannot be scheduled"))
            self._fruitless_plans = 0
            return
        time.sleep(IDLE_WAIT_SECONDS)

    def _publish(self, booked: Booked) -> None:
        for event in booked.events:  # first tokens and ends among them: they go before what follows others
            self._publish_event(event)
        live_requests, outbox = self._live, self._outbox
        intervals: dict[float, list[int]] = {}  # the cells of those who waited so long: most of a step waited alike
        continued = booked.continued
        columns = continued.requests, continued.tokens, continued.intervals_seconds
        for request, token, interval in zip(*columns, strict=True):
            live = live_requests[request.id]
            if interval in intervals:
                intervals[interval].append(live.cell)
            else:
                intervals[interval] = [live.cell]
            outbox.append((live.sink, _new(Output, (token, None, None, False))))
        self.metrics.counts.generation_tokens += len(continued.requests)
        for interval, cells in intervals.items():
            self._count_intervals(interval, cells)

    def _publish_event(self, event: TokenEvent) -> None:
        request, token, reason, interval = event
        counts, live = self.metrics.counts, self._live[request.id]
        error = token.error if token is not None else None
        if error is None and request.pooling is not None:
            counts.prompt_tokens += request.prompt_tokens
            counts.cached_prompt_tokens += request.num_cached
            counts.pooled_requests += 1
        elif error is None:
            counts.generation_tokens += 1
            if interval is None:
                self._count_first_token(request, live.cell)
            else:
                self._count_intervals(interval, [live.cell])
        elif token is not None and token.is_corrupted:
            counts.corrupted_requests += 1
        if reason is None:
            self._outbox.append((live.sink, Output(token)))
        else:
            self._end(request, Output(None if error else token, reason, error))

    def _count_intervals(self, seconds: float, cells: Sequence[int]) -> None:
        for cell, times in Counter(cells).items():
            self.metrics.counts.itl[cell].observe(seconds, times)

    def _count_first_token(self, request: Request, cell: int) -> None:
        counts = self.metrics.counts
        counts.prompt_tokens += request.prompt_tokens
        counts.cached_prompt_tokens += request.num_cached
        if request.first_token_at is not None:
            queued = None if request.scheduled_at is None else request.scheduled_at - request.arrival
            self.metrics.first_token(cell, ttft_seconds=request.first_token_at - request.arrival, queue_seconds=queued)

    def _end(self, request: Request, output: Output) -> None:
        live = self._live.pop(request.id)
        self._outbox.append((live.sink, output))
        assert output.finish_reason is not None
        first, last, tokens = request.first_token_at, request.last_token_at, request.output_tokens
        ended_at = self._clock() if request.finished_at is None else request.finished_at
        self.metrics.finished(
            FinishedRequest(
                isl=request.prompt_tokens,
                osl=tokens,
                reason=output.finish_reason,
                e2e_seconds=ended_at - request.arrival,
                ttft_seconds=None if first is None else first - request.arrival,
                itl_seconds=None if first is None or last is None or tokens < 2 else (last - first) / (tokens - 1),
            )
        )

    def _fail(self, step: Step, message: str) -> None:
        """The requests of the step end with an error; the others go on, unless steps keep failing."""
        self.metrics.counts.failed_steps += 1
        self._last_step_end = None
        self._progress_at = self._clock()
        self._publish(self.scheduler.fail(step, f"the step failed: {message}", self._clock()))
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineFailed(f"{self._failed_steps} steps failed one after the other, the last with {message}")

    def _give_up(self, message: str) -> None:
        """End all requests with an error and say why."""
        self.failure = message
        for live in self._live.values():
            self._outbox.append((live.sink, Output(None, FinishReason.ERROR, "the engine failed")))
        self._live.clear()
        while not self._mailbox.empty():
            if isinstance(mail := self._mailbox.get(), _Add):
                self._outbox.append((mail.sink, Output(None, FinishReason.ERROR, "the engine failed")))
        self._deliver()
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self.failed.set)

    def _deliver(self) -> None:
        if self._outbox and self._event_loop is not None:
            outbox, self._outbox = self._outbox, []
            self._event_loop.call_soon_threadsafe(_push_all, outbox)


def _host_use(host: HostPool, info: ModelInfo) -> HostUse:
    return HostUse(
        slots=host.slots,
        used=host.used,
        stored_blocks=host.stored_blocks,
        loaded_blocks=host.loaded_blocks,
        tokens_per_block=info.block_tokens / len(info.kv_windows),
        block_bytes=info.group_block_bytes,
    )


def _lora_use(adapters: Adapters, live: Sequence[Request]) -> LoraUse:
    counts = {info.name: dict.fromkeys(("running", "waiting"), 0) for info in adapters.infos()}
    for request in live:
        if request.adapter is not None and request.adapter.name in counts:
            counts[request.adapter.name]["running" if request.state is RequestState.RUNNING else "waiting"] += 1
    return LoraUse(adapters.max_loras, counts, at_seconds=time.time())


_new = tuple.__new__
"""What a named tuple's own constructor calls, in half its time."""


class EngineFailed(RuntimeError):
    """Steps keep failing; the process should be replaced."""


def _push_all(outbox: list[tuple[Sink, Output]]) -> None:
    for sink, output in outbox:
        sink.push(output)


def build_engine(
    runner: Runner,
    file: SettingsFile,
    *,
    speculation: NgramSpeculation | None = None,
    pooled: PooledLimits | None = None,
    admission: AdmissionPolicy | None = None,
    on_idle: Callable[[], None] | None = None,
) -> Engine:
    """An engine for a loaded model. `on_idle` is called when the loop has nothing to do."""
    info = runner.info
    host = HostPool(info.host_blocks) if info.host_blocks else None
    pool = BlockPool(info.group_blocks, info.block_tokens, host=host, windows=info.kv_windows)
    scheduler = Scheduler(file.settings, pool, max_model_len=info.max_model_len, speculation=speculation)
    scheduler.admit_by(admission or AdmissionPolicy())
    return Engine(runner, scheduler, metrics=EngineMetrics(file.patterns), pooled=pooled, on_idle=on_idle)
