"""The pool of KV blocks with its prefix cache: reference counts, hash chain, eviction, windows, fenced frees.

Pure: it owns numbers, not memory, and knows nothing of batching. Called by the scheduler only; a simulator drives the
same code. Block 0 is the null block: padding is written there and no request ever gets it.

A model's layers form groups of equal size, by how far they see. A block holds the tokens of one group, and a request's
table has those of one place side by side: token t of group g lies in `table[t // block_tokens * groups + g]`. There,
the null block stands for what no token to come sees, and for what a window's group gets only when it is computed.
"""

import hashlib
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from tidegate_engine.host_pool import HostPool
from tidegate_engine.request import Request, Window

NULL_BLOCK = 0
ID_BYTES = array("q").itemsize


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free or evictable: the caller did not look first."""


class IntegrityError(AssertionError):
    """The books do not balance: a bug in the pool or in its caller."""


def windows_of(tokens: Sequence[int | None]) -> tuple[Window | None, ...]:
    """The windows of so many tokens; None = no window."""
    return tuple(None if each is None else Window(each) for each in tokens)


def tokens_that_fit(blocks: int, block_tokens: int, windows: Sequence[Window | None]) -> int:
    """Most tokens that a request alone can have in so many blocks; what no layer sees any more takes none.

    `windows` has an entry for each group of layers, None = they see all.
    """
    most = [None if window is None else _most_seen(window, block_tokens) for window in windows]

    def needed(length: int) -> int:
        return sum(length if seen is None else min(length, seen) for seen in most)

    if needed(sys.maxsize) <= blocks:
        return sys.maxsize
    return (bisect_right(range(blocks + 1), blocks, key=needed) - 1) * block_tokens


def blocks_that_hold(tokens: int, block_tokens: int, windows: Sequence[Window | None]) -> int:
    """The fewest blocks with which `tokens_that_fit` is `tokens` or more."""
    most = -(-tokens // block_tokens) * len(windows)
    return bisect_left(range(most), tokens, key=lambda blocks: tokens_that_fit(blocks, block_tokens, windows))


class BlockPool:
    """Blocks 1 … total_blocks − 1, each free, cached (unused, but a prefix hit may revive it) or used.

    `used + cached + free == usable` always. A block whose free is fenced by a step in flight counts as used. With
    `host`, an evicted block is kept there and found again. `windows` says for each group of layers how many tokens it
    sees, the newest included; None = all.
    """

    def __init__(
        self,
        total_blocks: int,
        block_tokens: int,
        *,
        prefix_caching: bool = True,
        host: HostPool | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        if total_blocks < 2 or block_tokens < 1:
            raise ValueError(f"a pool needs two blocks of one token or more, not {total_blocks} of {block_tokens}")
        self.block_tokens = block_tokens
        self.groups = len(windows)
        self._windows = windows_of(windows)
        self._has_windows = any(self._windows)
        self._prefix_caching = prefix_caching
        self.host = host
        self.epoch = 0
        self.releases = 0
        """Grows with every block that becomes available: whoever waits for room need not look while it stands."""
        self._begin(total_blocks)

    def _begin(self, total_blocks: int) -> None:
        """Own so many blocks, all of them free."""
        self.usable = total_blocks - 1
        self.touched = 0
        """The most blocks that ever were written: blocks that were used before are handed out before others."""
        self._references = [0] * total_blocks
        self._hashes: list[bytes | None] = [None] * total_blocks
        self._contents: list[bytes | None] = [None] * total_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(total_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._fenced: dict[int, int] = {}  # block -> step after whose commit it is available

    @property
    def prefix_caching(self) -> bool:
        return self._prefix_caching

    @prefix_caching.setter
    def prefix_caching(self, is_on: bool) -> None:
        """Forgets all prefixes when it changes: what was written without hashes has none to go on from."""
        if is_on != self._prefix_caching:
            self._prefix_caching = is_on
            self.flush()

    def resize(self, total_blocks: int) -> None:
        """Own so many blocks instead, empty ones; raises ValueError while one is used."""
        if self.used:
            raise ValueError(f"{self.used} blocks are used; all must be free before the pool is resized")
        if total_blocks < 2:
            raise ValueError(f"a pool needs two blocks or more, not {total_blocks}")
        self.flush()
        self._begin(total_blocks)
        self.releases += 1

    @property
    def free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Unused blocks that hold a known prefix; evicted when the free ones are gone."""
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.usable - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    def sees_all(self, request: Request) -> bool:
        """Whether every layer sees all of the request's tokens."""
        return request.window is None and not self._has_windows

    def tokens_that_fit(self, request: Request, *, total_blocks: int | None = None) -> int:
        """Most tokens that the request can have when it is alone, in this pool or in one of `total_blocks`."""
        usable = self.usable if total_blocks is None else total_blocks - 1
        return tokens_that_fit(usable, self.block_tokens, self._windows_of(request))

    def growth(self, request: Request, tokens: float) -> float:
        """Tokens, counted in each group of layers, for which so many more tokens of the request take blocks."""
        known = request.total_tokens
        return sum(
            tokens if window is None else min(tokens, max(0, window.tokens - known))
            for window in self._windows_of(request)
        )

    def match(self, request: Request) -> list[int | bytes]:
        """The head of a table for the request's tokens, never for its last one. Changes no block: see `hand_out`.

        An entry is a block, the hash under which the host pool has it, or the null block where no layer looks.
        """
        if not self._prefix_caching or not request.may_share:
            return []
        self._join_epoch(request)
        windows, groups = self._windows_of(request), self.groups
        found: list[int | bytes] = []
        length = 0
        heads, runs = [0] * groups, [0] * groups  # known blocks in a row: from the first, and up to here
        for index in range((request.total_tokens - 1) // self.block_tokens):
            digest, content = self._identify(request, index)
            if digest is None:
                break
            for group in range(groups):
                entry = self._find(_key(digest, group), content)
                found.append(entry)
                runs[group] = runs[group] + 1 if entry else 0
                heads[group] += heads[group] == index and bool(entry)
            if any(window is None and not run for window, run in zip(windows, runs, strict=True)):
                break
            if all(
                self._is_complete(window, index + 1, head=head, run=run)
                for window, head, run in zip(windows, heads, runs, strict=True)
            ):
                length = index + 1
        del found[length * groups :]
        for group, window in enumerate(windows):
            for index in _hidden(window, length * self.block_tokens, self.block_tokens):
                found[index * groups + group] = NULL_BLOCK
        return found

    def count_needed(self, request: Request, found: Sequence[int | bytes]) -> int:
        """Available blocks that the request takes when it gets what `match` found, and the rest for its known tokens.

        A group with a window counts with what it needs to get through, a block at a time.
        """
        length = -(-request.total_tokens // self.block_tokens)
        needed = sum(
            length if window is None else min(length, _most_seen(window, self.block_tokens))
            for window in self._windows_of(request)
        )
        return needed - sum(1 for entry in found if isinstance(entry, int) and entry and not self._is_unused(entry))

    def hand_out(self, request: Request, found: Sequence[int | bytes]) -> list[int]:
        """A table for all known tokens of the request that begins with what `match` found.

        Groups with a window get their block for the next token only. The step to come copies what the host pool has.
        """
        self.share(entry for entry in found if isinstance(entry, int) and entry)
        table = [entry if isinstance(entry, int) else NULL_BLOCK for entry in found]
        hosted = {place: entry for place, entry in enumerate(found) if isinstance(entry, bytes)}
        empty = list(hosted)
        next_block = len(found) // self.groups
        last_block = -(-request.total_tokens // self.block_tokens)
        if not hosted and self.sees_all(request):
            return table + self.allocate((last_block - next_block) * self.groups)
        for index in range(next_block, last_block):
            for group, window in enumerate(self._windows_of(request)):
                if window is None or index == next_block:
                    empty.append(index * self.groups + group)
                table.append(NULL_BLOCK)
        for place, block in zip(empty, self.allocate(len(empty), hosted=list(hosted.values())), strict=True):
            table[place] = block
        return table

    def missing(self, request: Request, end: int) -> list[int]:
        """Places of a running request's table that lack a block for its first `end` tokens: see `fill`."""
        table, size, groups = request.blocks, self.block_tokens, self.groups
        places = range(-(-request.num_computed // size) * groups, -(-end // size) * groups)
        return [place for place in places if place >= len(table) or not table[place]]

    def fill(self, request: Request, places: Sequence[int]) -> None:
        """Give the request a block at each of `places`, which `missing` returned."""
        table = request.blocks
        for place, block in zip(places, self.allocate(len(places)), strict=True):
            if place < len(table):
                table[place] = block
            else:
                table.append(block)

    def reach(self, request: Request, *, keep: int) -> int:
        """How many of its known tokens a running request can have computed when `keep` available blocks stay.

        It has the block for its next token.
        """
        size, start = self.block_tokens, request.num_computed
        lazy = sum(1 for window in self._windows_of(request) if window is not None)
        if not lazy:
            return request.total_tokens
        more = max(0, self.available - keep) // lazy
        return min(request.total_tokens, max((start // size + 1) * size, (-(-start // size) + more) * size))

    def release_unseen(self, request: Request) -> None:
        """Take the blocks from the request's table that none of its tokens to come sees.

        Call it when no step in flight looks at them.
        """
        if self.sees_all(request):
            return
        table, groups = request.blocks, self.groups
        for group, window in enumerate(self._windows_of(request)):
            gone = []
            for index in reversed(_hidden(window, request.num_computed, self.block_tokens)):
                place = index * groups + group
                if not table[place]:  # and so are those before it
                    break
                gone.append(table[place])
                table[place] = NULL_BLOCK
            self.release(gone[::-1])

    def lacks_seen(self, request: Request) -> bool:
        """Whether a block is missing that the next token of a running request sees or is written to."""
        table, size, groups = request.blocks, self.block_tokens, self.groups
        return any(
            not table[index * groups + group]
            for group, window in enumerate(self._windows_of(request))
            for index in range(-(-request.num_computed // size))
            if index not in _hidden(window, request.num_computed, size)
        )

    def count_empty(self, request: Request) -> int:
        """Token slots in a running request's blocks that hold no token yet."""
        full_blocks, begun = divmod(request.num_computed, self.block_tokens)
        rest = request.blocks[full_blocks * self.groups :]
        held = sum(1 for block in rest if block)
        return held * self.block_tokens - begun * sum(1 for block in rest[: self.groups] if block)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of `blocks`, which `match` returned."""
        for block in blocks:
            if not self._references[block] and self._fenced.pop(block, None) is None:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int, *, hosted: Sequence[bytes] = ()) -> list[int]:
        """Take `count` blocks without content, evicting the longest unused cached ones when none is free.

        The step to come copies what the host pool has under `hosted` to the first of them.
        """
        if count > self.available:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.available} available")
        if hosted and self.host is not None:
            self.host.claim(hosted)
        free, references = self._free, self._references
        if count <= len(free):
            blocks = free[len(free) - count :]
            blocks.reverse()
            del free[len(free) - count :]
        else:
            blocks = [free.pop() if free else self._evict() for _ in range(count)]
        if hosted and self.host is not None:
            self.host.load(hosted, blocks[: len(hosted)])
        for block in blocks:
            references[block] = 1
        if count:
            self.touched = max(self.touched, *blocks)
        return blocks

    def release(self, blocks: Sequence[int], *, fence: int | None = None) -> None:
        """Take one user from each of `blocks`. With `fence`, they are available only after `pass_fence(fence)`.

        Null blocks are passed over. A table is given in order of position; its tail becomes the first to be evicted,
        since a head is shared more.
        """
        references, hashes = self._references, self._hashes
        for block in reversed(blocks):
            if not block:
                continue
            references[block] = left = references[block] - 1
            if left:
                continue
            if fence is not None:
                self._fenced[block] = fence
            elif hashes[block] is None:  # as `_make_available`, for tables of hundreds of blocks
                self.releases += 1
                self._free.append(block)
            else:
                self._make_available(block)

    def pass_fence(self, step_id: int) -> None:
        """Make available what was released under a fence up to `step_id`."""
        if not self._fenced:
            return
        for block in [block for block, fence in self._fenced.items() if fence <= step_id]:
            del self._fenced[block]
            self._make_available(block)

    def publish(self, request: Request) -> None:
        """Offer the request's full blocks up to `num_computed` to others; call it after the commit that wrote them."""
        full_blocks = request.num_computed // self.block_tokens
        if self._prefix_caching and request.hash_epoch == self.epoch:
            for index in range(request.num_published, full_blocks):
                digest, content = self._identify(request, index)
                if digest is None:
                    break
                for group in range(self.groups):
                    block = request.blocks[index * self.groups + group]
                    key = _key(digest, group)
                    if block and key not in self._by_hash and self._hashes[block] is None:
                        self._by_hash[key] = block
                        self._hashes[block] = key
                        self._contents[block] = content
        request.num_published = full_blocks

    def flush(self) -> None:
        """Forget every prefix. Running requests keep their blocks, and publish nothing of what they wrote before."""
        self.epoch += 1
        for block in self._by_hash.values():
            self._hashes[block] = self._contents[block] = None
        self._by_hash.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        if self.host is not None:
            self.host.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise IntegrityError unless counts, lists and hashes agree with the block tables in use."""
        users = Counter(block for table in tables for block in table)
        unused = [*self._free, *self._cached, *self._fenced]
        complaints = {
            "the null block is in use": users[NULL_BLOCK] or NULL_BLOCK in unused,
            "a block is unused twice": len(unused) != len(set(unused)),
            "a block is used and unused": any(users[block] for block in unused),
            "a block is lost": len(unused) + len(users) != self.usable,
            "references differ from the tables": any(
                count != users[block] for block, count in enumerate(self._references)
            ),
            "the counts do not add up": self.used + self.cached + self.free != self.usable,
            "a slot of the host pool is lost": self.host is not None and not self.host.is_sound(),
            "a free block has a hash": any(self._hashes[block] is not None for block in self._free),
            "a prefix is known that nobody may share": not self._prefix_caching and bool(self._by_hash),
            "a cached block has no hash": any(self._hashes[block] is None for block in self._cached),
            "the hashes disagree": self._by_hash
            != {digest: block for block, digest in enumerate(self._hashes) if digest is not None},
        }
        if broken := [complaint for complaint, holds in complaints.items() if holds]:
            raise IntegrityError("; ".join(broken))

    def _windows_of(self, request: Request) -> tuple[Window | None, ...]:
        """By group. A request has a window of its own only where the model has none."""
        return self._windows if request.window is None else (request.window,) * self.groups

    def _is_unused(self, block: int) -> bool:
        """Whether nobody uses it, so that sharing it takes it from what is available."""
        return not self._references[block] and block not in self._fenced

    def _find(self, key: bytes, content: bytes | None) -> int | bytes:
        block = self._by_hash.get(key)
        if block is not None:
            # Two contents with one hash: never hand out the other one's.
            return block if content is None or self._contents[block] in (None, content) else NULL_BLOCK
        if self.host is not None and self.host.find(key, content) is not None:
            return key
        return NULL_BLOCK

    def _is_complete(self, window: Window | None, length: int, *, head: int, run: int) -> bool:
        """Whether all that tokens behind `length` blocks see is known, when the first `head` and the last `run` are."""
        hidden = _hidden(window, length * self.block_tokens, self.block_tokens)
        return head == length or (len(hidden) > 0 and head >= hidden.start and run >= length - hidden.stop)

    def _make_available(self, block: int) -> None:
        self.releases += 1
        if self._hashes[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._hashes[block]
        assert digest is not None
        del self._by_hash[digest]
        if self.host is not None:
            self.host.keep(digest, self._contents[block], block=block)
        self._hashes[block] = self._contents[block] = None
        return block

    def _join_epoch(self, request: Request) -> None:
        if request.hash_epoch != self.epoch:
            request.hash_epoch = self.epoch
            if request.prompt_ids:
                request.block_hashes.clear()

    def _identify(self, request: Request, index: int) -> tuple[bytes | None, bytes | None]:
        """Hash and content of the request's block `index`, each None when unknown.

        Hashes grow by one block at a time: blocks before `index` have theirs.
        """
        hashes = request.block_hashes
        if not request.prompt_ids:
            return (hashes[index] if index < len(hashes) else None), None
        content = self._content_of(request, index)
        if len(content) < self.block_tokens * ID_BYTES:
            return None, None
        if index == len(hashes):
            parent = hashes[-1] if hashes else _hash_root(self.epoch, request)
            hashes.append(_hash_block(parent, content))
        return hashes[index], content

    def _content_of(self, request: Request, index: int) -> bytes:
        """The known token ids of block `index`, in bytes; a prompt is packed once."""
        start, end = index * self.block_tokens, (index + 1) * self.block_tokens
        if end > request.prompt_tokens:
            return array("q", request.token_ids(start, self.block_tokens)).tobytes()
        if request.packed_prompt is None:
            request.packed_prompt = array("q", request.prompt_ids).tobytes()
        return request.packed_prompt[start * ID_BYTES : end * ID_BYTES]


def _hidden(window: Window | None, computed: int, block_tokens: int) -> range:
    """Which blocks of a table no token from position `computed` on sees: those between the sinks and the window."""
    if window is None:
        return range(0)
    first = -(-window.sinks // block_tokens)
    return range(first, max(first, (computed - window.tokens + 1) // block_tokens))


def _most_seen(window: Window, block_tokens: int) -> int:
    """Blocks that are held at once to compute one token after the other, a table growing block by block."""
    return -(-window.sinks // block_tokens) + -(-(window.tokens - 1) // block_tokens) + 1


def _key(digest: bytes, group: int) -> bytes:
    """Under which the block of a group is known; hashes are of one length, so none is another one's key."""
    return digest + group.to_bytes(2) if group else digest


def _hash_root(epoch: int, request: Request) -> bytes:
    """Parent of a first block. The salt keeps tenants apart, the epoch keeps flushed content away; a window changes
    content, and so does an adapter, whose digest keeps it from others of its name and from the plain model."""
    salt = request.cache_salt.encode()
    digest = b"" if request.adapter is None else request.adapter.digest.encode()
    tokens, sinks = request.window or (0, 0)
    fields = (epoch, len(salt), salt, len(digest), digest, tokens, sinks)
    return hashlib.sha256(b"epoch %d salt %d %b adapter %d %b window %d %d" % fields).digest()


def _hash_block(parent: bytes, content: bytes) -> bytes:
    """Tagged and length-prefixed fields, so that no two pairs read the same."""
    return hashlib.sha256(b"parent %d %b tokens %d %b" % (len(parent), parent, len(content), content)).digest()
