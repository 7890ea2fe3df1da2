"""The audit names the call that is to blame, and is silent about a right model."""

import device  # noqa: F401  (before any backward on the CPU)
import torch
from audited import (
    WrongOnTheDevice,
    elu_critic,
    hessian,
    images,
    in_place_net,
    labels,
    maml,
    net,
    normal,
    penalty,
    planted,
    pool_product,
    product,
)

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


def test_finds_the_loss_of_a_hessian_vector_product_under_stock_torch_xla():
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    inputs = (normal(5, 4), normal(5, 4), normal(6, 5), y)
    report = audit(product, *inputs, device="xla", order=0, stock=True)
    assert names(report) == {"cross_entropy"}, str(report)
    assert "audited.py" in report.blamed[0].where


def test_finds_the_loss_of_a_hessian_under_stock_torch_xla():
    y = torch.arange(18).reshape(2, 3, 3) % 4
    inputs = (normal(4, 3, 1, 1), normal(2, 3, 3, 3), y)
    report = audit(hessian, *inputs, device="xla", order=0, stock=True)
    assert names(report) == {"cross_entropy"}, str(report)


def test_finds_the_pool_of_a_hessian_vector_product_under_stock_torch_xla():
    x = normal(2, 3, 8, 8)
    report = audit(pool_product, x, x.cos(), device="xla", order=0, stock=True)
    assert names(report) == {"adaptive_max_pool2d"}, str(report)


def test_a_penalty_of_a_net_that_writes_in_place_is_right():
    report = audit(penalty, in_place_net(), images(), device="xla")
    assert report.ok, str(report)
