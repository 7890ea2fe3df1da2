"""A command with limits on time and memory."""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

ENDED = "ended with "  # how the reason begins where no limit did it


def run_limited(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    limit: float | None = None,
    cpu_limit: float | None = None,
    memory: int | None = None,
) -> str:
    """Why it was ended; empty if it ended itself, with 0. What it says goes to ``log``.

    ``limit`` in seconds, ``cpu_limit`` in seconds of all threads together, which other processes do
    not shorten, ``memory`` in bytes.
    """
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        start = time.monotonic()
        try:
            used = psutil.Process(child.pid)
            while child.poll() is None:
                time.sleep(0.1)
                if limit is not None and time.monotonic() - start > limit:
                    return f"not done within the limit of {limit:g} s"
                if cpu_limit is not None and sum(used.cpu_times()[:2]) > cpu_limit:
                    return f"not done within the limit of {cpu_limit:g} CPU s"
                if memory is not None and used.memory_info().rss > memory:
                    return f"stopped at the limit of {memory / 2**30:g} GiB of memory"
        finally:
            child.kill()
            child.wait()
    code = child.returncode
    if code == 0:
        return ""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return ENDED + how


def tail(log: Path, lines: int) -> str:
    """The end of what a command said."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
