"""The audit names the call that is to blame, and is silent about a right model."""

import itertools
import math

import pytest
import torch
import wrong_kernels
from audited import (
    Right,
    Wrong,
    WrongInSingle,
    images,
    in_place_net,
    labels,
    maml,
    net,
    normal,
    penalty,
    planted,
    product,
    written_net,
)
from torch import nn

from torch_convfix._as_function import as_function
from torch_convfix.verify.audit import audit
from torch_convfix.verify.calls import Recorder
from torch_convfix.verify.cut import first_wrong
from torch_convfix.verify.derivatives import Program
from torch_convfix.verify.differences import TOLERANCE, error_of_order


@pytest.mark.parametrize("function", [Wrong, Right])
def test_finds_a_custom_function_that_is_wrong_everywhere(function):
    report = audit(planted(function), torch.rand(3, requires_grad=True), device="cpu", order=1)
    assert [b.name for b in report.blamed] == (["Wrong"] if function is Wrong else [])
    assert report.ok == (function is Right)
    if function is Wrong:
        assert "audited.py" in report.blamed[0].where


def test_a_right_model_is_clean_on_the_cpu():
    report = audit(maml, net(), images(), labels(), device="cpu")
    assert report.ok, str(report)
    assert list(report.outcome.errors) == ["value", "order 1", "order 2"]


def test_inner_modules_keep_their_buffers():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    before = model[1].running_mean.clone()
    report = audit(lambda m, x: m(x).pow(3).sum(), model, images(), device="cpu")
    assert report.ok, str(report)
    assert torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize("make", [in_place_net, written_net])
def test_finds_what_is_wrong_only_after_a_write_in_place(make):
    with wrong_kernels.wrong_after_a_write():
        report = audit(penalty, make(), images(), device="cpu")
    (blame,) = report.blamed
    assert blame.name == "torch.nn.functional.max_pool2d" and not blame.alone, str(report)
    assert blame.where.split(":")[0].endswith("audited.py")
    writer = "torch.nn.functional.relu" if make is in_place_net else "torch.Tensor.__setitem__"
    (feed,) = blame.feeds
    assert feed.startswith(f"{writer} at ") and feed.endswith(", in place"), feed
    assert audit(penalty, make(), images(), device="cpu").ok


def bisected(wrong):
    """What bisection finds among calls that are wrong or not, and how many it asked about."""
    asked = []

    def is_wrong(i):
        asked.append(i)
        return wrong[i]

    return first_wrong(range(len(wrong)), is_wrong), len(asked)


def test_bisection_ends_between_right_and_wrong():
    for size in range(1, 20):
        for first in range(size + 1):
            found, asked = bisected([i >= first for i in range(size)])
            assert found == (first if first < size else None)
            assert asked <= math.ceil(math.log2(size + 1))


def test_bisection_ends_between_right_and_wrong_where_a_later_call_repairs():
    for wrong in itertools.product([False, True], repeat=8):
        found, _ = bisected(wrong)
        if found is None:
            assert not wrong[-1]
        else:
            assert wrong[found] and (found == 0 or not wrong[found - 1])


def differentiates(how):
    def loss(w, x):
        x = how(x)
        return (WrongInSingle.apply(x) * w).sum()

    return loss


@pytest.mark.parametrize(
    "how",
    [
        lambda x: x.requires_grad_(),
        lambda x: x.detach().requires_grad_(),
        lambda x: x.clone().requires_grad_(True),
        lambda x: (x * 2 + 1).requires_grad_(),
    ],
)
def test_what_the_target_makes_differentiable_is_an_input(how):
    w, x = normal(3).requires_grad_(), normal(3)
    report = audit(differentiates(how), w, x, device="cpu", order=1)
    assert report.outside == 0 and list(report.outcome.wrong) == ["order 1"], str(report)
    assert "leaf 0" in report.outcome.wrong["order 1"]
    assert [b.name for b in report.blamed] == ["WrongInSingle"]


def test_transforms_are_audited_and_right_on_the_cpu():
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    assert audit(product, normal(5, 4), normal(5, 4), normal(6, 5), y, device="cpu").ok
    assert audit(penalty, net(), images(), device="cpu").ok


def test_the_orders_that_a_target_takes_itself_are_those_of_a_chain():
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)

    def count(fn):
        recorder = Recorder()
        function, tensors = as_function(fn, [x])
        with recorder.watching():
            function(tensors)
        return [recorder.differentiated_after(call) for call in recorder.calls]

    def apart(x):
        for _ in range(3):
            (g,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        return g

    def nested(x):
        y = x.pow(3).sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = g.sum()
        return y

    assert count(apart) == [1] * 6
    assert count(nested) == [2, 2, 1, 0]


def test_random_targets_are_told_which_call_draws():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    report = audit(model, torch.rand(2, 3), device="cpu")
    assert not report.ok and "random, by torch.nn.functional.dropout at " in str(report)


def hardsigmoid(model, x):
    return nn.functional.hardsigmoid(model(x)).square().sum()


def test_what_pytorch_lacks_is_compared_with_ours_and_that_with_differences():
    x = torch.rand(2, 3)
    torch.manual_seed(0)
    report = audit(hardsigmoid, nn.Linear(3, 4), x, device="cpu", stock=True)
    assert not report.ok and "enable('cpu')" in report.outcome.refused["order 2"], str(report)
    report = audit(hardsigmoid, nn.Linear(3, 4), x, device="cpu")
    assert report.ok, str(report)
    error, refusal = report.ours["order 2"]
    assert error < 1e-6 and "hardsigmoid" in refusal and "order 1" not in report.ours


def test_differences_refute_a_wrong_reference():
    x = normal(3).double().requires_grad_()
    assert error_of_order(Program(Wrong.apply, (x,), {}), 1) > TOLERANCE
    right = Program(torch.sin, (x,), {})
    assert max(error_of_order(right, order) for order in (1, 2, 3)) < 1e-6


@pytest.mark.parametrize("fn", [lambda x: x.argmax(), lambda x: x.detach() * 2])
def test_refuses_what_cannot_be_differentiated(fn):
    with pytest.raises(ValueError, match="fn must return something that can be differentiated"):
        audit(fn, torch.rand(3), device="cpu")
