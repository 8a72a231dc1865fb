"""The block pool: books that balance after any sequence of operations, and prefix hits that never lie."""

import os
import sys
from collections.abc import Sequence

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate_engine import blocks as blocks_module
from tidegate_engine.blocks import NULL_BLOCK, BlockPool, IntegrityError, OutOfBlocksError, tokens_that_fit
from tidegate_engine.request import Adapter, Request, Window

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
BLOCK = 4


def make_request(ids: Sequence[int], *, salt: str = "") -> Request:
    return Request("r", len(ids), 8, 0.0, prompt_ids=tuple(ids), cache_salt=salt)


def run_whole(pool: BlockPool, request: Request) -> None:
    """What the scheduler does with a prompt: share what is known, compute the rest, publish."""
    found = pool.match(request)
    request.blocks = pool.hand_out(request, found)
    request.num_published = len(found) // pool.groups
    request.num_computed = request.num_published * pool.block_tokens
    pool.fill(request, pool.missing(request, request.total_tokens))
    request.num_computed = request.total_tokens
    pool.publish(request)
    pool.release_unseen(request)


def end(pool: BlockPool, request: Request, *, fence: int | None = None) -> None:
    table, request.blocks = request.blocks, []
    pool.release(table, fence=fence)


def count_hits(pool: BlockPool, ids: Sequence[int], *, salt: str = "") -> int:
    return len(pool.match(make_request(ids, salt=salt)))


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(9, BLOCK)
    assert sorted(pool.allocate(8)) == list(range(1, 9))
    assert NULL_BLOCK not in pool.allocate(0)
    with pytest.raises(OutOfBlocksError, match="1 blocks wanted, 0 available"):
        pool.allocate(1)


@pytest.mark.parametrize(("total", "tokens"), [(1, 16), (0, 16), (8, 0)])
def test_a_pool_without_room_is_refused(total: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="needs two blocks"):
        BlockPool(total, tokens)


def test_a_prefix_is_found_while_in_use_and_after() -> None:
    pool = BlockPool(20, BLOCK)
    first = make_request(range(10))
    run_whole(pool, first)
    second = make_request([*range(8), 99, 98])
    run_whole(pool, second)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert pool.used == 4
    end(pool, first)
    end(pool, second)
    assert (pool.used, pool.cached, pool.free) == (0, 2, 17)
    assert count_hits(pool, range(10)) == 2
    pool.check_integrity([])


