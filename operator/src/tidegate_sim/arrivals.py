"""What arrives: one request of a trace, before anything is known of how it will be served.

Pure data. Written by the trace readers and the synthetic workloads, read by the fleet and by the offline bounds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. Arrivals of a workload are in order of time."""

    at_seconds: float
    """Since the start of the workload."""
    isl: int
    osl: int
    source: str = ""
    """Client, tenant or service as the trace names it; empty when it does not."""
    block_hashes: tuple[bytes, ...] = ()
    """Chained identities of the prompt's whole KV blocks, as far as others may share them; empty when unknown."""
