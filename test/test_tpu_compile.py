"""Compile for TPUs that are not there, on whichever stack is installed."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import penalty_step

pytest.importorskip("jax")
pytest.importorskip("libtpu")

from torch_convfix import tpu
from torch_convfix.commands import cli
from torch_convfix.tpu import _chips, _compiler, _job, _step

try:
    STACK = _step.default_stack()
except ImportError:
    pytest.skip("neither torch_xla nor torch_tpu is installed", allow_module_level=True)

GROUPS = 6
SIZES = ((2, GROUPS, 9, 9), (GROUPS, 1, 3, 3))


def penalty(x, w):
    y = torch.nn.functional.conv2d(x, w, stride=2, padding=1, groups=GROUPS)
    grads = torch.autograd.grad(torch.tanh(y).mean(), [w, x], create_graph=True)
    return torch.autograd.grad(sum((g * g).sum() for g in grads), [w, x])


def with_inputs():
    return penalty, [torch.rand(s, requires_grad=True) for s in SIZES]


STEP = f"{__file__}:with_inputs"


def job(step: str = STEP, topology: str = "v5e", kernels: str = "ours") -> _job.Job:
    return _job.Job(step, (), topology, STACK, kernels)


def test_report_and_its_repetition():
    step, inputs = with_inputs()
    first = tpu.compile(step, *inputs, stack=STACK)
    again = tpu.compile(step, *inputs, stack=STACK)
    assert first.convolutions == 9
    assert first.cycles > 0 and first.cycles == again.cycles
    assert sum(o.cycles for o in first.operators) == first.cycles
    assert first.flops > 0
    # The inputs in, the same shapes out; layouts only pad.
    assert first.argument_bytes >= 4 * sum(t.numel() for t in inputs)
    assert first.peak_bytes >= first.argument_bytes
    stock = tpu.compile(step, *inputs, stack=STACK, kernels="stock")
    assert stock.convolutions == 8 + GROUPS  # the loop over groups
    assert stock.cycles > first.cycles


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v2", "v4", "v5e", "v6e"])
@pytest.mark.parametrize("kernel", [3, 4])
def test_the_penalty_of_the_first_report_compiles_for_every_tpu(kernel, topology):
    step = penalty_step({"stride": 2, "padding": 1})
    inputs = [torch.rand(32, 3, 32, 32), torch.rand(20, 3, kernel, kernel)]
    report = tpu.compile(step, *[t.requires_grad_() for t in inputs], topology=topology)
    assert report.convolutions == 9 and report.cycles > 0


def test_jax_function():
    import jax
    import jax.numpy as jnp

    report = tpu.compile(jax.grad(lambda x: jnp.sin(x @ x).sum()), torch.zeros(8, 8), stack="jax")
    assert report.cycles > 0 and report.convolutions == 0


def test_refusals():
    step, inputs = with_inputs()
    with pytest.raises(ValueError, match=r"topology must be one of v2, .*, got 'v9'"):
        tpu.compile(step, *inputs, topology="v9")
    with pytest.raises(ValueError, match="kernels must be one of ours, merged, stock, got 'x'"):
        tpu.compile(step, *inputs, kernels="x")


def test_compiler_message():
    huge = f"tensor<{2**17}x{2**17}xf32>"
    text = f"func.func @main(%a: {huge}) -> {huge} {{ %0 = stablehlo.tanh %a : {huge} return %0 : {huge} }}"
    with pytest.raises(tpu.CompileError, match="Ran out of memory on HBM"):
        _compiler.compile_stablehlo(text.replace("} }", "} }"), "v5e")


@pytest.mark.slow
def test_origins_in_a_process_of_its_own():
    report = _job.run(job())
    assert isinstance(report, tpu.Report), report
    stages = {o.stage for o in report.operators}
    assert {"forward", "backward", "double backward"} <= stages
    line = penalty.__code__.co_firstlineno + 1
    heaviest = report.operators[0]
    assert "convolution" in heaviest.name and heaviest.source == f"{__file__}:{line}"


def no_function():
    raise ValueError("as it must")


def endless():
    while True:
        pass


def dies():
    os.abort()


def greedy():
    held = bytearray(2**30)
    held[::4096] = b"x" * len(held[::4096])
    endless()


@pytest.mark.parametrize(
    ("function", "limits", "reason"),
    [
        pytest.param("no_function", {}, "as it must", marks=pytest.mark.slow),
        pytest.param("missing", {}, "target must name a function", marks=pytest.mark.slow),
        pytest.param("dies", {}, "ended with signal SIGABRT", marks=pytest.mark.slow),
        pytest.param("endless", {"limit": 1.0}, "within the limit of 1 s", marks=pytest.mark.slow),
        pytest.param("endless", {"cpu_limit": 9.0}, "limit of 9 CPU s", marks=pytest.mark.slow),
        pytest.param(
            "greedy", {"memory": 2**30}, "stopped at the limit of 1 GiB", marks=pytest.mark.slow
        ),
    ],
)
def test_failures_are_reported(function, limits, reason):
    failure = _job.run(job(f"{__file__}:{function}"), **limits)
    assert reason in failure.reason


@pytest.mark.slow
def test_two_processes_at_once():
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(_job.run, [job(), job()])
    assert first.cycles == second.cycles > 0


@pytest.mark.slow
def test_every_friendly_name():
    for name in _chips.CHIPS:
        text = "func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> { return %a : tensor<8xf32> }"
        assert _compiler.compile_stablehlo(text, name)[0].compile_seconds > 0


@pytest.mark.slow
def test_command(capsys, tmp_path, monkeypatch):
    page = tmp_path / "report.html"
    assert cli.main(["tpu", STEP, "--compare", "--json", "-", "--html", str(page)]) == 0
    stock, ours = json.loads(capsys.readouterr().out)
    assert (stock["kernels"], ours["kernels"]) == ("stock", "ours")
    assert (stock["convolutions"], ours["convolutions"]) == (8 + GROUPS, 9)
    assert "double backward" in page.read_text()

    monkeypatch.chdir(Path(__file__).parent)
    inputs = [part for s in SIZES for part in ("--input", "x".join(map(str, s)))]
    assert cli.main(["tpu", "test_tpu_compile:penalty", *inputs, "--topology", "v2,v9:2x2"]) == 1
    printed = capsys.readouterr().out
    assert "double backward" in printed
    assert "topology must be one of" in printed


@pytest.mark.slow
def test_without_jax(tmp_path):
    """One sentence with the command that mends it."""
    (tmp_path / "jax.py").write_text("raise ImportError('no jax')")
    code = "from torch_convfix.tpu import _compiler; _compiler.check('v5e')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_CONVFIX": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stderr.strip().splitlines()[-1] == (
        "ImportError: compiling for a TPU needs jax and libtpu: `pip install 'jax>=0.8' libtpu`"
    )
