"""Process 1 of a cluster's namespaces: prepares mounts and network, then only reaps and waits; its death ends all.

Run by path, standard library only, by `namespaces.create`: `init.py STATE MODE LIFE CGROUP...`
MODE is `node` or `control-plane`; LIFE is `tied` (ends at the end of standard input) or `detached`.
CGROUP is the controllers of one cgroup v1 hierarchy as mount options, or `cgroup2`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MACHINE_WIDE_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What a kubelet wants to see, and would otherwise write for the whole machine."""
PRIVATE_FOLDERS = ("/run", "/var/log", "/var/lib/cni", "/var/lib/kubelet")
"""Fixed paths that node software writes to: empty in here, untouched outside."""
NODE_ADDRESS = "10.200.0.1"
GATEWAY_ADDRESS = "10.200.0.254"


def run(*argv: str | Path) -> None:
    subprocess.run([str(part) for part in argv], check=True)


def mount(kind: str, target: Path | str, options: str = "") -> None:
    Path(target).mkdir(parents=True, exist_ok=True)
    run("mount", "-t", kind, *(("-o", options) if options else ()), kind, target)


def mount_cgroups(hierarchies: Sequence[str]) -> None:
    """Show this cgroup namespace's part of each hierarchy that the machine has mounted."""
    if list(hierarchies) == ["cgroup2"]:
        mount("cgroup2", CGROUPS)
        delegate_controllers()
        return
    mount("tmpfs", CGROUPS, "mode=755")
    for options in hierarchies:
        if options == "cgroup2":
            mount("cgroup2", CGROUPS / "unified")
        elif options.startswith("name="):
            mount("cgroup", CGROUPS / options.removeprefix("name="), f"none,{options}")
        else:
            mount("cgroup", CGROUPS / options, options)
            for controller in options.split(","):
                if controller != options:
                    (CGROUPS / controller).symlink_to(options)


def delegate_controllers() -> None:
    """cgroup v2: processes may only live in leaves, so all here move to one before controllers are passed on."""
    leaf = CGROUPS / "system"
    leaf.mkdir(exist_ok=True)
    for pid in (CGROUPS / "cgroup.procs").read_text().split():
        (leaf / "cgroup.procs").write_text(pid)
    available = (CGROUPS / "cgroup.controllers").read_text().split()
    (CGROUPS / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in available))


def shield_sysctls(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, value in MACHINE_WIDE_SYSCTLS.items():
        if Path("/proc/sys", name).exists():
            stand_in = folder / name.replace("/", "_")
            stand_in.write_text(f"{value}\n")
            run("mount", "--bind", stand_in, Path("/proc/sys", name))


def prepare_network() -> None:
    """A node address on a bridge, and a default route to nowhere: Service addresses need one to be looked up."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "node0", "type", "bridge")
    run("ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", "node0")
    run("ip", "link", "set", "node0", "up")
    run("ip", "route", "add", "default", "via", GATEWAY_ADDRESS, "dev", "node0")
    if not Path("/proc/sys/net/bridge").exists():
        run("modprobe", "br_netfilter")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("1")


def prepare_node(state: Path, hierarchies: Sequence[str]) -> None:
    run("umount", "-R", CGROUPS)
    run("umount", "-l", "/sys")
    mount("sysfs", "/sys")
    mount_cgroups(hierarchies)
    for folder in PRIVATE_FOLDERS:
        mount("tmpfs", folder, "mode=755")
    Path("/run/netns").mkdir()
    shield_sysctls(state / "sysctls")
    prepare_network()
    run("hostname", "node-1")


def main(state: Path, mode: str, life: str, hierarchies: Sequence[str]) -> None:
    # The machine's /proc is still mounted: it names this process as the machine does.
    pid = os.readlink("/proc/self")
    mount("proc", "/proc")
    if mode == "node":
        prepare_node(state, hierarchies)
    # Orphans are adopted by this process; ignoring their end lets the kernel reap them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    (state / "init.pid.part").write_text(pid)
    (state / "init.pid.part").rename(state / "init.pid")
    if life == "tied":
        while sys.stdin.buffer.read(1):
            pass
        return
    while True:
        signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
