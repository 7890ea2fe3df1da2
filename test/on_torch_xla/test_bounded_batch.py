"""A batch whose size only the device knows (XLA_EXPERIMENTAL=nonzero), to the second order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import bounded_batch
import pytest
import torch
from support import worst_error

import torch_convfix

pytestmark = pytest.mark.xdist_group("bounded_batch")  # its fixtures are a minute of compiling


def run(path: Path, *names: str, stock: bool = False) -> dict:
    # Every size asked for is a program, so few kept ones would be compiled again and again.
    cache = {"XLA_COMPILATION_CACHE_SIZE": "1024"}
    environment = {**os.environ, **cache, "XLA_EXPERIMENTAL": "nonzero"}
    if stock:
        environment["TORCH_CONVFIX"] = "0"
    result = subprocess.run(
        [sys.executable, bounded_batch.__file__, str(path), *names],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    return torch.load(path)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ours") / "results")


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    names = [
        "conv2d",
        "mean, var",
        *bounded_batch.LIMITS,
        *bounded_batch.WRONG,
        "dividing by the size",
    ]
    return run(tmp_path_factory.mktemp("stock") / "results", *names, stock=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*bounded_batch.STEPS, *bounded_batch.WRONG])
def test_as_on_the_cpu(ours, name):
    assert not isinstance(ours[name], str), ours[name]
    got, want = ours[name]
    tolerance = 1e-4 if got[0].dtype == torch.float32 else 1e-6
    assert worst_error(got, want) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", bounded_batch.LIMITS)
def test_fails_with_and_without_ours(ours, stock, name):
    _, message = bounded_batch.LIMITS[name]
    for results in (ours, stock):
        assert isinstance(results[name], str), "it works: say so in docs/dynamic-shapes.md"
        assert re.search(message, results[name]), results[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv2d", "mean, var"])
def test_stock_refuses(stock, name):
    assert isinstance(stock[name], str)


@pytest.mark.slow
@pytest.mark.parametrize("name", bounded_batch.WRONG)
def test_stock_is_wrong(stock, name):
    assert worst_error(*stock[name]) > 1e-2


@pytest.mark.slow
def test_dividing_by_the_size_is_wrong_with_and_without_ours(ours, stock):
    for results in (ours, stock):
        assert worst_error(*results["dividing by the size"]) > 1e-2


def test_only_where_asked_for():
    names = {r.operator for r in torch_convfix.status().registrations if r.device == "xla"}
    assert {"convolution", "convolution_backward"} <= names
    assert "expand" not in names
    with torch_convfix.enabled("xla", dynamic=True):
        registrations = torch_convfix.status().registrations
    assert "expand" in {r.operator for r in registrations}
    assert torch_convfix.status().options["xla"]["dynamic"] is False
