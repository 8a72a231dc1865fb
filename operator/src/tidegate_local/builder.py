"""buildah, with a store of its own inside the cache and the machine's pip and certificates lent to builds.

Owns how buildah is called and the base image; what is built from it belongs to `images`.
"""

import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tidegate_local import activity, cache, namespaces

SUITE = "bookworm"
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
BASE_NAME = "localhost/tidegate-base"
CERTIFICATES = Path("/etc/ssl/certs")
PIP_SETTINGS = frozenset({"index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "timeout", "retries"})
MAKE_BASE = """
set -e
container=$(buildah from scratch)
root=$(buildah mount "$container")
debootstrap --variant=minbase --include="$PACKAGES" "$SUITE" "$root" "$MIRROR"
cd "$root"
rm -rf var/cache/apt/* var/cache/debconf/* var/lib/apt/lists/* var/log/* tmp/* etc/apt/sources.list
rm -rf usr/share/doc/* usr/share/man/* usr/share/info/* usr/share/locale/* etc/resolv.conf etc/hostname
cd /
buildah unmount "$container"
buildah commit --rm "$container" "$IMAGE"
"""


class NoMirror(Exception):
    """apt has no source for the suite that the base image is made of."""


def folder() -> Path:
    return cache.root() / "buildah"


def base_image() -> str:
    """Name of the base image for its present recipe."""
    return f"{BASE_NAME}:{cache.key([SUITE, *BASE_PACKAGES, MAKE_BASE, platform.machine()])}"


def has_image(name: str) -> bool:
    return (
        folder().exists()
        and subprocess.run(buildah("inspect", "--type", "image", name), capture_output=True).returncode == 0
    )


def build_base(step: activity.Step) -> None:
    """Make the base image with debootstrap from the machine's own apt sources, which leave no trace in it."""
    words = {"PACKAGES": ",".join(BASE_PACKAGES), "SUITE": SUITE, "MIRROR": mirror(), "IMAGE": base_image()}
    script = f'buildah() {{ command buildah {" ".join(_store_options())} "$@"; }}\n{MAKE_BASE}'
    activity.run(private_mounts("sh", "-c", script), step, env={**_environment(), **words})


def build(dockerfile: Path, *, target: str, tag: str, context: Path, step: activity.Step) -> None:
    """Build one target of a Dockerfile on the base image, with the layers of earlier builds."""
    scratch = cache.folder("tmp")
    options = ["--isolation", "chroot", "--network", "host", "--layers", "--pull=never", "--format", "oci"]
    volumes = [word for source, point in _lent_files(scratch).items() for word in ("--volume", f"{source}:{point}")]
    names = ["--build-arg", f"BASE_IMAGE={base_image()}", "--target", target, "--tag", tag, "--file", str(dockerfile)]
    activity.run(buildah("build", *options, *volumes, *names, str(context)), step, env=_environment())


def push_to_layout(image: str, layout: Path, *, reference: str, step: activity.Step) -> None:
    """Write an image's blobs uncompressed into an OCI layout; those that it has already are not written again."""
    # buildah's push would compress, which takes longer than all the rest together.
    place = f"containers-storage:[overlay@{folder() / 'root'}+{folder() / 'run'}]{image}"
    options = ["--insecure-policy", "copy", "--dest-oci-accept-uncompressed-layers"]
    argv = private_mounts("skopeo", *options, place, f"oci:{layout}:{reference}")
    activity.run(argv, step, env=_environment())


def buildah(*arguments: str) -> list[str]:
    return private_mounts("buildah", *_store_options(), *arguments)


def private_mounts(*argv: str) -> list[str]:
    """A command whose mounts end with it, and whose children end when it is killed."""
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--", *argv]


def mirror() -> str:
    """Where the machine's own apt takes the suite from. Raises NoMirror."""
    form = "$(CODENAME) $(COMPONENT) $(REPO_URI)"
    argv = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        suite, component, address = line.split(" ", 2)
        if (suite, component) == (SUITE, "main"):
            return address
    raise NoMirror(f"apt has no source for {SUITE} main, which the images are made of: add one and run apt-get update.")


def pip_configuration(settings: Mapping[str, str]) -> str:
    """A pip.conf with the settings that say where packages come from; the cache folder is the one lent to builds."""
    lines = ["[global]", f"cert = {CERTIFICATES}/ca-certificates.crt", "disable-pip-version-check = true"]
    kept = {name: value for name, value in settings.items() if name in PIP_SETTINGS}
    lines += [f"{name} = {' '.join(value.split())}" for name, value in sorted(kept.items())]
    return "\n".join([*lines, ""])


def _machine_pip_settings() -> dict[str, str]:
    """What pip would use here, from its files and the environment: the last of equal names wins, as pip has it."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    settings = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", ":env:", "install"):
            settings[option] = value.strip("'\"")
    return settings


def _lent_files(scratch: Path) -> dict[str, str]:
    """Files of the machine that builds may read while they run; nothing of them stays in a layer."""
    settings = _machine_pip_settings()
    config = scratch / "pip.conf"
    config.write_text(pip_configuration(settings))
    lent = {str(CERTIFICATES): f"{CERTIFICATES}:ro", str(config): "/etc/pip.conf:ro"}
    for place in settings.get("find-links", "").split():
        if Path(place).is_dir():
            lent[place] = f"{place}:ro"
    return {**lent, str(_pip_cache(scratch)): "/root/.cache/pip"}


def _pip_cache(scratch: Path) -> Path:
    """pip's own cache, so that what a virtual environment has fetched need not come again."""
    argv = [sys.executable, "-m", "pip", "cache", "dir"]
    asked = subprocess.run(argv, capture_output=True, text=True)
    path = Path(asked.stdout.strip()) if asked.returncode == 0 else scratch / "pip"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _store_options() -> list[str]:
    place = folder()
    return ["--root", str(place / "root"), "--runroot", str(place / "run"), "--storage-driver", "overlay"]


def _environment() -> dict[str, str]:
    return {**namespaces.environment(), "TMPDIR": str(cache.folder("tmp")), **_apt_proxy()}


def _apt_proxy() -> dict[str, str]:
    """debootstrap fetches with wget, which knows nothing of apt's proxy."""
    asked = subprocess.run(["apt-config", "dump", "Acquire::http::Proxy"], capture_output=True, text=True).stdout
    _, _, value = asked.strip().rstrip(";").partition(" ")
    proxy = value.strip('"')
    return {"http_proxy": proxy} if proxy else {}


def clear_leftovers(layout: Path) -> None:
    """Remove the temporary files of builds that were interrupted; the caller holds the builder's lock."""
    shutil.rmtree(cache.root() / "tmp", ignore_errors=True)
    for unfinished in layout.glob("oci-put-blob*"):
        unfinished.unlink()
