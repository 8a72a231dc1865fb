"""Compiles the kernels' C code beside its source: as a hook of the wheel's build, or by itself, `build_native.py`.

Without a C compiler nothing is compiled, one line says so, and the engine computes with torch. A library's name has a
part of its source's checksum, so that what was compiled before is kept while it fits and replaced when it does not.
"""

import hashlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by itself
    BuildHookInterface = object

PACKAGE = Path(__file__).parent / "src" / "tidegate_kernels"
INSTRUCTIONS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
}
OPTIONS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fvisibility=hidden", "-shared", "-fPIC", "-s"]


class CustomBuildHook(BuildHookInterface):
    """hatchling's name for a project's own hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put the libraries into a wheel; an editable installation finds them beside the source."""
        built = build()
        if built and version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"
            build_data["artifacts"] += [str(path.relative_to(self.root)) for path in built]


def build() -> list[Path]:
    """The libraries of the present source, compiled where they are not there yet; none where that cannot be done."""
    source = PACKAGE / "native.c"
    if not source.exists() or platform.machine() != "x86_64" or platform.system() != "Linux":
        return []
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    wanted = {PACKAGE / f"native-{name}-{digest}.so": flags for name, flags in INSTRUCTIONS.items()}
    missing = {path: flags for path, flags in wanted.items() if not path.exists()}
    compiler = shutil.which("cc") or shutil.which("gcc")
    if missing and compiler is None:
        print("tidegate: no C compiler (Debian: gcc, libc6-dev), so packed weights are multiplied by torch, slower")
        return []
    for path, flags in missing.items():
        unfinished = path.with_suffix(".tmp")
        made = subprocess.run(
            [str(compiler), *OPTIONS, *flags, "-o", unfinished, source], capture_output=True, text=True
        )
        if made.returncode != 0:
            print(f"tidegate: {compiler} cannot compile native.c, so packed weights are multiplied by torch, slower")
            print(made.stderr, file=sys.stderr)
            return []
        unfinished.replace(path)
    for old in PACKAGE.glob("native-*.so"):
        if old not in wanted:
            old.unlink()
    return list(wanted)


if __name__ == "__main__":
    build()
