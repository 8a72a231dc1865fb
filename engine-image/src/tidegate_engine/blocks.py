"""The pool of KV blocks with its prefix cache: reference counts, hash chain, eviction, fenced frees.

Pure: it owns numbers, not memory, and knows nothing of batching. Called by the scheduler only; a simulator drives the
same code. Block 0 is the null block: padding is written there and no request ever gets it.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from tidegate_engine.host_pool import HostPool
from tidegate_engine.request import Adapter, Request

NULL_BLOCK = 0
ID_BYTES = array("q").itemsize


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free or evictable: the caller did not look first."""


class IntegrityError(AssertionError):
    """The books do not balance: a bug in the pool or in its caller."""


class BlockPool:
    """Blocks 1 … total_blocks − 1, each free, cached (unused, but a prefix hit may revive it) or used.

    `used + cached + free == usable` always. A block whose free is fenced by a step in flight counts as used. With
    `host`, an evicted block is kept there and found again.
    """

    def __init__(
        self, total_blocks: int, block_tokens: int, *, prefix_caching: bool = True, host: HostPool | None = None
    ) -> None:
        if total_blocks < 2 or block_tokens < 1:
            raise ValueError(f"a pool needs two blocks of one token or more, not {total_blocks} of {block_tokens}")
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self.host = host
        self.usable = total_blocks - 1
        self.epoch = 0
        self.releases = 0
        """Grows with every block that becomes available: whoever waits for room need not look while it stands."""
        self._references = [0] * total_blocks
        self._hashes: list[bytes | None] = [None] * total_blocks
        self._contents: list[bytes | None] = [None] * total_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(total_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._fenced: dict[int, int] = {}  # block -> step after whose commit it is available

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

    def match(self, request: Request) -> list[int]:
        """Blocks that hold the head of the request's tokens, never its last token. Changes no block: see `share`."""
        if not self.prefix_caching or not request.may_share:
            return []
        self._join_epoch(request)
        found: list[int] = []
        for index in range((request.total_tokens - 1) // self.block_tokens):
            digest, content = self._identify(request, index)
            block = None if digest is None else self._by_hash.get(digest)
            if block is None:
                break
            if content is not None and self._contents[block] not in (None, content):
                break  # two contents with one hash: never hand out the other one's
            found.append(block)
        return found

    def match_host(self, request: Request, start: int) -> list[bytes]:
        """Hashes of the request's blocks from `start` on that the host pool holds; `match` was asked before."""
        host = self.host
        if host is None or not self.prefix_caching or not request.may_share:
            return []
        found: list[bytes] = []
        for index in range(start, (request.total_tokens - 1) // self.block_tokens):
            digest, content = self._identify(request, index)
            if digest is None or host.find(digest, content) is None:
                break
            found.append(digest)
        return found

    def count_unused(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody uses, so that sharing them takes them from what is available."""
        return sum(1 for block in blocks if not self._references[block] and block not in self._fenced)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of `blocks`, which `match` returned."""
        for block in blocks:
            if not self._references[block] and self._fenced.pop(block, None) is None:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int, *, hosted: Sequence[bytes] = ()) -> list[int]:
        """Hand out `count` blocks without content, evicting the longest unused cached ones when none is free.

        The step to come copies what `match_host` found to the first of them.
        """
        if count > self.available:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.available} available")
        if hosted and self.host is not None:
            self.host.claim(hosted)
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        if hosted and self.host is not None:
            self.host.load(hosted, blocks[: len(hosted)])
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int], *, fence: int | None = None) -> None:
        """Take one user from each of `blocks`. With `fence`, they are available only after `pass_fence(fence)`.

        A table is given in order of position; its tail becomes the first to be evicted, since a head is shared more.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if fence is None:
                self._make_available(block)
            else:
                self._fenced[block] = fence

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
        if self.prefix_caching and request.hash_epoch == self.epoch:
            for index in range(request.num_published, full_blocks):
                digest, content = self._identify(request, index)
                if digest is None:
                    break
                block = request.blocks[index]
                if digest not in self._by_hash and self._hashes[block] is None:
                    self._by_hash[digest] = block
                    self._hashes[block] = digest
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
            "a cached block has no hash": any(self._hashes[block] is None for block in self._cached),
            "the hashes disagree": self._by_hash
            != {digest: block for block, digest in enumerate(self._hashes) if digest is not None},
        }
        if broken := [complaint for complaint, holds in complaints.items() if holds]:
            raise IntegrityError("; ".join(broken))

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
            parent = hashes[-1] if hashes else _hash_root(self.epoch, request.cache_salt, request.adapter)
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


def _hash_root(epoch: int, salt: str, adapter: Adapter | None) -> bytes:
    """Parent of a first block. The salt keeps tenants apart, the epoch keeps flushed content away, and an adapter's
    digest keeps what it computed from other adapters, those of the same name among them, and from the plain model."""
    name = salt.encode()
    digest = b"" if adapter is None else adapter.digest.encode()
    fields = (epoch, len(name), name, len(digest), digest)
    return hashlib.sha256(b"epoch %d salt %d %b adapter %d %b" % fields).digest()


def _hash_block(parent: bytes, content: bytes) -> bytes:
    """Tagged and length-prefixed fields, so that no two pairs read the same."""
    return hashlib.sha256(b"parent %d %b tokens %d %b" % (len(parent), parent, len(content), content)).digest()
