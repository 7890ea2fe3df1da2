"""Export to StableHLO keeps an unknown size unknown, wherever stock does."""

import json
import os
import subprocess
import sys

import pytest
import stablehlo_exports

pytestmark = pytest.mark.xdist_group("stablehlo_export")  # one fixture


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    results = {}
    for kernels, enabled in (("ours", "1"), ("stock", "0")):
        path = tmp_path_factory.mktemp(kernels) / "results"
        environment = {"EXPERIMENTAL_XLA_UNBOUNDED_DYNAMISM": "1", "TORCH_CONVFIX": enabled}
        result = subprocess.run(
            [sys.executable, stablehlo_exports.__file__, str(path)],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=300,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        results[kernels] = json.loads(path.read_text())
    return results


WANT = {
    "conv2d, batch": ["?x4x5x6", 1],
    "conv2d, all": ["?x4x?x?", 1],
    "grouped, all": ["?x6x?x?", 1],
    "conv_transpose2d, batch": ["?x4x18x22", 1],
    "net, batch": ["?x4x5x7", 2],
    "conv1d, batch": ["?x4x7", 1],
    "conv3d, batch": ["?x4x2x3x4", 1],
}


@pytest.mark.slow
def test_unknown_sizes_stay_unknown(exports):
    assert {name: exports["ours"][name] for name in WANT} == WANT


@pytest.mark.slow
@pytest.mark.parametrize("name", stablehlo_exports.EXPORTS)
def test_as_stock(exports, name):
    ours, stock = exports["ours"][name], exports["stock"][name]
    assert isinstance(ours, list) or isinstance(stock, str)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(stablehlo_exports.EXPORTS) - set(WANT)))
def test_fails_with_and_without_ours(exports, name):
    for results in exports.values():
        assert "Error while lowering" in results[name]
