"""One compilation in a process of its own, with a limit on time and memory.

The compiler can take an hour and all memory for a large graph, and ends the process on some errors.
Run as a module it is that process: it takes the job as JSON and the path to write the result to.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_convfix._process import ENDED, run_limited, tail
from torch_convfix.tpu._environment import TORCH_XLA_DEBUG
from torch_convfix.tpu.report import Failure, Report


@dataclass(frozen=True)
class Job:
    """``step`` and the specs of ``inputs`` are those of `torch_convfix._target.resolve`."""

    step: str
    inputs: tuple[str, ...]
    topology: str
    stack: str
    kernels: str

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.step.rpartition(":")[2]

    def failure(self, reason: str, *, usable: bool = True) -> Failure:
        """That this job failed."""
        return Failure(self.name, self.stack, self.kernels, self.topology, reason, usable)


def result_of(values: Mapping[str, Any]) -> Report | Failure:
    """Of the dictionary of either."""
    return Failure(**values) if "reason" in values else Report.from_dict(values)


def run(
    job: Job,
    *,
    python: str = sys.executable,
    limit: float | None = None,
    cpu_limit: float | None = None,
    memory: int | None = None,
) -> Report | Failure:
    """The report, or why there is none. ``limit`` in seconds, ``cpu_limit`` in seconds of all threads
    together, which other processes do not shorten, ``memory`` in bytes."""
    environment = {"PJRT_DEVICE": "CPU", **os.environ}
    if job.stack == "torch_xla":
        environment |= TORCH_XLA_DEBUG
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result"), Path(folder, "log")
        command = [python, "-m", __name__, json.dumps(asdict(job)), str(result)]
        reason = run_limited(
            command, log, environment, limit=limit, cpu_limit=cpu_limit, memory=memory
        )
        if result.exists():
            return result_of(json.loads(result.read_text()))
        reason = reason or f"{ENDED}exit code 0"
        if reason.startswith(ENDED):
            reason = f"the compiling process {reason}:\n{tail(log, 20)}"
        return job.failure(reason)


def _main(job_text: str, path: str) -> int:
    values = json.loads(job_text)
    job = Job(**{**values, "inputs": tuple(values["inputs"])})
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(_result(job)))
    partial.rename(path)
    return 0


def _result(job: Job) -> dict[str, Any]:
    """The report's dictionary, or the failure's."""
    from torch_convfix import _target
    from torch_convfix.tpu import _compiler, _step

    try:
        fn, inputs = _target.resolve(job.step, job.inputs)
    except (ImportError, ValueError) as error:
        return asdict(job.failure(str(error), usable=False))
    try:
        return _step.compile(
            fn,
            *inputs,
            topology=job.topology,
            stack=job.stack,  # type: ignore[arg-type]
            kernels=job.kernels,  # type: ignore[arg-type]
            name=job.name,
        ).to_dict()
    except (_compiler.CompileError, ImportError, ValueError) as error:
        return asdict(job.failure(str(error)))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{_target.sentence(job.step, error)} ({at.filename}:{at.lineno})"
        return asdict(job.failure(reason))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
