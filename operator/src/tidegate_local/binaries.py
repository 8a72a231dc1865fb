"""The Kubernetes binaries: built from the Go module beside this file into the cache, once for each key.

Owns what is built and how; called by `setup`, and by `cluster` for paths. Knows nothing of running them.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tidegate_local import activity
from tidegate_local.cache import folder as cache_folder
from tidegate_local.cache import key as content_key
from tidegate_local.cache import root

MODULE = Path(__file__).parent / "gomodule"
KUBERNETES_VERSION = "1.36.3"


class MissingBinary(Exception):
    """A binary has not been built yet; the message says how to."""


@dataclass(frozen=True, slots=True)
class Binary:
    """One main package."""

    name: str
    package: str


BINARIES = (
    Binary("etcd", "go.etcd.io/etcd/server/v3"),
    Binary("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    Binary("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    Binary("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
    Binary("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    Binary("kubelet", "k8s.io/kubernetes/cmd/kubelet"),
    Binary("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy"),
    Binary("coredns", "./coredns"),
    Binary("helm", "helm.sh/helm/v4/cmd/helm"),
)
"""In build order: what a control plane needs comes first, so that it can be used while the rest still compiles."""


def version_flags(version: str = KUBERNETES_VERSION) -> str:
    """Linker flags that stamp the release into the binaries: without them version checks (kubectl, Helm) break."""
    major, minor, _ = version.split(".")
    stamps = {
        "gitVersion": f"v{version}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitCommit": f"v{version}",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    stamped = [f"-X {package}.{name}={value}" for package in packages for name, value in stamps.items()]
    return " ".join(["-s", "-w", *stamped])


def go_command() -> str:
    """Path of `go`. Raises MissingBinary where there is none."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if found is None:
        raise MissingBinary("Go is not installed: put Go 1.26 or newer on PATH (https://go.dev/dl) and run this again.")
    return found


@cache
def go_version() -> str:
    """Version and architecture of this machine's Go: part of every key."""
    asked = subprocess.run(
        [go_command(), "env", "GOVERSION", "GOARCH"],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "GOTOOLCHAIN": "local"},
    )
    return asked.stdout


@cache
def _key() -> str:
    """Changes with the module and with this machine's Go."""
    sources = [path.read_text() for path in sorted(MODULE.rglob("*")) if path.is_file()]
    return content_key([go_version(), version_flags(), *sources])


def folder() -> Path:
    """Where the binaries lie."""
    return root() / "bin" / _key()


def path(name: str) -> Path:
    """Path of a binary. Raises MissingBinary when it has not been built for the present key."""
    found = folder() / name
    if not found.exists():
        raise MissingBinary(f"{name} has not been built yet. Run: tidegate-local setup")
    return found


def missing() -> list[Binary]:
    return [binary for binary in BINARIES if not (folder() / binary.name).exists()]


def build(progress: activity.Progress) -> None:
    """Build what is missing. Go's own caches for it are private and dropped when all has been built."""
    for binary in missing():
        with progress.step(binary.name) as step:
            _build_one(binary, step)
    drop_build_caches()


def drop_build_caches() -> None:
    """Remove the module and build caches (6 GB): with the binaries kept by key they would never be read again."""
    for name in ("go-build", "go-mod"):
        shutil.rmtree(root() / name, ignore_errors=True)


def _build_one(binary: Binary, step: activity.Step) -> None:
    target = folder() / binary.name
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    env = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOCACHE": str(cache_folder("go-build")),
        "GOMODCACHE": str(cache_folder("go-mod")),
        "GOFLAGS": "-mod=readonly -modcacherw -buildvcs=false",
        "GOTOOLCHAIN": "local",
        # The compiler lives for seconds a package: collecting its garbage less often takes memory and saves time.
        "GOGC": "400",
    }
    argv = [go_command(), "build", "-v", "-trimpath", "-p", str(os.cpu_count() or 2), "-ldflags", version_flags()]
    activity.run([*argv, "-o", unfinished, binary.package], step, env=env, cwd=MODULE)
    unfinished.rename(target)
