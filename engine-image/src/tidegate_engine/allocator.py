"""What glibc does with freed memory: given back at once while a model is loaded, kept for the next step afterwards.

Without it what a conversion leaves behind stays in the process, several times the size of a quantised model. Elsewhere
than on glibc nothing is done. Called around loading.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""mallopt's parameters."""
LOADING_BYTES = 128 << 10
"""Blocks from this size on are mapped by themselves, so that freeing one unmaps it."""
MAX_MAPS = 1 << 14
"""A process may have four times as many; a mixture of many experts has more matrices than that."""
SERVING_BYTES = 32 << 20
"""The most that glibc would come to by itself: below it a step's buffers are used again without a page fault."""


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Large blocks that are freed meanwhile go back to the system."""
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        yield
        return
    mallopt(_MMAP_THRESHOLD, LOADING_BYTES)
    mallopt(_MMAP_MAX, MAX_MAPS)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, SERVING_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * SERVING_BYTES)
        trim(0)
