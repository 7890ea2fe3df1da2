"""Second derivatives that PyTorch lacks, on XLA: against formulas written out, on the CPU."""

import pytest
import torch
from device import on_xla
from lacking import OPERATORS
from support import derivatives, worst_error
from torch import Tensor

from torch_convfix import disabled


# torch_xla refuses points of other ranks.
@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - {"cdist of broadcast batches"}))
def test_orders(name):
    operator = OPERATORS[name]
    order = 3 if name == "hardsigmoid" else 2
    got = on_xla(lambda *inputs: derivatives(operator.call, inputs, order), *operator.inputs)
    want = derivatives(operator.formula, operator.inputs, order)
    # hardsigmoid's own gradient takes 1 / 6 in float32
    assert worst_error(got, want) < 3e-8


@pytest.mark.parametrize(
    "name", ["hardsigmoid", "cdist 1.5", "pdist 2.0", "segment_reduce prod lengths"]
)
def test_first_derivative_is_stock(name):
    operator = OPERATORS[name]

    def first(*inputs: Tensor) -> list[Tensor]:
        return derivatives(operator.call, inputs, 1)

    got = on_xla(first, *operator.inputs)
    with disabled("xla"):
        want = on_xla(first, *operator.inputs)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
