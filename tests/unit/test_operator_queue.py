"""The keyed queue: each key once, one worker a key, its own backoff."""

import asyncio

from tidegate_operator.queue import LONGEST_BACKOFF_SECONDS, KeyedQueue, backoff_seconds


async def next_key(queue: KeyedQueue[str]) -> str:
    return await asyncio.wait_for(queue.get(), 5)


async def is_idle(queue: KeyedQueue[str]) -> bool:
    getter = asyncio.ensure_future(queue.get())
    for _ in range(5):
        await asyncio.sleep(0)
    idle = not getter.done()
    getter.cancel()
    return idle


async def test_a_key_that_is_added_often_is_processed_once() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    for _ in range(5):
        queue.add("a")
    assert await next_key(queue) == "a"
    queue.done("a")
    assert await is_idle(queue)


async def test_a_key_that_is_added_while_it_is_processed_comes_again_but_only_after_that() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add("a")
    await next_key(queue)
    queue.add("a")
    queue.add("a")
    assert await is_idle(queue)
    queue.done("a")
    assert await next_key(queue) == "a"
    queue.done("a")
    assert await is_idle(queue)


async def test_keys_do_not_wait_for_each_other() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add("a")
    queue.add("b")
    assert [await next_key(queue), await next_key(queue)] == ["a", "b"]


async def test_the_earlier_of_two_delays_counts() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add_after("a", 1000)
    queue.add_after("a", 0.01)
    queue.add_after("a", 1000)
    assert await next_key(queue) == "a"
    queue.done("a")
    assert await is_idle(queue)


async def test_news_overtakes_a_delay_and_takes_its_place() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add_after("a", 0.01)
    queue.add("a")
    assert await next_key(queue) == "a"
    queue.done("a")
    await asyncio.sleep(0.02)
    assert await is_idle(queue)


async def test_a_failed_key_comes_again_by_itself() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add("a")
    await next_key(queue)
    assert queue.failed("a") > 0
    assert await next_key(queue) == "a"


async def test_a_success_forgets_earlier_failures() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    for _ in range(6):
        queue.add("a")
        await next_key(queue)
        queue.failed("a")
    queue.add("a")
    await next_key(queue)
    queue.done("a")
    queue.add("a")
    await next_key(queue)
    assert queue.failed("a") <= backoff_seconds(0, 1.0)


def test_the_backoff_grows_and_is_bounded() -> None:
    delays = [backoff_seconds(failures, 0.5) for failures in range(40)]
    assert delays == sorted(delays)
    assert delays[-1] == LONGEST_BACKOFF_SECONDS


async def test_a_key_whose_timer_ended_lets_new_ones_go_first() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add_after("waits", 0)
    while len(queue) == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    queue.add("news")
    assert [await next_key(queue), await next_key(queue)] == ["news", "waits"]


async def test_news_of_a_key_whose_timer_ended_brings_it_forward_and_only_once() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add_after("a", 0)
    queue.add_after("b", 0)
    while len(queue) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    queue.add("b")
    assert [await next_key(queue), await next_key(queue)] == ["b", "a"]
    queue.done("b")
    assert await is_idle(queue)
