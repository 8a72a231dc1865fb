"""The namespaces that hold a cluster: made here, entered here, ended by killing one process.

Owns process 1, cgroup folders and how commands get inside. What runs there is `cluster`'s matter.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

INIT = Path(__file__).parent / "init.py"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
JOIN_CGROUPS = 'for folder in $0; do echo $$ > "$folder/cgroup.procs" || exit 70; done; exec "$@"'
KEEP_PID = 'echo $$ > "$0"; exec "$@"'


class NamespaceFailed(Exception):
    """Process 1 did not come up; the message carries its output."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted cgroup hierarchy: mount options (`cgroup2` for version 2), mount point, and our own place in it."""

    options: str
    mount_point: Path
    own_path: str

    def child(self, name: str) -> Path:
        return self.mount_point / self.own_path.strip("/") / name


@dataclass(frozen=True, slots=True)
class Namespaces:
    """A running process 1, by the machine's process id, and the cgroup folders of its cluster."""

    pid: int
    cgroups: tuple[str, ...]
    node: bool

    def enter(self, argv: Sequence[str | Path], *, pid_file: Path | None = None) -> list[str]:
        """The command line that runs `argv` inside all namespaces, so that it ends with process 1."""
        inside = [str(part) for part in argv]
        if pid_file is not None:
            inside = ["sh", "-c", KEEP_PID, str(pid_file), *inside]
        kinds = ["-m", "-p", "-n", "-i", "-u", "-C"] if self.node else ["-m", "-p"]
        join = ["sh", "-c", JOIN_CGROUPS, " ".join(self._process_cgroups())]
        return [*join, "nsenter", "-t", str(self.pid), *kinds, "--", *inside]

    def enter_network(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs `argv` on the machine but in the node's network; it stays an ordinary child."""
        if not self.node:
            return [str(part) for part in argv]
        return ["nsenter", "-t", str(self.pid), "-n", "--", *(str(part) for part in argv)]

    def belong_to(self, state: Path) -> bool:
        """Whether the process of that id is still this cluster's process 1, and not a later owner of the number."""
        try:
            return str(state).encode() in Path(f"/proc/{self.pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False

    def end(self, state: Path, *, timeout_seconds: float = 30.0) -> None:
        """Kill process 1, which takes everything inside with it, and remove the emptied cgroup folders."""
        deadline = time.monotonic() + timeout_seconds
        if self.belong_to(state):
            os.kill(self.pid, signal.SIGKILL)
            while _still_ending(self.pid) and time.monotonic() < deadline:
                time.sleep(0.02)
        for folder in self.cgroups:
            remove_cgroup(Path(folder), deadline)

    def _process_cgroups(self) -> list[str]:
        leaves = [Path(folder, "system") for folder in self.cgroups]
        return [str(leaf if leaf.exists() else leaf.parent) for leaf in leaves]


def hierarchies(mountinfo: str, own_cgroups: str) -> list[Hierarchy]:
    """The cgroup hierarchies that are mounted, from the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    mounts: dict[str, Path] = {}
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, super_options = rest.split(" ", 2)
        point = Path(fields.split(" ")[4])
        if kind == "cgroup2":
            mounts["cgroup2"] = point
        elif kind == "cgroup":
            mounts.update(dict.fromkeys(super_options.split(","), point))
    found = []
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        options = controllers or "cgroup2"
        mounted = mounts.get(options.split(",")[0])
        if mounted is not None:
            found.append(Hierarchy(options=options, mount_point=mounted, own_path=path))
    return found


def machine_hierarchies() -> list[Hierarchy]:
    found = hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if is_version_2_alone(found):
        # Version 2 alone: below a cgroup that holds processes none can be limited, so ours goes to the top.
        return [replace(found[0], own_path="/")]
    return found


def is_version_2_alone(found: Sequence[Hierarchy]) -> bool:
    return [hierarchy.options for hierarchy in found] == ["cgroup2"]


def create(state: Path, *, node: bool, detached: bool, inherited: Sequence[int]) -> tuple[Namespaces, int | None]:
    """Start process 1 and wait until it is ready. `inherited` descriptors stay open as long as it lives.

    Returns the namespaces and, unless detached, the descriptor whose closing (also by our death) ends them.
    """
    found = machine_hierarchies() if node else []
    if is_version_2_alone(found):
        _pass_on_controllers(found[0].mount_point)
    cgroups = [make_cgroup(hierarchy, f"tidegate-{state.name}") for hierarchy in found]
    kinds = ["--mount", "--pid", *(("--net", "--cgroup", "--uts", "--ipc") if node else ())]
    unshare = ["unshare", *kinds, "--fork", "--kill-child", "--propagation", "private", "--"]
    mode = "node" if node else "control-plane"
    init = [sys.executable, "-I", "-S", str(INIT), str(state), mode, "detached" if detached else "tied"]
    options = [hierarchy.options for hierarchy in found]
    log = state / "logs" / "init.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    with log.open("w") as output:
        process = subprocess.Popen(
            ["sh", "-c", JOIN_CGROUPS, " ".join(map(str, cgroups)), *unshare, *init, *options],
            stdin=subprocess.DEVNULL if detached else reading,
            stdout=output,
            stderr=output,
            env=environment(),
            start_new_session=True,
            pass_fds=tuple(inherited),
        )
    os.close(reading)
    if detached:
        os.close(writing)
    try:
        pid = _await_pid(state / "init.pid", process, log)
    except NamespaceFailed:
        for cgroup in cgroups:
            remove_cgroup(cgroup, time.monotonic() + 5)
        raise
    return Namespaces(pid, tuple(map(str, cgroups)), node), None if detached else writing


def environment() -> dict[str, str]:
    """Our environment with the folders of administration commands on PATH."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{PATH}"}


def make_cgroup(hierarchy: Hierarchy, name: str) -> Path:
    folder = hierarchy.child(name)
    remove_cgroup(folder, time.monotonic() + 5)
    folder.mkdir()
    # A new cpuset is empty, and nothing may join it before it names processors and memory.
    for file in ("cpuset.cpus", "cpuset.mems"):
        if "cpuset" in hierarchy.options.split(","):
            (folder / file).write_text((folder.parent / file).read_text())
    return folder


def _pass_on_controllers(top: Path) -> None:
    """cgroup v2: let children have every controller. systemd has done so for most; the rest do no harm."""
    available = set((top / "cgroup.controllers").read_text().split())
    missing = available - set((top / "cgroup.subtree_control").read_text().split())
    if missing:
        (top / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in sorted(missing)))


def remove_cgroup(folder: Path, deadline: float) -> None:
    """Remove a cgroup folder and those below it once killed processes have left. Raises OSError at the deadline."""
    if not folder.exists():
        return
    for below in [entry for entry in folder.iterdir() if entry.is_dir()]:
        remove_cgroup(below, deadline)
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _still_ending(pid: int) -> bool:
    """Process 1 becomes a zombie only when all others of its namespace are gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _await_pid(path: Path, process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + 30
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise NamespaceFailed(f"The cluster's namespaces could not be prepared:\n{log.read_text()[-2000:]}")
        time.sleep(0.01)
    return int(path.read_text())
