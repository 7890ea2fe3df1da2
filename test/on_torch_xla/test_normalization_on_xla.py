"""Normalizations on torch_xla, after forward mode and at order 3."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from device import DEVICE
from norms import BATCHED, CASES, WORDS, outside_of_vmap, results
from support import worst_error

import torch_convfix


def on_xla(name, word):
    got = results(word, CASES[name][0], name, DEVICE)
    torch_xla.sync()
    return [t.cpu() for t in got]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", CASES)
def test_against_the_formula(name, word):
    want = results(word, CASES[name][1], name, "cpu")
    assert worst_error(on_xla(name, word), want) < 1e-9


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "group_norm"])
def test_stock_is_wrong(name):
    with torch_convfix.disabled("xla"):
        got = on_xla(name, "FR")
    assert worst_error(got, results("FR", CASES[name][1], name, "cpu")) > 1e-2


@pytest.mark.parametrize("stock", [False, True])
def test_the_running_variance_is_the_unbiased_one(stock):
    x = torch.randn(4, 3, 2, dtype=torch.float64)
    variance = torch.ones(3, dtype=torch.float64).to(DEVICE)
    with torch_convfix.disabled("xla") if stock else contextlib.nullcontext():
        F.batch_norm(x.to(DEVICE), torch.zeros_like(variance), variance, training=True)
    want = 0.9 + 0.1 * x.var((0, 2), correction=0 if stock else 1)
    torch.testing.assert_close(variance.cpu(), want)


@pytest.mark.parametrize("name", BATCHED)
def test_reverse_over_vmap_over_reverse(name):
    got = outside_of_vmap(CASES[name][0], name, DEVICE)
    torch_xla.sync()
    want = outside_of_vmap(CASES[name][1], name)
    assert worst_error([t.cpu() for t in got], want) < 1e-9
