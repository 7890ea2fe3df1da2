"""Each row of docs/derivative-faults.md for TorchTPU, traced: stock has the fault, ours has not."""

import os
import pathlib
import subprocess
import sys

import pytest

# In a process of its own: tracing must begin before any backward on the CPU.
_CHECK = """
import torch
from torch_convfix.verify import check, tensor

def statistics(x, mean, variance):
    y = torch.nn.functional.batch_norm(x, mean, variance, training=True)
    return y, mean, variance

outcome = check({call}, device="tpu", stock={stock})
print("FAULT", outcome.fault(), list(outcome.errors))
"""
_LABELS = "torch.tensor([1, 0])"
ROWS = {
    "cross_entropy": ("order 2", f"'nn.functional.cross_entropy', tensor(2, 3), {_LABELS}"),
    "nll_loss": ("order 2", f"'nn.functional.nll_loss', tensor(2, 3), {_LABELS}, reduction='sum'"),
    "avg_pool1d": ("order 1", "'nn.functional.avg_pool1d', tensor(1, 2, 9), 3"),
    "celu": ("value", "'nn.functional.celu', tensor(2, 3), 0.7"),
    "embedding": (
        "order 2", f"lambda w, i: torch.nn.functional.embedding(i, w), tensor(3, 4), {_LABELS}"
    ),
    "batch_norm": ("value", "statistics, tensor(4, 3, 2), torch.zeros(3).double(), torch.ones(3).double()"),
    "grid_sample, the grid alone": (
        "order 1", "'nn.functional.grid_sample', tensor(1, 2, 4, 5).detach(), tensor(1, 3, 3, 2, seed=1)"
    ),
    "grid_sample": ("order 2", "'nn.functional.grid_sample', tensor(1, 2, 4, 5), tensor(1, 3, 3, 2, seed=1)"),
}  # fmt: skip
# Stock is wrong as soon as a point lies beyond the image: at order 1, and in the vmap of the gradient.
_REFLECTED = (
    "lambda x, g: torch.nn.functional.grid_sample(x, g * 3, padding_mode='reflection'), "
    "tensor(1, 2, 4, 5), tensor(1, 3, 3, 2, seed=1)"
)
LEDGER = pathlib.Path(__file__).parents[2] / "docs" / "derivative-faults.md"


def fault(call: str, *, stock: bool, compared: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _CHECK.format(call=call, stock=stock)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FAULT"))
    assert "order 2" in line.split("[")[1] or "accepts" in line or not compared
    return line.split("[")[0].removeprefix("FAULT").strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_stock_has_the_fault_and_ours_has_not(name: str):
    first, call = ROWS[name]
    assert fault(call, stock=True) == first
    assert fault(call, stock=False) == ""
    assert f"| torch_tpu 0.2.0 | {name} | {first} |" in LEDGER.read_text()


@pytest.mark.slow
def test_what_pytorch_refuses_is_refused():
    call = "'nn.functional.conv_transpose1d', tensor(1, 2, 5), tensor(2, 2, 3), output_padding=1"
    assert fault(call, stock=True) == "accepts what the CPU refuses"
    assert fault(call, stock=False, compared=False) == ""


@pytest.mark.slow
def test_reflected_points():
    assert fault(_REFLECTED, stock=True) == "order 1"
    assert fault(_REFLECTED, stock=False) == ""


@pytest.mark.slow
def test_the_audit_names_cross_entropy():
    script = (
        "import sys; sys.path.insert(0, 'test')\n"
        "from torch_convfix.verify.audit import audit\n"
        "from audited import maml_case\n"
        "report = audit(*maml_case(), device='tpu', order=1, stock={stock})\n"
        "print('BLAMED', sorted({{b.name.rsplit('.', 1)[-1] for b in report.blamed}}), report.ok)\n"
    )
    for stock, expected in ((True, "BLAMED ['cross_entropy'] False"), (False, "BLAMED [] True")):
        done = subprocess.run(
            [sys.executable, "-c", script.format(stock=stock)], capture_output=True, text=True,
            cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
        )  # fmt: skip
        assert expected in done.stdout, done.stdout + done.stderr
