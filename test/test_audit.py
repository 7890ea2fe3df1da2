"""The audit names the call that is to blame, and is silent about a right model."""

import pytest
import torch
from audited import Right, Wrong, images, labels, maml, net, planted
from torch import nn

from torch_convfix.verify.audit import audit


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


