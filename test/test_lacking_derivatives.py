"""Second derivatives that PyTorch lacks, on the CPU."""

import pytest
import torch
from torch.nn import functional as F

import torch_convfix


@pytest.fixture(autouse=True)
def on_cpu():
    with torch_convfix.enabled("cpu"):
        yield


def test_hardsigmoid():
    x = torch.linspace(-4, 4, 23, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(F.hardsigmoid, x)