@pytest.mark.parametrize(("length", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_a_hit_never_covers_the_last_token(length: int, hits: int) -> None:
    pool = BlockPool(20, BLOCK)
    run_whole(pool, make_request(range(13)))
    assert count_hits(pool, range(length)) == hits


def test_nothing_is_found_before_it_is_published() -> None:
    pool = BlockPool(20, BLOCK)
    request = make_request(range(13))
    assert pool.match(request) == []
    request.blocks = pool.allocate(4)
    request.num_computed = 6
    pool.publish(request)
    assert count_hits(pool, range(13)) == 1
    request.num_computed = 13
    pool.publish(request)
    assert count_hits(pool, range(13)) == 3


def test_salts_keep_tenants_apart() -> None:
    pool = BlockPool(20, BLOCK)
    run_whole(pool, make_request(range(10), salt="a"))
    assert count_hits(pool, range(10), salt="a") == 2
    assert count_hits(pool, range(10), salt="b") == 0
    assert count_hits(pool, range(10)) == 0


def test_a_block_is_known_by_its_whole_prefix() -> None:
    pool = BlockPool(20, BLOCK)
    run_whole(pool, make_request([1, 1, 1, 1, 2, 2, 2, 2, 3]))
    assert count_hits(pool, [9, 9, 9, 9, 2, 2, 2, 2, 3]) == 0


def test_ids_above_32_bits_do_not_collide() -> None:
    pool = BlockPool(20, BLOCK)
    run_whole(pool, make_request([2**32 + 1] * 5))
    assert count_hits(pool, [1] * 5) == 0
    assert count_hits(pool, [2**32 + 1] * 5) == 1


def test_equal_hashes_with_different_tokens_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "_hash_block", lambda parent, content: b"same")
    pool = BlockPool(20, BLOCK)
    run_whole(pool, make_request([1] * 5))
    assert count_hits(pool, [1] * 5) == 1
    assert count_hits(pool, [2] * 5) == 0
    run_whole(pool, make_request([2] * 5))
    assert count_hits(pool, [2] * 5) == 0


def test_hashes_brought_ready_made_need_no_ids() -> None:
    pool = BlockPool(20, BLOCK)
    hashes = [b"one", b"two", b"three"]
    run_whole(pool, Request("a", 13, 8, 0.0, block_hashes=list(hashes)))
    assert len(pool.match(Request("b", 13, 8, 0.0, block_hashes=list(hashes)))) == 3
    assert len(pool.match(Request("c", 13, 8, 0.0, block_hashes=[b"one", b"other"]))) == 1


def test_a_prefix_that_stays_known_when_none_may_be_shared_any_more_is_an_error_of_the_books() -> None:
    pool = BlockPool(20, BLOCK)
    request = make_request(range(10))
    run_whole(pool, request)
    pool.check_integrity([request.blocks])
    pool._prefix_caching = False  # past the setter, which forgets them
    with pytest.raises(IntegrityError, match="a prefix is known that nobody may share"):
        pool.check_integrity([request.blocks])


def test_without_prefix_caching_nothing_is_cached() -> None:
    pool = BlockPool(20, BLOCK, prefix_caching=False)
    request = make_request(range(10))
    run_whole(pool, request)
    end(pool, request)
    assert (pool.used, pool.cached, pool.free) == (0, 0, 19)
    assert count_hits(pool, range(10)) == 0


def test_blocks_without_content_go_first_then_the_longest_unused_tail() -> None:
    pool = BlockPool(1 + 6, BLOCK)
    old, new = make_request([1] * 12), make_request([2] * 12)
    for request in (old, new):
        run_whole(pool, request)
    for request in (old, new):
        end(pool, request)
    assert (pool.cached, pool.free) == (6, 0)
    taken = pool.allocate(1)
    assert count_hits(pool, [1] * 13) == 2  # the tail of the old one is gone, its head stands
    assert count_hits(pool, [2] * 13) == 3
    taken += pool.allocate(2)
    assert count_hits(pool, [1] * 13) == 0
    assert count_hits(pool, [2] * 13) == 3
    pool.check_integrity([taken])


def test_a_hit_makes_a_block_young_again() -> None:
    pool = BlockPool(1 + 4, BLOCK)
    first, second = make_request([1] * 5), make_request([2] * 5)
    for request in (first, second):
        run_whole(pool, request)
    for request in (first, second):
        end(pool, request)
    again = make_request([1] * 5)
    run_whole(pool, again)
    end(pool, again)
    pool.allocate(3)
    assert count_hits(pool, [1] * 5) == 1
    assert count_hits(pool, [2] * 5) == 0


def test_fenced_blocks_wait_for_their_step() -> None:
    pool = BlockPool(1 + 3, BLOCK)
    request = make_request(range(9))
    run_whole(pool, request)
    end(pool, request, fence=7)
    assert (pool.used, pool.available) == (3, 0)
    pool.pass_fence(6)
    assert pool.available == 0
    pool.pass_fence(7)
    assert (pool.used, pool.cached, pool.free) == (0, 2, 1)


def test_a_fenced_block_can_be_shared_before_its_step_is_over() -> None:
    pool = BlockPool(1 + 4, BLOCK)
    request = make_request(range(9))
    run_whole(pool, request)
    end(pool, request, fence=7)
    other = make_request([*range(8), 50])
    shared = pool.match(other)
    assert pool.count_needed(other, shared) == 1
    other.blocks = pool.hand_out(other, shared)
    pool.pass_fence(7)
    pool.check_integrity([other.blocks])
    assert pool.used == 3


def test_a_flush_forgets_and_running_requests_publish_nothing_old() -> None:
    pool = BlockPool(20, BLOCK)
    running, ended = make_request(range(12)), make_request(range(50, 62))
    run_whole(pool, running)
    run_whole(pool, ended)
    end(pool, ended)
    pool.flush()
    assert (pool.cached, count_hits(pool, range(12)), count_hits(pool, range(50, 62))) == (0, 0, 0)
    running.output_ids, running.output_tokens, running.num_computed = [1, 2, 3, 4], 4, 16
    running.blocks += pool.allocate(1)
    pool.publish(running)
    end(pool, running)
    assert pool.cached == 0
    fresh = make_request(range(12))
    run_whole(pool, fresh)
    assert count_hits(pool, range(13)) == 3
    pool.check_integrity([fresh.blocks])


def test_hashes_brought_ready_made_do_not_outlive_a_flush() -> None:
    pool = BlockPool(20, BLOCK)
    running = Request("a", 9, 8, 0.0, block_hashes=[b"one", b"two"])
    running.blocks = pool.allocate(3)
    assert pool.match(running) == []
    pool.flush()
    running.num_computed = 9
    pool.publish(running)
    assert pool.match(Request("b", 9, 8, 0.0, block_hashes=[b"one", b"two"])) == []


@pytest.mark.parametrize("break_it", ["leak", "double", "null", "reference"])
def test_the_integrity_check_can_fail(break_it: str) -> None:
    pool = BlockPool(10, BLOCK)
    table = pool.allocate(3)
    pool.check_integrity([table])
    match break_it:
        case "leak":
            tables = [table[:2]]
        case "double":
            pool.release(table[:1])
            tables = [table]
        case "null":
            tables = [[*table, NULL_BLOCK]]
        case _:
            tables = [table, table[:1]]
    with pytest.raises(IntegrityError):
        pool.check_integrity(tables)


# --- windows


def held(pool: BlockPool, request: Request, group: int = 0) -> list[int]:
    """Which blocks of its text the request holds in a group."""
    return [index for index, block in enumerate(request.blocks[group :: pool.groups]) if block]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("computed", [4, 7, 8, 12, 13, 40])
def test_a_window_keeps_the_blocks_that_the_next_token_sees_and_no_others(window: int, computed: int) -> None:
    pool = BlockPool(50, BLOCK, windows=[window])
    request = make_request(range(computed))
    run_whole(pool, request)
    seen = range(max(0, computed - window + 1), computed)  # beside itself, which is at `computed`
    wanted = sorted({position // BLOCK for position in seen} | ({computed // BLOCK} if computed % BLOCK else set()))
    assert held(pool, request) == wanted
    assert pool.used == len(wanted)


def test_sinks_stay_when_the_window_moves_on() -> None:
    pool = BlockPool(50, BLOCK)
    request = make_request(range(40))
    request.window = Window(8, sinks=5)
    run_whole(pool, request)
    assert held(pool, request) == [0, 1, 8, 9]


def test_groups_of_layers_keep_what_each_of_them_sees() -> None:
    pool = BlockPool(100, BLOCK, windows=[5, None, 9])
    request = make_request(range(24))
    run_whole(pool, request)
    assert [held(pool, request, group) for group in range(3)] == [[5], [0, 1, 2, 3, 4, 5], [4, 5]]
    assert pool.used == 9


@pytest.mark.parametrize(
    ("blocks", "windows", "tokens"),
    [
        (10, [None], 40),
        (10, [None, None], 20),
        (10, [9], sys.maxsize),  # three blocks at most: eight tokens back, and the next one's
        (3, [9], sys.maxsize),
        (2, [9], 8),
        (10, [9, None], 28),
        (10, [Window(9, sinks=4)], sys.maxsize),
        (3, [Window(9, sinks=4)], 12),
    ],
)
def test_what_fits_counts_only_blocks_that_are_seen(
    blocks: int, windows: list[int | Window | None], tokens: int
) -> None:
    assert tokens_that_fit(blocks, BLOCK, [Window(each) if isinstance(each, int) else each for each in windows]) == (
        tokens
    )


def test_a_prefix_behind_a_window_is_found_without_its_beginning() -> None:
    pool = BlockPool(1 + 11, BLOCK, windows=[9])
    request = make_request(range(40))
    run_whole(pool, request)
    end(pool, request)
    taken = pool.allocate(pool.free + 8)  # evicts the longest unused ones, those of the beginning
    again = make_request([*range(40), 50])
    found = pool.match(again)
    assert [bool(block) for block in found] == [False] * 8 + [True] * 2
    assert pool.match(make_request([*range(20), 50])) == []
    pool.release([taken.pop()])
    again.blocks = pool.hand_out(again, found)
    again.num_computed = 40
    assert held(pool, again) == [8, 9, 10]
    pool.check_integrity([taken, [block for block in again.blocks if block]])


def test_a_prefix_is_found_as_far_as_all_groups_have_what_they_see() -> None:
    pool = BlockPool(60, BLOCK, windows=[None, 5])
    request = make_request(range(24))
    run_whole(pool, request)
    other = make_request([*range(16), 70])
    assert len(pool.match(other)) == 2 * 4
    lost = pool._by_hash[blocks_module._key(request.block_hashes[3], 1)]
    assert pool._references[lost] == 0  # it lies before the window
    del pool._cached[lost]
    pool._cached[lost] = None
    pool._cached.move_to_end(lost, last=False)
    pool.allocate(pool.free + 1)
    assert [bool(block) for block in pool.match(other)] == [True, False, True, False, True, True]


def test_an_adapter_and_a_window_keep_a_prefix_apart_together_too() -> None:
    def with_both(digest: str | None, window: Window | None) -> Request:
        request = make_request(range(12))
        request.adapter = None if digest is None else Adapter("sql", digest)
        request.window = window
        return request

    variants = [(digest, window) for digest in (None, "a", "b") for window in (None, Window(6), Window(6, sinks=1))]
    pool = BlockPool(60, BLOCK)
    for digest, window in variants:
        request = with_both(digest, window)
        assert pool.match(request) == []
        run_whole(pool, request)
    for digest, window in variants:
        assert len(pool.match(with_both(digest, window))) == 2


def test_a_window_of_its_own_keeps_a_requests_prefix_apart() -> None:
    pool = BlockPool(60, BLOCK)
    run_whole(pool, make_request(range(12)))
    windowed = make_request(range(12))
    windowed.window = Window(6, sinks=2)
    assert pool.match(windowed) == []
    run_whole(pool, windowed)
    again = make_request(range(12))
    again.window = Window(6, sinks=2)
    assert len(pool.match(again)) == 2
    again.block_hashes.clear()
    again.window = Window(6, sinks=1)
    assert pool.match(again) == []


class PoolMachine(RuleBasedStateMachine):
    """Random requests on a small pool; a model remembers what was written into each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(1 + 12, BLOCK)
        self.live: list[Request] = []
        self.written: dict[int, tuple[object, ...]] = {}
        self.step = 0

    @initialize(windows=st.sampled_from([(None,), (None,), (6,), (None, 3), (2, 9)]))
    def set_up(self, windows: tuple[int | None, ...]) -> None:
        self.pool = BlockPool(1 + 12 * len(windows), BLOCK, windows=windows)

    def prefix(self, request: Request, index: int) -> tuple[object, ...]:
        return (request.cache_salt, *request.prompt_ids[: (index + 1) * BLOCK])

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from(["", "x"]))
    def start(self, ids: list[int], salt: str) -> None:
        request = make_request(ids, salt=salt)
        pool = self.pool
        found = pool.match(request)
        for place, block in enumerate(found):
            assert isinstance(block, int)
            assert not block or self.written[block] == self.prefix(request, place // pool.groups)
        assert len(found) // pool.groups * BLOCK < len(ids)
        needed = pool.count_needed(request, found)
        if needed > pool.available:
            return
        available = pool.available
        request.blocks = pool.hand_out(request, found)
        assert available - pool.available <= needed
        used = [block for block in request.blocks if block]
        assert len(set(used)) == len(used)
        request.num_published = len(found) // pool.groups
        request.num_computed = request.num_published * BLOCK
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        pool, start = self.pool, request.num_computed
        stop = min(start + count, request.total_tokens)
        missing = pool.missing(request, stop)
        if len(missing) > pool.available:
            return
        pool.fill(request, missing)
        request.num_computed = stop
        for index in range(start // BLOCK, -(-stop // BLOCK)):
            for group in range(pool.groups):
                self.written[request.blocks[index * pool.groups + group]] = self.prefix(request, index)
        pool.publish(request)
        pool.release_unseen(request)
        assert not pool.lacks_seen(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), fenced=st.booleans())
    def finish(self, data: st.DataObject, fenced: bool) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        end(self.pool, request, fence=self.step if fenced else None)

    @rule()
    def pass_fence(self) -> None:
        self.pool.pass_fence(self.step)
        self.step += 1

    @rule()
    def flush(self) -> None:
        self.pool.flush()
        assert self.pool.cached == 0

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity([[block for block in request.blocks if block] for request in self.live])

    def teardown(self) -> None:
        for request in self.live:
            end(self.pool, request)
        self.pool.pass_fence(self.step)
        self.pool.check_integrity([])
        assert self.pool.available == self.pool.usable


TestPoolMachine = pytest.mark.prove(pytest.mark.timeout(3600)(PoolMachine.TestCase))
TestPoolMachine.settings = hypothesis_settings(
    max_examples=2000 if PROVE else 40, stateful_step_count=80 if PROVE else 40, deadline=None
)
