"""What a connection writes in one turn of the event loop leaves together, in order, and never after its end."""

import asyncio
from typing import Any

from tidegate_engine.http_protocol import GatheredWrites


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def test_a_turns_writes_leave_as_one_and_the_next_turns_as_another() -> None:
    wire = Wire()

    async def write() -> None:
        gathered = GatheredWrites(wire, asyncio.get_running_loop())
        gathered.write(b"head ")
        gathered.write(b"first")
        assert wire.sent == []
        await asyncio.sleep(0)
        gathered.write(b"second")
        await asyncio.sleep(0)

    asyncio.run(write())
    assert wire.sent == [b"head first", b"second"]


def test_what_was_written_leaves_before_the_connection_closes() -> None:
    wire = Wire()

    async def write() -> None:
        gathered = GatheredWrites(wire, asyncio.get_running_loop())
        gathered.write(b"all of it")
        gathered.close()
        await asyncio.sleep(0)

    asyncio.run(write())
    assert (wire.sent, wire.is_closed) == ([b"all of it"], True)


def test_nothing_is_written_to_a_connection_that_was_lost_meanwhile() -> None:
    wire = Wire()

    async def write() -> None:
        GatheredWrites(wire, asyncio.get_running_loop()).write(b"too late")
        wire.close()
        await asyncio.sleep(0)

    asyncio.run(write())
    assert wire.sent == []
