"""Sweeps of torch_xla: what stock gets wrong is found, a death is lived through, ours is clean."""

import pytest
import torch

from torch_convfix.verify import check, tensor
from torch_convfix.verify.findings import Kind
from torch_convfix.verify.sweep import run


@pytest.mark.slow
def test_stock_faults_are_found_and_the_death_is_one_of_them():
    report = run("xla", cases=0, only="nn.functional.conv*2d", stock=True, jobs=1)
    found = {(f.op, f.kind) for f in report.faults}
    assert ("nn.functional.conv_transpose2d", Kind.CRASH) in found
    assert ("nn.functional.conv2d", Kind.ACCEPTS) in found  # two dtypes
    assert report.environment.graph_hash_fault


@pytest.mark.slow
def test_ours_is_clean():
    report = run("xla", cases=4, only="nn.functional.*pool2d", jobs=1)
    assert report.ok, str(report)
    assert report.compared > 40
    assert not report.environment.graph_hash_fault


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("cross_entropy", (tensor(3, 4), torch.tensor([0, 1, 3]))),
        ("adaptive_max_pool1d", (tensor(1, 2, 6), 2)),
        ("adaptive_max_pool2d", (tensor(1, 2, 4, 4), 2)),
    ],
)
def test_what_stock_has_wrong_in_forward_over_reverse_alone(op, args):
    outcome = check(f"nn.functional.{op}", *args, stock=True)
    assert {"forward over reverse", "Hessian"} <= {*outcome.wrong}
    assert "order 2" in outcome.errors and not [s for s in outcome.wrong if s.startswith("order")]
