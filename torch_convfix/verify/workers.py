"""Cases run in processes of their own, many to a process: one that dies is a finding, not the end."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from torch_convfix.verify.module_cases import ModuleCase
from torch_convfix.verify.op_cases import OpCase

_START_TIMEOUT = 600.0
_KEPT_LINES = 12  # of what a dead process wrote


@dataclass(frozen=True)
class Settings:
    """How every case of a sweep is run."""

    device: str
    dtype: str = ""  # empty: the device's own default
    highest: int = 2  # highest order of an operator; convolutions go one further
    stock: bool = False
    tolerance: float | None = None
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spell:
    """Asks for the line that repeats a failing case, on inputs of few words if it fails on them."""

    case: OpCase | ModuleCase
    redraw: bool


@dataclass
class Death:
    """The process ended, or had to be ended, in a case."""

    how: str
    output: str  # the end of what it wrote to stderr


@dataclass(frozen=True)
class Ready:
    """What a worker says when it has started."""

    dtype: str
    traced: bool
    graph_hash_fault: bool


class Worker:
    """A process that runs cases one by one, started again after each death."""

    def __init__(self, settings: Settings, timeout: float):
        self._settings, self.timeout = settings, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self.ready: Ready

    def start(self) -> Ready:
        """Start the process; raises RuntimeError, with what it wrote, if it does not come up."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self._connection, other = Pipe()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch_convfix.verify.worker", str(other.fileno())],
                pass_fds=[other.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env=environment(self._settings),
                process_group=0,  # an interrupt from the keyboard is for the sweep, not for a case
            )
        answer = self._ask(self._settings, _START_TIMEOUT)
        if isinstance(answer, Death):
            raise RuntimeError(f"the worker did not start ({answer.how}):\n{answer.output}")
        self.ready = answer
        return answer

    def run(self, case: Any) -> Any:
        """What became of a case or another request: `Outcome`, or `Death`."""
        if self._process is None:
            self.start()
        return self._ask(case, self.timeout)

    def kill(self) -> None:
        """End the process from another thread: the one that waits for it is told of a death."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, request: Any, timeout: float) -> Any:
        with contextlib.suppress(EOFError, OSError):  # the process is dead: told below
            self._connection.send(request)
            if self._connection.poll(timeout):
                return self._connection.recv()
            return self._bury(f"still running after {timeout:.0f} s")
        return self._bury("")

    def _bury(self, how: str) -> Death:
        assert self._process is not None
        if not how:
            code = self._process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.stop()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()
        return Death(
            how, "\n".join([line.strip() for line in lines if line.strip()][-_KEPT_LINES:])
        )


@contextlib.contextmanager
def worker(settings: Settings, timeout: float) -> Iterator[Worker]:
    """A worker, ended with the context."""
    it = Worker(settings, timeout)
    try:
        yield it
    finally:
        it.stop()


def environment(settings: Settings) -> dict[str, str]:
    """What a process that compares must find in its environment."""
    env = dict(os.environ, OMP_NUM_THREADS="1", TORCH_CONVFIX="0")
    if settings.device in ("xla", "tpu"):
        # LLVM's optimizations take most of the time of a case, and change no derivative.
        flags = env.get("XLA_FLAGS", "")
        env["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {flags}"
    if settings.device == "xla":
        # No graph is run twice, and a cached one may be taken for another: see graph_hash_fault.
        env["XLA_COMPILATION_CACHE_SIZE"] = "1"
    return env
