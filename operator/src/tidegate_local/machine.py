"""What the machine must be and have: checks before anything starts, and the Debian packages.

Owns the sentences that tell a user what is missing. Called by `setup` and the command line.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tidegate_local import activity, binaries, cache, namespaces

PACKAGES = (
    "containerd",
    "runc",
    "containernetworking-plugins",
    "iptables",
    "nftables",
    "conntrack",
    "ipset",
    "iproute2",
    "kmod",
    "procps",
    "util-linux",
    "openssl",
    "ca-certificates",
    "debootstrap",
    "buildah",
    "skopeo",
    "gcc",
    "libc6-dev",
    "prometheus",
)
SERVICES = {"containerd": "containerd.service", "prometheus": "prometheus.service"}
POLICY = Path("/usr/sbin/policy-rc.d")
OLDEST_GO = (1, 26)


class Unsuitable(Exception):
    """The machine lacks something; the message is one sentence that says what to do."""


def check(*, disk_bytes: float) -> None:
    """Raise Unsuitable for the first thing that would make set-up fail half-way."""
    if os.geteuid() != 0:
        raise Unsuitable("The local cluster needs root (namespaces, mounts): run this as root or with sudo.")
    if shutil.which("apt-get") is None or shutil.which("dpkg-query") is None:
        raise Unsuitable(
            "The local cluster is made of Debian packages: run this on Debian 12, or use your own cluster."
        )
    _check_go()
    isolate = ["unshare", "--mount", "--pid", "--net", "--cgroup", "--uts", "--ipc", "--fork", "true"]
    if subprocess.run(isolate, capture_output=True).returncode != 0:
        raise Unsuitable("This machine does not allow new namespaces (a container?): use a virtual or a real machine.")
    check_disk(disk_bytes)


def check_disk(needed_bytes: float) -> None:
    """Raise Unsuitable when less is free where the cache lies."""
    folder = cache.root()
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise Unsuitable(
            f"{folder} has {free_bytes / 1e9:.1f} GB free and this needs {needed_bytes / 1e9:.1f} GB at its peak: "
            "free some, or set TIDEGATE_CACHE to a folder on a larger disk."
        )


def _check_go() -> None:
    asked = subprocess.run(
        [binaries.go_command(), "env", "GOVERSION"],
        capture_output=True,
        text=True,
        env={**os.environ, "GOTOOLCHAIN": "local"},
        cwd="/",
    )
    version = asked.stdout.strip()
    if go_release(version) < OLDEST_GO:
        raise Unsuitable(f"Go is {version or 'broken'}, and Kubernetes needs 1.26 or newer: https://go.dev/dl.")


def go_release(version: str) -> tuple[int, int]:
    """Major and minor number of `go1.26.8`; (0, 0) for what is no release."""
    numbers = version.removeprefix("go").split(" ")[0].split(".")
    if len(numbers) < 2 or not all(number.isdigit() for number in numbers[:2]):
        return (0, 0)
    return int(numbers[0]), int(numbers[1])


def missing_packages() -> list[str]:
    listed = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package}\n", *PACKAGES],
        capture_output=True,
        text=True,
    )
    installed = {line.split(" ")[1] for line in listed.stdout.splitlines() if line.startswith("installed ")}
    return [package for package in PACKAGES if package not in installed]


def install_packages(progress: activity.Progress) -> None:
    """Install what is missing. No service of theirs is started, now or at the next boot."""
    absent = missing_packages()
    if not absent:
        return
    env = {**namespaces.environment(), "DEBIAN_FRONTEND": "noninteractive"}
    with progress.step("Debian packages") as step, _no_service_starts():
        activity.run(["apt-get", "update"], step, env=env)
        activity.run(["apt-get", "install", "--yes", "--no-install-recommends", *absent], step, env=env)
        _disable_services(absent, step)


@contextmanager
def _no_service_starts() -> Iterator[None]:
    """Debian's packages ask this file before they start a service."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _disable_services(packages: Sequence[str], step: activity.Step) -> None:
    units = [unit for package, unit in SERVICES.items() if package in packages]
    if units and shutil.which("systemctl"):
        activity.run(["systemctl", "disable", "--quiet", *units], step)
