"""What set-up shows while it works: one live line, one finished line a step, and logs for the rest.

Owns the terminal and the running of long commands; knows nothing of what they build. Called by every set-up part.
"""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tidegate_local import cache

QUIET_INTERVAL_SECONDS = 30.0
"""How often a log that is not a terminal gets a sign of life."""


class StepFailed(Exception):
    """A command of a step failed; the message carries the end of its output and the log's path."""


class Step:
    """One running step: its last line of output is what the live line shows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = time.monotonic()
        self.last = ""
        self._cancelled = False
        self._process: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None

    def watch(self, process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
        """Name the process that `cancel` ends."""
        self._process = process
        if self._cancelled:
            process.kill()

    def cancel(self) -> None:
        self._cancelled = True
        if self._process is not None:
            self._process.kill()

    def saw(self, line: str) -> None:
        self.last = " ".join(line.split())

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.began


class Progress:
    """Steps that may run side by side, drawn on one line. Used as a context manager; `step` from any thread."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._running: list[Step] = []
        self._lock = threading.Lock()
        self._cancelled = False
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "Progress":
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._ticker.join()

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        step = Step(name)
        with self._lock:
            if self._cancelled:
                step.cancel()
            self._running.append(step)
            if not self._live:
                self._stream.write(f"  .  {name}\n")
                self._stream.flush()
        try:
            yield step
        except BaseException:
            self._finish(step, "FAILED")
            raise
        self._finish(step, "done")

    def cancel(self) -> None:
        """End the commands of all running steps: another one has failed, and theirs would only delay the message."""
        with self._lock:
            self._cancelled = True
            for step in self._running:
                step.cancel()

    def say(self, line: str) -> None:
        with self._lock:
            self._write(line)

    def _finish(self, step: Step, outcome: str) -> None:
        with self._lock:
            self._running.remove(step)
            self._write(f"{step.elapsed_seconds():5.0f} s  {step.name}: {outcome}")

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\033[K{line}\n" if self._live else f"{line}\n")
        self._stream.flush()

    def _tick(self) -> None:
        interval_seconds = 1.0 if self._live else QUIET_INTERVAL_SECONDS
        while not self._done.wait(interval_seconds):
            with self._lock:
                if self._running:
                    self._draw()

    def _draw(self) -> None:
        text = "  |  ".join(f"{step.elapsed_seconds():.0f} s {step.name}: {step.last}" for step in self._running)
        if self._live:
            width = os.get_terminal_size(self._stream.fileno()).columns - 1
            self._stream.write(f"\r\033[K{text[:width]}")
        else:
            self._stream.write(f"     {text[:200]}\n")
        self._stream.flush()


def run(
    argv: Sequence[str | Path],
    step: Step,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command, its output on the live line and in a log. Returns its last 200 lines; raises StepFailed."""
    log_path = cache.folder("logs") / f"{step.name.replace(' ', '-').replace('/', '-').replace(':', '-')}.log"
    tail: deque[str] = deque(maxlen=200)
    with log_path.open("a") as log:
        log.write(f"$ {' '.join(map(str, argv))}\n")
        with subprocess.Popen(
            [str(part) for part in argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=None if env is None else dict(env),
            cwd=cwd,
        ) as process:
            step.watch(process)
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    log.write(line)
                    tail.append(line)
                    step.saw(line)
            except BaseException:
                process.kill()
                raise
    if process.returncode != 0:
        end = "".join(list(tail)[-20:])
        raise StepFailed(f"{step.name} failed ({argv[0]} exited with {process.returncode}).\n{end}Log: {log_path}")
    return "".join(tail)
