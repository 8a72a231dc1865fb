"""How much of the machine this process may use: CPUs and memory by its control group, version 1 or 2, and affinity.

Reads files only. A container sees its own group at the mount point; outside of one, the path in /proc/self/cgroup leads
to it, and every group above limits too.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED_BYTES = 1 << 60
"""Version 1 writes 'no limit' as a number near 2^63."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the kernel's files lie; another root serves tests."""

    root: Path = Path("/")

    def cpus(self) -> int:
        """Whole CPUs that may be kept busy all the time, at least 1."""
        limits = [float(len(os.sched_getaffinity(0)))]
        for folder in self._folders("cpu"):
            if (quota := _quota_v2(folder)) or (quota := _quota_v1(folder)):
                limits.append(quota)
        return max(1, int(min(limits)))

    def available_bytes(self) -> int:
        """Memory that may still be allocated: what the machine has, within what every control group leaves."""
        limits = [_meminfo(self.root / "proc/meminfo", "MemAvailable")]
        for folder in self._folders("memory"):
            for limit_file, usage_file, cache_name in (
                ("memory.max", "memory.current", "inactive_file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            ):
                limit, usage = _number(folder / limit_file), _number(folder / usage_file)
                if limit is not None and usage is not None and limit < UNLIMITED_BYTES:
                    limits.append(limit - usage + _statistic(folder / "memory.stat", cache_name))
        return max(0, min(limits))

    def _folders(self, controller: str) -> Iterator[Path]:
        """The folders of this process's group and of those above it, as far as they are visible."""
        mount = self.root / "sys/fs/cgroup"
        lines = _read(self.root / "proc/self/cgroup") or ""
        for line in lines.splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            top = mount if number == "0" else mount / controller
            own = Path(path.lstrip("/"))
            for part in (own, *own.parents):
                if (top / part).is_dir():
                    yield top / part


def _quota_v2(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


def _meminfo(file: Path, name: str) -> int:
    for line in (_read(file) or "").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{file} has no line {name}")


def _statistic(file: Path, name: str) -> int:
    for line in (_read(file) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    text = (_read(file) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
