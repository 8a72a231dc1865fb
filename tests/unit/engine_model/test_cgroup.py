"""Limits as the kernel writes them, for both versions of control groups."""

import os
from pathlib import Path

import pytest

from tidegate_engine.cgroup import Machine

GIB = 1 << 30


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def machine(root: Path, files: dict[str, str]) -> Machine:
    defaults = {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {16 * GIB // 1024} kB\n",
        "proc/self/cgroup": "0::/\n",
    }
    for name, content in (defaults | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Machine(root)


def test_without_limits_the_machine_is_the_limit(tmp_path: Path) -> None:
    found = machine(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max"})
    assert found.cpus() == 8
    assert found.available_bytes() == 16 * GIB


@pytest.mark.parametrize(("quota", "cpus"), [("200000", 2), ("250000", 2), ("50000", 1), ("9900000", 8)])
def test_version_2_limits_cpus_to_whole_ones(tmp_path: Path, quota: str, cpus: int) -> None:
    assert machine(tmp_path, {"sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}).cpus() == cpus


def test_version_2_leaves_what_is_not_used_and_what_can_be_dropped(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
    }
    assert machine(tmp_path, files).available_bytes() == 2 * GIB


def test_version_1_limits_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/kubepods/pod1\n2:cpu,cpuacct:/kubepods/pod1\n0::/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}\n",
    }
    found = machine(tmp_path, files)
    assert found.cpus() == 3
    assert found.available_bytes() == GIB + GIB // 2


def test_version_1_without_limits_is_unlimited(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n2:cpu,cpuacct:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    }
    found = machine(tmp_path, files)
    assert found.cpus() == 8
    assert found.available_bytes() == 16 * GIB


def test_a_group_above_limits_its_children(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/pod/app\n",
        "sys/fs/cgroup/slice/pod/app/cpu.max": "max 100000",
        "sys/fs/cgroup/slice/pod/cpu.max": "400000 100000",
        "sys/fs/cgroup/slice/cpu.max": "600000 100000",
        "sys/fs/cgroup/slice/memory.max": str(3 * GIB),
        "sys/fs/cgroup/slice/memory.current": str(GIB),
    }
    found = machine(tmp_path, files)
    assert found.cpus() == 4
    assert found.available_bytes() == 2 * GIB
