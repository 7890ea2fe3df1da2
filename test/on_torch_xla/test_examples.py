"""Every example that checks its own result does so, in a process of its own; `--stock` fails the check."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
CHECKED = ["maml", "wgan_gp", "weight_gradient_penalty", "sharpness", "r1_resnet"]
# Whose derivatives stock torch_xla gets wrong.
WRONG_IN_STOCK = ["maml", "sharpness"]


def run(name: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # LLVM's optimizations take most of the time, and change no derivative.
    env = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--quick", "--out", out, *options],
        capture_output=True, text=True, env=env,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_its_checks_hold_and_it_leaves_a_plot(name: str, tmp_path: Path):
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds" in done.stdout
    assert list(tmp_path.glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_IN_STOCK)
def test_stock_fails_them(name: str, tmp_path: Path):
    done = run(name, tmp_path, "--stock")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong" in done.stdout
