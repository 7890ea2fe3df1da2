"""The audit names the call that is to blame, and is silent about a right model."""

import device  # noqa: F401  (before any backward on the CPU)
import torch
from audited import WrongOnTheDevice, elu_critic, images, labels, maml, net, planted

from torch_convfix.verify.audit import audit


def names(report) -> set[str]:
    return {b.name.rsplit(".", 1)[-1] for b in report.blamed}


def test_finds_max_pool2d_in_maml_under_stock_torch_xla():
    report = audit(maml, net(), images(), labels(), device="xla", order=1, stock=True)
    assert "order 1" in report.outcome.wrong, str(report)
    assert names(report) == {"max_pool2d"}, str(report)
    assert audit(maml, net(), images(), labels(), device="xla", order=1).ok


def test_finds_elu_in_a_wgan_critic_under_stock_torch_xla():
    x = images().requires_grad_()
    report = audit(lambda critic, x: critic(x).mean(), elu_critic(), x, device="xla", stock=True)
    assert names(report) == {"elu"}, str(report)
    assert audit(lambda critic, x: critic(x).mean(), elu_critic(), x, device="xla").ok


def test_finds_a_custom_function_that_is_wrong_on_the_device():
    x = torch.rand(3, requires_grad=True)
    report = audit(planted(WrongOnTheDevice), x, device="xla", order=1)
    assert names(report) == {"WrongOnTheDevice"}, str(report)


