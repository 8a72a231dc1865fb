"""The batch scheduler: which tokens of which requests the next step computes, under settings that change live.

Pure: plan → run → commit is driven by the engine's loop or by a simulator, from one thread. It owns requests from `add`
to their end and the block pool's books; it knows no tokens' meaning, no text, no clock.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from tidegate_engine.blocks import BlockPool, IntegrityError
from tidegate_engine.ngrams import NgramIndex, NgramSpeculation
from tidegate_engine.output_lengths import OutputLengths
from tidegate_engine.request import (
    Booked,
    Continued,
    Decodes,
    FinishReason,
    Request,
    RequestState,
    SampledToken,
    Step,
    StepItem,
    TokenEvent,
)
from tidegate_engine.settings import OSL_EDGES, AdmissionPolicy, BatchSettings

AGEING_SECONDS = 30.0
"""Each step of priority is worth so much waiting: a request is overtaken only by those that come so soon after it."""
MAX_BYPASSES = 32
"""How often a waiting request that does not fit may be overtaken by later ones that do."""
MAX_PASSED_PER_STEP = 4
"""Waiting requests without room that a step looks past."""
EXPECTED_OUTPUT_CAP_TOKENS = 4096
RESERVE_RATIO_START = 0.4
RESERVE_RATIO_MIN = 0.1
RESERVE_RATIO_RISE = 0.1
"""Added to the share of the expected output that admission keeps blocks for, when one is preempted for want of them."""
RESERVE_RATIO_DECAY = 0.001
"""Taken away by each step."""
ADMISSION_RETRY_STEPS = 16
"""Without freed blocks or arrivals, how often admission looks again, since the reserve shrinks meanwhile."""


class RequestRefused(ValueError):
    """The request can never be served. `reason` is CamelCase, the message a sentence with both numbers."""

    def __init__(self, reason: str, message: str, *, wanted: int, allowed: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.wanted = wanted
        self.allowed = allowed


class Scheduler:
    """Continuous batching with chunked prefill, prefix sharing and preemption by recomputation.

    A request has one counter of computed tokens and no phases: with one token left it decodes, with more it prefills.
    Blocks for all known tokens are taken at admission, so only a decode can run out of them. Requests are kept in an
    order of priority and age; the last running one gives way, so the first always advances and everything ends.
    """

    def __init__(
        self,
        settings: BatchSettings,
        blocks: BlockPool,
        *,
        max_model_len: int,
        speculation: NgramSpeculation | None = None,
    ) -> None:
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.preemptions = {"kv": 0, "policy": 0}
        """By cause: `kv` = no block for the next token, `policy` = a more urgent request took the place."""
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        """Of `drafted_tokens`, those that were right."""
        self._speculation = speculation
        self._ngrams: dict[str, NgramIndex] = {}
        self._settings = settings
        self._settings_version = 1
        self._admission = AdmissionPolicy(enable_prefix_caching=blocks.prefix_caching)
        self._is_held = False
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._in_flight: Step | None = None
        self._step_id = 0
        self._arrivals = 0
        self._waiting_tokens = 0
        self._reserve_ratio = RESERVE_RATIO_START
        self._lengths = OutputLengths()
        self._stuck_at: tuple[int, ...] | None = None

    # --- what is the case

    @property
    def settings(self) -> BatchSettings:
        return self._settings

    @property
    def settings_version(self) -> int:
        """Grows with each `apply`; a step carries the one it was planned under."""
        return self._settings_version

    @property
    def step_id(self) -> int:
        """Id of the last step that was planned."""
        return self._step_id

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def over_cap(self) -> int:
        """Running requests above `max_num_seqs`, which drain after it was lowered."""
        return max(0, len(self._running) - self._settings.max_num_seqs)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Tokens that the waiting requests have to prefill, prefix hits not counted off."""
        return self._waiting_tokens

    @property
    def running_context_tokens(self) -> int:
        """Tokens whose keys and values the running requests hold or compute now."""
        return sum(request.num_computed for request in self._running)

    @property
    def kv_waste_ratio(self) -> float | None:
        """Share of the token slots in used blocks that hold none; None while none is used."""
        slots = self.blocks.used * self.blocks.block_tokens
        empty = sum(self.blocks.count_empty(request) for request in list(self._running))
        return min(1.0, empty / slots) if slots else None

    @property
    def running_output_past_edges(self) -> dict[int, int]:
        """By lower edge: running requests with at least so many output tokens."""
        outputs = [request.output_tokens for request in self._running]
        return {edge: sum(1 for tokens in outputs if tokens >= edge) for edge in OSL_EDGES}

    @property
    def reserve_ratio(self) -> float:
        """Share of the expected output for which admission keeps blocks back; rises with preemptions, unless the
        policy says it."""
        fixed = self._admission.reserve_ratio
        return self._reserve_ratio if fixed is None else fixed

    @property
    def limits(self) -> dict[str, float]:
        """The policy that acts, in numbers; what has no limit is left out."""
        acting = asdict(replace(self._admission, reserve_ratio=self.reserve_ratio))
        return {name: float(value) for name, value in acting.items() if value is not None}

    @property
    def has_work(self) -> bool:
        return bool(self._running) or (bool(self._waiting) and not self._is_held)

    def get(self, request_id: str) -> Request | None:
        """The live request of this id."""
        return self._requests.get(request_id)

    def live_requests(self) -> list[Request]:
        """Running ones first, then waiting ones, each in their order."""
        return [*self._running, *self._waiting]

    # --- what happens to it

    def add(self, request: Request) -> None:
        """Queue `request`; raises RequestRefused when it can never fit.

        When only the prompt fits, `max_tokens` is lowered to what fits and `requested_max_tokens` keeps what was asked.
        """
        if request.id in self._requests:
            raise ValueError(f"a request with the id {request.id!r} is already here")
        max_tokens = min(request.max_tokens, self._max_output(request))
        if max_tokens < request.max_tokens:
            request.requested_max_tokens = request.max_tokens
            request.max_tokens = max_tokens
        self._arrivals += 1
        request.sequence = self._arrivals
        self._requests[request.id] = request
        self._enqueue(request)

    def abort(
        self, request_id: str, *, now: float | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> Request | None:
        """End a request in any state; returns it, or None when it is unknown or has ended already.

        `reason` is `stop` when the caller saw a stop string. Blocks that a step in flight may write stay fenced until
        its commit, which then skips the request.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            self._waiting_tokens -= request.total_tokens
        else:
            self._running.remove(request)
        self._finish(request, reason, now)
        if reason is FinishReason.STOP and request.output_tokens:
            self._lengths.learn(request.output_tokens)
        return request

    def apply(self, settings: BatchSettings) -> int:
        """Use `settings` from the next step on; returns their version. The caller has checked them (`find_violation`).

        Raising acts at once. Lowering drains: running requests go on, none is admitted until they are below the cap.
        """
        if min(settings.as_dict().values()) < 1:
            raise ValueError(f"batch settings must be positive: {settings}")
        self._settings = settings
        self._settings_version += 1
        return self._settings_version

    def admit_by(self, policy: AdmissionPolicy) -> None:
        """Start waiting requests by `policy` from the next step on; running ones go on, with the blocks they share."""
        self._admission = policy
        self.blocks.prefix_caching = policy.enable_prefix_caching
        self._stuck_at = None

    def hold(self, is_held: bool) -> None:
        """Start no waiting request until told otherwise; running ones go on."""
        self._is_held = is_held

    def preempt_all(self) -> int:
        """Send all running requests back to the queue, to be computed again; returns how many. Between two steps."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.id} is not committed yet")
        count = len(self._running)
        while self._running:
            self._preempt(self._running.pop(), "policy")
        return count

    def resize(self, total_blocks: int) -> None:
        """Have so many blocks from the next step on, all of them empty. Nothing runs; raises ValueError, and changes
        nothing, where a request that waits would not fit."""
        for request in self._waiting:
            most = self.blocks.tokens_that_fit(request, total_blocks=total_blocks)
            if request.prompt_tokens + request.max_tokens - 1 > most:
                raise ValueError(f"the request {request.id!r} does not fit into {total_blocks} blocks")
        self.blocks.resize(total_blocks)
        self._stuck_at = None

    def overdue(self, now: float) -> list[Request]:
        """Waiting requests that never began and have waited longer than the policy allows."""
        timeout = self._admission.queue_timeout_s
        if timeout is None:
            return []
        return [r for r in self._waiting if r.scheduled_at is None and now - r.arrival - r.excused_seconds > timeout]

    def plan(self, now: float) -> Step:
        """Choose the next step: decodes, then running prefills, then waiting requests.

        Every running decode gets its token, also while more are running than the settings allow; only what is added
        to them is bounded by `max_num_batched_tokens`. A step without items need not be run or committed.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.id} is not committed yet")
        if self._must_yield():
            self._preempt(self._running.pop(), "policy")
        requests: list[Request] = []
        starts: list[int] = []
        tables: list[Sequence[int]] = []
        prefills: list[Request] = []
        preempted_before = self.preemptions["kv"]
        block_tokens = self.blocks.block_tokens
        for request in self._running:  # growing a table may take requests off the end
            start = request.num_computed
            if not start % block_tokens and not self._grow(request):
                break
            if request.prompt_tokens + request.output_tokens - start > 1 or request.pooling is not None:
                prefills.append(request)
                continue
            request.num_computed = start + 1
            requests.append(request)
            starts.append(start)
            tables.append(request.blocks)
        decodes, chunks = Decodes(requests, starts, tables), list[StepItem]()
        budget, kept = self._settings.max_num_batched_tokens - len(requests), 0
        most = self._admission.max_prefill_tokens_per_step
        if most is not None and most < budget:
            budget, kept = most, budget - most
        for request in prefills:
            if budget <= 0:
                break
            budget -= self._prefill(request, budget, chunks)
        if self._waiting and not self._is_held and self.preemptions["kv"] == preempted_before:
            budget = self._admit(budget, chunks, now)
        if self._speculation is not None:
            decodes = self._add_drafts(decodes, chunks, self._speculation, budget=budget + kept)
        self._step_id += 1
        step = Step(self._step_id, chunks, self._settings_version, decodes)
        if not step.is_empty:
            if self.blocks.host is not None:
                stores, loads = self.blocks.host.take_copies()
                step = replace(step, stores=stores, loads=loads)
            self._in_flight = step
        return step

    def commit(self, step: Step, tokens: Mapping[str, SampledToken] | None, now: float) -> Booked:
        """Book what `step` computed.

        `tokens` has one for every item that samples; with None only counts matter: each of them yields one token, and
        length decides the end. A missing token ends its request with `error`, as a token with an error does. Where one
        is deferred, the next step computes the request's last position again.
        """
        booked = Booked()
        if step.is_empty:
            return booked
        self._land(step)
        rest = self._continue_plain(step.decodes.requests, tokens, now, booked.continued)
        rest += [(item.request, item.samples, item.drafts) for item in step.chunks]
        events, pool = booked.events, self.blocks
        running_state = RequestState.RUNNING
        finished = False
        for request, samples, drafts in rest:
            if request.state is not running_state:
                continue
            token = None
            if samples and tokens is not None:
                token = tokens.get(request.id) or _NO_TOKEN
                if token.error is not None:
                    self._finish(request, FinishReason.ERROR, now)
                    events.append(TokenEvent(request, token, FinishReason.ERROR))
                    finished = True
                    continue
                if token.is_deferred:
                    request.num_computed -= 1
                    continue
            if request.num_computed // pool.block_tokens > request.num_published:
                pool.publish(request)
                pool.release_unseen(request)
            if not samples:
                continue
            if request.pooling is not None:
                self._finish(request, FinishReason.STOP, now)
                events.append(TokenEvent(request, token, FinishReason.STOP))
                finished = True
                continue
            request.output_tokens += 1
            if token is not None:
                request.output_ids.append(token.token_id)
            reason = _end_of(request, token)
            before, request.last_token_at = request.last_token_at, now
            if before is None:
                request.first_token_at = now
            events.append(TokenEvent(request, token, reason, None if before is None else now - before))
            if drafts and token is not None and reason is None:
                reason = self._commit_drafts(request, token, drafts, events)
            if reason is not None:
                self._lengths.learn(request.output_tokens)
                self._finish(request, reason, now)
                finished = True
        if finished:
            self._running = [request for request in self._running if request.state is running_state]
        self._decay_reserve(1)
        return booked

    def _continue_plain(
        self,
        requests: Sequence[Request],
        tokens: Mapping[str, SampledToken] | None,
        now: float,
        continued: Continued,
    ) -> list[tuple[Request, bool, Sequence[int]]]:
        """Book the decodes that got a token after which they go on, as nearly all do; returns the others.

        Each line runs hundreds of times in a step.
        """
        rest: list[tuple[Request, bool, Sequence[int]]] = []
        pool, running_state = self.blocks, RequestState.RUNNING
        block_tokens = pool.block_tokens
        told, given, waited = continued.requests.append, continued.tokens.append, continued.intervals_seconds.append
        token: SampledToken | None = None
        token_id = -1
        ends: object = False
        for request in requests:
            before, output_tokens = request.last_token_at, request.output_tokens + 1
            if tokens is not None:
                token = tokens.get(request.id) or _NO_TOKEN
                token_id, may_end, _, error, _, is_final, is_deferred, _, _ = token
                ends = may_end or error or is_final or is_deferred or request.params.stop_token_ids
            if ends or before is None or output_tokens >= request.max_tokens or request.state is not running_state:
                rest.append((request, True, ()))
                continue
            if request.num_computed // block_tokens > request.num_published:
                pool.publish(request)
                pool.release_unseen(request)
            request.output_tokens = output_tokens
            request.last_token_at = now
            if token is not None:
                request.output_ids.append(token_id)
            told(request)
            given(token)
            waited(now - before)
        return rest

    def fail(self, step: Step, message: str, now: float) -> Booked:
        """End every request of a step that could not be computed; the others go on."""
        if step.is_empty:
            return Booked()
        self._land(step)
        if self.blocks.host is not None:
            self.blocks.host.drop(step.stores)
        failed = [item.request for item in step.items if item.request.state is RequestState.RUNNING]
        for request in failed:
            self._finish(request, FinishReason.ERROR, now)
        self._running = [request for request in self._running if request.state is RequestState.RUNNING]
        token = SampledToken(-1, error=message)
        return Booked(events=[TokenEvent(request, token, FinishReason.ERROR) for request in failed])

    def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        self.blocks.flush()

    def steps_until_event(self) -> int:
        """How many steps from now on only decode the same requests, none ending, starting or giving way: see `leap`."""
        most = self._steps_until_end()
        if most and not self._have_blocks_for(most):
            most = bisect_left(range(1, most), True, key=lambda steps: not self._have_blocks_for(steps))
        return most

    def leap(self, steps: int, now: float) -> None:
        """Do what `steps` times plan and commit without tokens would do; `now` is the time at their end.

        At most `steps_until_event()` steps. For simulators, which know no token ids: no event is reported.
        """
        if not steps:
            return
        if not 0 < steps <= self._steps_until_end() or not self._have_blocks_for(steps):
            raise ValueError(f"a leap over {steps} steps, but something happens after {self.steps_until_event()}")
        pool = self.blocks
        block_tokens = pool.block_tokens
        for request in self._running:
            request.num_computed = computed = request.num_computed + steps
            request.output_tokens += steps
            request.last_token_at = now
            if computed // block_tokens > request.num_published:
                missing = -(-computed // block_tokens) - len(request.blocks)
                if missing:
                    request.blocks.extend(pool.allocate(missing))
                pool.publish(request)
            elif computed > len(request.blocks) * block_tokens:
                request.blocks.extend(pool.allocate(1))
        self._step_id += steps
        self._decay_reserve(steps)

    def _steps_until_end(self) -> int:
        """As `steps_until_event`, as far as it does not depend on blocks."""
        running = self._running
        if self._in_flight is not None or not running:
            return 0
        if self._waiting and (len(running) < self._settings.max_num_seqs or self._must_yield()):
            return 0
        sees_all = self.blocks.sees_all
        most, last_token_at = sys.maxsize, running[0].last_token_at
        if last_token_at is None:
            return 0
        for request in running:
            output_tokens = request.output_tokens
            if request.prompt_tokens + output_tokens - request.num_computed != 1 or not sees_all(request):
                return 0
            # A first token is an event, and so is one after a pause: a chunk may have left one token of a prompt.
            if request.last_token_at != last_token_at:
                return 0
            if request.max_tokens - output_tokens < most:
                most = request.max_tokens - output_tokens
        return most - 1

    def _have_blocks_for(self, steps: int) -> bool:
        """Whether all running requests can decode for so many steps."""
        size = self.blocks.block_tokens
        # A block more for each request is more than any of them can need beyond full blocks.
        if len(self._running) * (steps // size + 1) <= self.blocks.available:
            return True
        needed = sum([-(-(r.num_computed + steps) // size) - len(r.blocks) for r in self._running])
        return needed <= self.blocks.available

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the books of requests and blocks balance. For tests and idle moments."""
        tables = [[block for block in request.blocks if block] for request in self._running]
        self.blocks.check_integrity(tables)
        block_tokens, groups = self.blocks.block_tokens, self.blocks.groups
        live = [*self._running, *self._waiting]
        complaints = {
            "the queues and the index differ": {id(r) for r in live} != {id(r) for r in self._requests.values()},
            "a request is queued twice": len(live) != len(self._requests),
            "running is out of order": self._running != sorted(self._running, key=_order),
            "waiting is out of order": self._waiting != sorted(self._waiting, key=_order),
            "a state is wrong": any(r.state is not RequestState.RUNNING for r in self._running)
            or any(r.state is not RequestState.WAITING for r in self._waiting),
            "a waiting request holds something": any(r.blocks or r.num_computed for r in self._waiting),
            "a table is too short": any(len(r.blocks) * block_tokens < r.num_computed * groups for r in self._running),
            "a block is gone that is seen": any(self.blocks.lacks_seen(r) for r in self._running),
            "more is computed than known": any(r.num_computed > r.total_tokens for r in self._running),
            "waiting tokens differ": self._waiting_tokens != sum(r.total_tokens for r in self._waiting),
            "the blocks of a request that ended stay used": self._in_flight is None
            and self.blocks.used != len({block for table in tables for block in table}),
        }
        if broken := [complaint for complaint, holds in complaints.items() if holds]:
            raise IntegrityError("; ".join(broken))

    # --- how

    def _max_output(self, request: Request) -> int:
        """Output tokens that can ever fit behind the prompt; raises RequestRefused when there is no room for one."""
        prompt = request.prompt_tokens
        if prompt < 1 or request.max_tokens < 1:
            raise RequestRefused(
                "EmptyRequest",
                f"the prompt has {prompt} tokens and max_tokens is {request.max_tokens}; both must be at least 1",
                wanted=min(prompt, request.max_tokens),
                allowed=1,
            )
        kv_tokens = self.blocks.tokens_that_fit(request)
        if request.pooling is not None and prompt <= min(self.max_model_len, kv_tokens):
            return 1
        if prompt >= self.max_model_len:
            raise RequestRefused(
                "ContextTooLong",
                f"the prompt has {prompt} tokens, and the context of {self.max_model_len} tokens must hold "
                "at least one token of output beside it"
                if request.pooling is None
                else f"the input has {prompt} tokens, and the context holds {self.max_model_len}",
                wanted=prompt + (request.pooling is None),
                allowed=self.max_model_len,
            )
        if prompt > kv_tokens:
            raise RequestRefused(
                "KvCacheTooSmall",
                f"the prompt has {prompt} tokens, and the whole KV cache holds {kv_tokens}",
                wanted=prompt,
                allowed=kv_tokens,
            )
        # The last token's keys and values are never needed.
        return min(self.max_model_len - prompt, kv_tokens + 1 - prompt)

    def _enqueue(self, request: Request) -> None:
        insort(self._waiting, request, key=_order)
        self._waiting_tokens += request.total_tokens

    def _grow(self, request: Request) -> bool:
        """Give a request the block for its next token, where it lacks it, from later requests if need be.

        False when it had to give way itself.
        """
        missing = self.blocks.missing(request, request.num_computed + 1)
        while len(missing) > self.blocks.available:
            victim = self._running.pop()
            self._preempt(victim, "kv")
            self._reserve_ratio = min(1.0, self._reserve_ratio + RESERVE_RATIO_RISE)
            if victim is request:
                return False
        if missing:
            self.blocks.fill(request, missing)
        return True

    def _must_yield(self) -> bool:
        """Whether the last running request loses its place to a more urgent one for which there is no other.

        One a step. Age counts: a request that has waited its time is not sent back any more.
        """
        if not self._waiting or not self._running or self._is_held:
            return False
        urgent, last = self._waiting[0], self._running[-1]
        if urgent.priority >= last.priority or _order(urgent) > _order(last):
            return False
        free_seats = self._settings.max_num_seqs - len(self._running)
        return free_seats == 0 or (free_seats > 0 and self._stuck_at == self._pressure())

    def _preempt(self, request: Request, cause: str) -> None:
        self._let_go(request)
        request.state = RequestState.WAITING
        request.num_computed = 0
        request.preemptions += 1
        self._enqueue(request)
        self.preemptions[cause] += 1

    def _prefill(self, request: Request, budget: int, items: list[StepItem]) -> int:
        """Plan the request's next chunk, of at least one token; returns its size."""
        start = request.num_computed
        left = request.total_tokens - start
        # What is left of the blocks belongs to the decodes.
        reach = self.blocks.reach(request, keep=len(self._running) * self.blocks.groups) - start
        count = min(left, budget, self._settings.long_prefill_token_threshold, reach)
        if count < left:  # whole blocks, where there is one: they can be published
            end = (start + count) // self.blocks.block_tokens * self.blocks.block_tokens
            if end > start:
                count = end - start
        self.blocks.fill(request, self.blocks.missing(request, start + count))
        request.num_computed = start + count
        items.append(StepItem(request, start, count, count == left, request.blocks))
        return count

    def _add_drafts(
        self, decodes: Decodes, chunks: list[StepItem], speculation: NgramSpeculation, *, budget: int
    ) -> Decodes:
        """Let decodes guess ahead with what the budget leaves, where their blocks reach or unneeded ones are there.

        Those that do join `chunks`; returns the others.
        """
        columns = decodes.requests, decodes.starts, decodes.tables
        plain = []
        for request, start, table in zip(*columns, strict=True):
            drafts = self._drafts_of(request, start, speculation, budget=budget)
            if drafts:
                budget -= len(drafts)
                chunks.append(StepItem(request, start, 1 + len(drafts), True, table, drafts))
            else:
                plain.append((request, start, table))
        return Decodes(*map(list, zip(*plain, strict=True))) if plain else Decodes()

    def _drafts_of(self, request: Request, start: int, speculation: NgramSpeculation, *, budget: int) -> Sequence[int]:
        if budget <= 0 or not request.prompt_ids or not request.output_ids:  # a simulator's request has no ids
            return ()
        # The step yields one token more than are right, and never more than the request may have.
        most = min(budget, request.max_tokens - request.output_tokens - 1)
        drafts = self._index_of(request, speculation).propose(most)
        missing = self.blocks.missing(request, start + 1 + len(drafts))
        if missing and self.blocks.available - len(missing) < len(self._running):
            held = len(request.blocks) // self.blocks.groups * self.blocks.block_tokens
            drafts, missing = drafts[: held - start - 1], []
        if drafts:
            self.blocks.fill(request, missing)
        return drafts

    def _index_of(self, request: Request, speculation: NgramSpeculation) -> NgramIndex:
        index = self._ngrams.get(request.id)
        if index is None:
            index = self._ngrams[request.id] = NgramIndex(speculation, request.prompt_ids)
        index.extend(request.output_ids[len(index) - request.prompt_tokens :])
        return index

    def _commit_drafts(
        self, request: Request, token: SampledToken, drafts: Sequence[int], events: list[TokenEvent]
    ) -> FinishReason | None:
        """Book the tokens that came with the first one, whose keys and values the step wrote; returns how it ended."""
        reason = None
        for following in token.following:
            request.num_computed += 1
            request.output_ids.append(following.token_id)
            request.output_tokens += 1
            reason = _end_of(request, following)
            events.append(TokenEvent(request, following, reason, 0.0))
            if reason is not None:
                break
        if request.num_computed // self.blocks.block_tokens > request.num_published:
            self.blocks.publish(request)
            self.blocks.release_unseen(request)
        self.drafted_tokens += len(drafts)
        self.accepted_tokens += len(token.following)
        self._ngrams[request.id].learn(proposed=len(drafts), accepted=len(token.following))
        return reason

    def _admit(self, budget: int, items: list[StepItem], now: float) -> int:
        """Start waiting requests while there is room; one without room may be overtaken, but not for ever.

        Returns what is left of the budget.
        """
        if budget <= 0 or len(self._running) >= self._settings.max_num_seqs:
            return budget
        pressure = self._pressure()
        if self._stuck_at == pressure and self._running:
            return budget
        self._stuck_at = None
        outstanding = self._expected_output(self._running)
        passed: list[Request] = []
        while budget > 0 and len(self._running) < self._settings.max_num_seqs and len(passed) < len(self._waiting):
            if self._has_enough_prefills():
                return budget
            request = self._waiting[len(passed)]
            expected = outstanding + self._expected_output((request,))
            if self._place(request, self._reserved_blocks(expected) if self._running else 0):
                outstanding = expected
                del self._waiting[len(passed)]
                self._waiting_tokens -= request.total_tokens
                self._start(request, now)
                budget -= self._prefill(request, budget, items)
                for overtaken in passed:
                    overtaken.bypassed += 1
            else:
                self._stuck_at = pressure
                passed.append(request)
            # A preempted request is not overtaken: whoever takes its place would be preempted next.
            if len(passed) >= MAX_PASSED_PER_STEP or any(r.preemptions or r.bypassed >= MAX_BYPASSES for r in passed):
                return budget
        return budget

    def _has_enough_prefills(self) -> bool:
        """Whether as many prompts as may be are computed in parts now."""
        most = self._admission.max_num_partial_prefills
        return most is not None and sum(r.num_computed < r.total_tokens for r in self._running) >= most

    def _pressure(self) -> tuple[int, ...]:
        """What admission depends on: while it stays, a request that found no room finds none."""
        return (
            self.blocks.releases,
            self._arrivals,
            len(self._waiting),
            self._settings_version,
            self._step_id // ADMISSION_RETRY_STEPS,
        )

    def _place(self, request: Request, reserve: int) -> bool:
        """Give `request` blocks for all its known tokens, when at least `reserve` are left over."""
        pool = self.blocks
        found = pool.match(request)
        if pool.available - pool.count_needed(request, found) < reserve:
            return False
        request.blocks = pool.hand_out(request, found)
        request.num_computed = len(found) // pool.groups * pool.block_tokens
        # What is copied back can be shared when the step has succeeded.
        hosted = next((place for place, entry in enumerate(found) if isinstance(entry, bytes)), len(found))
        request.num_published = hosted // pool.groups
        return True

    def _expected_output(self, requests: Iterable[Request]) -> float:
        """Tokens that the requests are likely to add and to take blocks for."""
        total = 0.0
        lengths = self._lengths if self._lengths.is_experienced else None
        for request in requests:
            output_tokens = request.output_tokens
            limit = request.max_tokens - output_tokens
            if limit > EXPECTED_OUTPUT_CAP_TOKENS:
                limit = EXPECTED_OUTPUT_CAP_TOKENS
            if lengths is None or request.params.ignore_eos:
                tokens: float = limit
            else:
                tokens = lengths.remaining(output_tokens, limit=limit)
            total += tokens if self.blocks.sees_all(request) else self.blocks.growth(request, tokens)
        return total

    def _reserved_blocks(self, output_tokens: float) -> int:
        """Blocks that admission must leave over: a watermark and a share of the output that is likely to come."""
        watermark = max(len(self._running) + 1, int(self.blocks.usable * self._admission.watermark))
        watermark += int(self.blocks.usable * (1.0 - self._admission.kv_admission_limit))
        return watermark + int(output_tokens * self.reserve_ratio / self.blocks.block_tokens)

    def _start(self, request: Request, now: float) -> None:
        insort(self._running, request, key=_order)
        request.state = RequestState.RUNNING
        request.bypassed = 0
        if request.scheduled_at is None:
            request.scheduled_at = now
            request.num_cached = request.num_computed

    def _let_go(self, request: Request) -> None:
        """Release the request's blocks; a step in flight keeps its reference to the table."""
        table, request.blocks = request.blocks, []
        self.blocks.release(table, fence=None if self._in_flight is None else self._in_flight.id)

    def _finish(self, request: Request, reason: FinishReason, now: float | None) -> None:
        self._let_go(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.finished_at = now
        self._ngrams.pop(request.id, None)
        del self._requests[request.id]

    def _land(self, step: Step) -> None:
        """The step in flight is over: what was freed meanwhile is available."""
        if self._in_flight is None or self._in_flight.id != step.id:
            raise RuntimeError(f"step {step.id} is not the one in flight")
        self._in_flight = None
        self.blocks.pass_fence(step.id)

    def _decay_reserve(self, steps: int) -> None:
        self._reserve_ratio = max(RESERVE_RATIO_MIN, self._reserve_ratio - RESERVE_RATIO_DECAY * steps)


_NO_TOKEN = SampledToken(-1, error="the step gave no token for this request")


def _order(request: Request) -> tuple[float, int]:
    """Who goes first. Priorities age as time passes, all alike, so the order of two requests never changes."""
    return request.arrival + AGEING_SECONDS * request.priority, request.sequence


def _end_of(request: Request, token: SampledToken | None) -> FinishReason | None:
    """Why the request ends with the token just counted; None when it goes on."""
    params = request.params
    if (
        token is not None
        and request.output_tokens >= params.min_tokens
        and ((token.is_eos and not params.ignore_eos) or token.token_id in params.stop_token_ids)
    ):
        return FinishReason.STOP
    if token is not None and token.is_final:
        return FinishReason.STOP
    return FinishReason.LENGTH if request.output_tokens >= request.max_tokens else None
