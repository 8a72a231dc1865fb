"""The processes of a model that is split over several GPUs: started, told what to do, and watched.

The first rank is the engine's process. It forks the others before anything has threads or a GPU, and tells each what it
is about to do itself, in frames over a socket: four bytes of length twice, JSON, and the arrays that it describes. A
rank that ends is the end of them all: what the others wait for never comes. No torch here.
"""

import ctypes
import logging
import os
import selectors
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import orjson

from tidegate_engine.weights import ModelError

PR_SET_PDEATHSIG = 1
_LENGTHS = struct.Struct("!II")

Array = tuple[str, Sequence[int], bytes | memoryview]
"""The type of its numbers, as numpy writes it, its shape, and its bytes."""
Order = tuple[str, Any, list[Array]]
"""What to do, the facts of it, and arrays."""
OnLost = Callable[[str | None, str], None]
"""Called with a ModelError's reason, if it is one, and a sentence."""

logger = logging.getLogger(__name__)


class RankEnd:
    """What a rank beside the first holds of the first."""

    def __init__(self, rank: int, ranks: int, end: socket.socket) -> None:
        self.rank, self.ranks = rank, ranks
        self._end = end

    def receive(self) -> Order | None:
        """Waits for the next order; None = the first rank has ended."""
        try:
            json_bytes, array_bytes = _LENGTHS.unpack(self._read(_LENGTHS.size))
            kind, facts, described = orjson.loads(self._read(json_bytes))
            body = self._read(array_bytes)
        except (EOFError, ConnectionError):
            return None
        arrays, start = list[Array](), 0
        for dtype, shape, size in described:
            end = start + size
            arrays.append((dtype, shape, memoryview(body)[start:end]))
            start = end
        return kind, facts, arrays

    def report(self, reason: str | None, message: str) -> None:
        """Tell the first rank why this one ends."""
        try:
            self._end.sendall(orjson.dumps([reason, message]))
        except ConnectionError:
            logger.exception("the first rank is gone and cannot be told: %s", message)

    def _read(self, count: int) -> bytearray:
        found = bytearray(count)
        view, done = memoryview(found), 0
        while done < count:
            if not (read := self._end.recv_into(view[done:])):
                raise EOFError
            done += read
        return found


class Team:
    """What the first rank holds of the others."""

    def __init__(self, ends: Sequence[socket.socket], pids: Sequence[int]) -> None:
        self._ends, self._pids = ends, pids
        self._on_lost: OnLost | None = None

    @property
    def ranks(self) -> int:
        return 1 + len(self._pids)

    def tell(self, kind: str, facts: object = None, arrays: Sequence[Array] = ()) -> None:
        """Send an order to each; it may wait for them to read the one before."""
        header = orjson.dumps([kind, facts, [[dtype, shape, len(body)] for dtype, shape, body in arrays]])
        bodies = [body for _, _, body in arrays]
        frame = b"".join((_LENGTHS.pack(len(header), sum(map(len, bodies))), header, *bodies))
        for end in self._ends:
            end.sendall(frame)

    def watch(self, on_lost: OnLost) -> None:
        """Have `on_lost` called, from another thread, when a rank ends or `give_up` is called; at most once each."""
        self._on_lost = on_lost
        threading.Thread(target=self._watch, args=(on_lost,), name="rank-watch", daemon=True).start()

    def give_up(self, message: str) -> None:
        """This rank did not finish what it told the others to do: nothing that they do together means anything now."""
        if self._on_lost is not None:
            self._on_lost(None, message)

    def _watch(self, on_lost: OnLost) -> None:
        with selectors.DefaultSelector() as selector:
            for end, pid in zip(self._ends, self._pids, strict=True):
                selector.register(end, selectors.EVENT_READ, pid)
            ready = [key for key, _ in selector.select()]
        found = []
        for key in ready:
            rank = 1 + self._pids.index(key.data)
            said = _read_report(self._ends[rank - 1])
            ending = ending_of(os.waitpid(key.data, 0)[1])
            reason, message = said or (None, f"ended: {ending}")
            found.append((said is None, reason, f"rank {rank} of {self.ranks} {message}"))
        # Whoever waited for one that died says so, and is not the cause.
        _, reason, message = max(found, key=lambda each: each[0])
        on_lost(reason, message)


def start_ranks(count: int, follow: Callable[[RankEnd], None], *, foreign: Sequence[socket.socket]) -> Team:
    """Fork all ranks but the first, which is the caller. They must not keep `foreign` open."""
    parent, ends, pids = os.getpid(), list[socket.socket](), list[int]()
    for rank in range(1, count):
        own, other = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for each in (own, *ends, *foreign):
                each.close()
            _be_rank(RankEnd(rank, count, other), follow, parent=parent)
        other.close()
        ends.append(own)
        pids.append(pid)
    return Team(ends, pids)


def _be_rank(end: RankEnd, follow: Callable[[RankEnd], None], *, parent: int) -> NoReturn:
    """Be the process of a rank, to its end."""
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        follow(end)
        code = 0
    except ModelError as error:
        end.report(error.reason, f"cannot have its part: {error.message}")
    except Exception as error:
        logger.exception("rank %d failed", end.rank)
        end.report(None, f"failed: {type(error).__name__}: {error}")
    finally:
        logging.shutdown()
        os._exit(code)


def _read_report(end: socket.socket) -> tuple[str | None, str] | None:
    """What a rank said before it ended; None = nothing."""
    parts = []
    try:
        while part := end.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        pass
    if not parts:
        return None
    reason, message = orjson.loads(b"".join(parts))
    return reason, message


def ending_of(status: int) -> str:
    """How a process ended, by what `waitpid` says."""
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, so that none is left behind with the memory of a model."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the kernel knew
        os._exit(1)
