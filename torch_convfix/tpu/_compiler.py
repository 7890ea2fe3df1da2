"""libtpu's compiler, for a topology that is not there, and what it says of what it compiled."""

import re
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch_convfix.tpu import _chips, _environment


class CompileError(RuntimeError):
    """The compiler's own message, with the operator that it is about where it names one."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of the compiled program. ``op_name`` and ``source`` are empty where unknown."""

    name: str
    opcode: str
    cycles: int
    op_name: str
    source: str


@dataclass(frozen=True)
class Costs:
    """Flops and bytes are the compiler's count, cycles its static estimate.

    `bytes` counts what every operator reads and writes, much of it in the chip's own memory.
    `peak_bytes` includes arguments and results. `compile_cpu_seconds` are those of all threads.
    """

    compile_seconds: float
    compile_cpu_seconds: float
    cycles: int
    flops: int
    bytes: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    peak_bytes: int


def _import_jax() -> Any:
    _environment.prepare()
    try:
        import jax
        import libtpu  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "compiling for a TPU needs jax and libtpu: `pip install 'jax>=0.8' libtpu`"
        ) from error
    return jax


@cache
def _device(topology: str) -> Any:
    _import_jax()
    from jax.experimental import topologies

    name = _chips.topology_name(topology)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
    except Exception as error:
        raise ValueError(
            f"topology must be one of {_chips.ALLOWED}, got {topology!r}: {error}"
        ) from error


def check(topology: str) -> None:
    """Raise what `compile_stablehlo` would for the topology, before anything is traced."""
    _device(topology)


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_FRAME = re.compile(r"stack_frame_id=(\d+)")


def _table(text: str, title: str, row: str) -> dict[str, tuple[str, ...]]:
    """Rows of a table before the first computation: number to what the pattern's groups match."""
    _, _, body = text.partition(f"\n{title}\n")
    return {m[0]: m[1:] for m in re.findall(r"^(\d+) " + row, body.split("\n\n")[0], re.MULTILINE)}


def _frames(text: str) -> dict[str, str]:
    """The innermost line of each stack frame, file:line."""
    files = _table(text, "FileNames", r'"(.*)"')
    places = _table(text, "FileLocations", r"{file_name_id=(\d+).* line=(\d+)")
    frames = _table(text, "StackFrames", r"{file_location_id=(\d+)")
    return {
        frame: f"{files[places[place][0]][0]}:{places[place][1]}"
        for frame, (place,) in frames.items()
        if place in places
    }


def _instructions(text: str) -> list[Instruction]:
    frames = _frames(text)
    found = []
    for line in text.splitlines():
        cycles, name = _CYCLES.search(line), _NAME.search(line)
        if not cycles or not name:
            continue
        opcode = _OPCODE.search(line, name.end())
        op_name, source, frame = _OP_NAME.search(line), _SOURCE.search(line), _FRAME.search(line)
        where = f"{source[1]}:{source[2]}" if source else ""
        found.append(
            Instruction(
                name[1],
                opcode[1] if opcode else "",
                int(cycles[1]),
                op_name[1] if op_name else "",
                frames.get(frame[1], where) if frame else where,
            )
        )
    return found


def compile_stablehlo(stablehlo: str, topology: str) -> tuple[Costs, list[Instruction]]:
    """Compile StableHLO text for one device of the topology.

    Raises:
        ValueError: for an unknown topology.
        CompileError: where the compiler refuses the module.
        ImportError: without jax or libtpu.
    """
    device = _device(topology)
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    with jax_mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            executable = device.client.compile(
                module, xla_client.DeviceList((device,)), xla_client.CompileOptions()
            )
        except Exception as error:
            raise CompileError(str(error)) from error
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    analysis = executable.cost_analysis()
    memory = executable.get_compiled_memory_stats()
    instructions = _instructions(executable.hlo_modules()[0].to_string())
    costs = Costs(
        compile_seconds=seconds,
        compile_cpu_seconds=cpu_seconds,
        cycles=sum(i.cycles for i in instructions),
        flops=int(analysis.get("flops", 0)),
        bytes=int(analysis.get("bytes accessed", 0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
    )
    return costs, instructions
