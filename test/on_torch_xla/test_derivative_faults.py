"""Each row of docs/derivative-faults.md for torch_xla: stock has the fault, ours has not."""

import dataclasses
import pathlib

import device  # before any backward on the CPU
import pytest
import torch
import torch.nn.functional as F

from torch_convfix.verify.compare import Outcome, compare
from torch_convfix.verify.derivatives import Call, all_stages
from torch_convfix.verify.devices import get_device, kernels
from torch_convfix.verify.spelling import tensor

LEDGER = pathlib.Path(__file__).parents[2] / "docs" / "derivative-faults.md"


@dataclasses.dataclass(frozen=True)
class Row:
    op: str  # as the ledger calls it
    first: str  # the first stage that stock gets wrong
    call: Call


def row(op: str, first: str, fn, *args, **kwargs) -> Row:
    return Row(op, first, Call(fn, args, kwargs))


ROWS = [
    row("max_pool2d", "order 2", F.max_pool2d, tensor(1, 1, 4, 4), 2),
    row("max_pool3d", "order 2", F.max_pool3d, tensor(1, 1, 4, 4, 4), 2),
    row("einsum", "order 2", torch.einsum, "ik,kj->ij", tensor(2, 3), tensor(3, 2, seed=1)),
    row("elu", "order 1", F.elu, tensor(2, 3)),
    row("celu", "order 1", F.celu, tensor(2, 3), 0.7),
    row("selu", "order 1", F.selu, tensor(2, 3, low=-3, high=0)),
    row("diag", "forward mode", torch.diag, tensor(3)),
    row("kl_div", "forward mode", F.kl_div, tensor(2), tensor(2, low=0.1, seed=1), reduction="sum"),
    row("std", "forward mode", torch.std, tensor(5), 0),
    row("avg_pool2d", "value", F.avg_pool2d, tensor(1, 1, 5, 5), 2, ceil_mode=True, divisor_override=3),
    row("avg_pool3d", "value", F.avg_pool3d, tensor(1, 1, 5, 5, 5), 2, ceil_mode=True, divisor_override=3),
    row("amax", "value", torch.amax, tensor(3)),
    row("amin", "value", torch.amin, tensor(3)),
    row("norm", "value", torch.norm, tensor(3), -float("inf")),
]


def outcome(call: Call, *, stock: bool) -> Outcome:
    with kernels("xla", stock=stock):
        return compare(call, get_device("xla"), all_stages(2), torch.float64)


@pytest.mark.parametrize("fault", ROWS, ids=lambda r: r.op)
def test_stock_has_the_fault(fault: Row):
    assert outcome(fault.call, stock=True).fault() == fault.first


@pytest.mark.parametrize("fault", ROWS, ids=lambda r: r.op)
def test_ours_has_not(fault: Row):
    ours = outcome(fault.call, stock=False)
    assert not ours.wrong
    assert {"value", "order 1", "order 2"} <= ours.errors.keys()
    assert fault.first in ours.errors


def test_the_ledger_has_each():
    listed = LEDGER.read_text()
    for fault in ROWS:
        assert f"| torch_xla 2.9.0 | {fault.op} |" in listed


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "stride": 1},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "ceil_mode": True},
        {"kernel_size": 2, "stride": 3, "ceil_mode": True},
        {"kernel_size": 2, "dilation": 3, "padding": 1},
    ],
    ids=str,
)
def test_max_pools_of_every_kind(fields: dict, ties: bool):
    x = tensor(2, 2, 7, 6)
    if ties:  # as after a relu
        x = x.detach().mul(2).round().clamp(0).requires_grad_()
    with kernels("xla", stock=False):
        result = compare(
            Call(F.max_pool2d, (x,), fields), get_device("xla"), all_stages(3), torch.float64
        )
    assert not result.wrong and not result.raised
    assert "order 3" in result.errors


def test_an_avg_pool_with_a_divisor_reaches_past_its_padding():
    call = Call(
        F.avg_pool2d, (tensor(1, 2, 5, 4), (3, 2), 2, 1), {"ceil_mode": True, "divisor_override": -5}
    )
    assert not outcome(call, stock=False).wrong


def test_an_avg_pool_with_a_divisor_is_not_taken_for_one_without():
    """Stock leaves the divisor out of the graph's hash; here the programs stay in the cache."""
    x = torch.rand(1, 1, 4, 4)
    with kernels("xla", stock=False):
        got = [F.avg_pool2d(x.to(device.DEVICE), 2, divisor_override=d).cpu() for d in (3, 7, None)]
    want = [F.avg_pool2d(x, 2, divisor_override=d) for d in (3, 7, None)]
    assert all(torch.allclose(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("activation", [F.elu, F.celu, F.selu])
def test_elu_and_its_kind_of_every_form(activation, inplace: bool):
    call = Call(lambda x: activation(x * 1, inplace=inplace), (tensor(2, 3),))
    assert not outcome(call, stock=False).wrong


@pytest.mark.parametrize("x", [-1e3, 1e3])
def test_elu_far_from_zero_has_finite_derivatives(x: float):
    far = torch.full((2,), x, dtype=torch.float64, requires_grad=True)
    assert not outcome(Call(F.elu, (far,)), stock=False).wrong


def test_what_ended_the_process():
    for call in (
        Call(torch.roll, (torch.empty(0, 2, dtype=torch.float64, requires_grad=True), 1, 0)),
        Call(F.nll_loss, (tensor(3), torch.tensor(0))),
    ):
        assert not outcome(call, stock=False).wrong
