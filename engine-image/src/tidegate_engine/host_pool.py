"""Prefix blocks that were evicted from the KV cache and lie in host memory: which slot holds what, and what to copy.

Pure: it owns numbers, not memory. The block pool hands evicted blocks to it and asks it for prefixes; the runner makes
the copies that a step names. A slot that the step in the making reads or writes is not given away in it, so that all
its stores may come first and all its loads second.
"""

from collections import OrderedDict
from collections.abc import Sequence

from tidegate_engine.request import BlockCopy


class HostPool:
    """`slots` places, each free or holding the content of one hash; the longest unused one gives way."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a host pool needs a slot or more, not {slots}")
        self.slots = slots
        self.stored_blocks = 0
        self.loaded_blocks = 0
        self._entries: OrderedDict[bytes, tuple[int, bytes | None]] = OrderedDict()  # hash -> slot, token ids
        self._free = list(range(slots - 1, -1, -1))
        self._touched: set[int] = set()
        self._stores: list[BlockCopy] = []
        self._loads: list[BlockCopy] = []

    @property
    def used(self) -> int:
        return len(self._entries)

    def keep(self, digest: bytes, content: bytes | None, *, block: int) -> None:
        """Take in a block that is about to be overwritten, unless it is here already or there is no slot."""
        if digest in self._entries:
            self.claim((digest,))
            return
        slot = self._take_slot()
        if slot is None:
            return
        self._entries[digest] = slot, content
        self._touched.add(slot)
        self._stores.append(BlockCopy(block, slot))

    def find(self, digest: bytes, content: bytes | None) -> int | None:
        """The slot that holds the block of this hash and, where both are known, these token ids."""
        entry = self._entries.get(digest)
        if entry is None or (content is not None and entry[1] not in (None, content)):
            return None
        return entry[0]

    def claim(self, digests: Sequence[bytes]) -> None:
        """Keep what `find` found until it is copied: making room for it may bring more blocks here."""
        for digest in reversed(digests):  # the head is shared more, so that it goes last
            self._entries.move_to_end(digest)
            self._touched.add(self._entries[digest][0])

    def load(self, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy what was claimed to `blocks` before the step is computed."""
        for digest, block in zip(digests, blocks, strict=True):
            self._loads.append(BlockCopy(block, self._entries[digest][0]))

    def take_copies(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """Stores and loads since the last call, for the step that is ready now."""
        if not self._touched:
            return (), ()
        copies = tuple(self._stores), tuple(self._loads)
        self.stored_blocks += len(self._stores)
        self.loaded_blocks += len(self._loads)
        self._stores.clear()
        self._loads.clear()
        self._touched.clear()
        return copies

    def drop(self, stores: Sequence[BlockCopy]) -> None:
        """Forget what a step should have stored: it failed, and nobody knows how far it came."""
        slots = {copy.slot for copy in stores}
        for digest in [digest for digest, (slot, _) in self._entries.items() if slot in slots]:
            slot, _ = self._entries.pop(digest)
            self._free.append(slot)

    def clear(self) -> None:
        """Forget everything."""
        self._free.extend(slot for slot, _ in self._entries.values())
        self._entries.clear()
        self._stores.clear()
        self._loads.clear()
        self._touched.clear()

    def is_sound(self) -> bool:
        """Whether each slot is free or used, and once."""
        slots = [*self._free, *(slot for slot, _ in self._entries.values())]
        return sorted(slots) == list(range(self.slots))

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        digest, (slot, _) = next(iter(self._entries.items()))
        if slot in self._touched:  # and so are all the later ones
            return None
        del self._entries[digest]
        return slot
