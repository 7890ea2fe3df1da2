"""Sweeps of torch_xla: what stock gets wrong is found, a death is lived through, ours is clean."""

import pytest

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
