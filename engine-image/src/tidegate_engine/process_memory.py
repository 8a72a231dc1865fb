"""What the kernel says about this process's memory. None where there is no /proc to say it.

Called by the torch runner and by whoever shows metrics.
"""

from pathlib import Path
from resource import getpagesize

_PROC = Path("/proc/self")


def resident_bytes() -> int | None:
    """Memory that is in use now."""
    try:
        return int((_PROC / "statm").read_text().split()[1]) * getpagesize()
    except (OSError, IndexError, ValueError):
        return None


def peak_bytes() -> int | None:
    """The most that was in use at once, since the start or since `forget_peak`."""
    try:
        status = (_PROC / "status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None


def forget_peak() -> bool:
    """Let the peak begin anew with what is in use now; False where that is not allowed."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True
