"""cross_entropy and nll_loss on TorchTPU, all arguments, to the third derivative in float64 terms."""

import itertools

import pytest
import torch
from placeholders import on_tpu
from support import worst_error
from torch.nn import functional as F

N, C = 4, 5
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.0, 1.5])


def labels(*shape: int) -> torch.Tensor:
    return torch.randint(0, C, shape, generator=torch.Generator().manual_seed(1))


def derivatives(loss, x, order):
    """Value and derivatives, each of the sum of squares of the last."""
    last, results = [loss(x)], []
    results.append(last[0])
    for i in range(order):
        last = torch.autograd.grad(sum((t * t).sum() for t in last), x, create_graph=i + 1 < order)
        results += last
    return results


def check(loss, x, *targets):
    def step(x, *rest):
        return derivatives(lambda x: loss(x, *rest), x, 3)

    exact = [t.double() if t.is_floating_point() else t for t in targets]
    want = step(x.detach().double().requires_grad_(), *exact)
    got = on_tpu(step, x.detach().requires_grad_(), *targets)
    assert worst_error(got, want) < 1e-4


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("spatial", [(), (3,), (2, 3)])
def test_class_indices(name, spatial, reduction):
    function = getattr(F, name)
    x = torch.randn(N, C, *spatial, generator=torch.Generator().manual_seed(0))
    target = labels(N, *spatial)
    smoothings = [0.0, 0.2] if name == "cross_entropy" else [None]

    def loss(x, target, weight):
        total = 0
        for w, ignored, smoothing in itertools.product([None, weight], [-100, 1], smoothings):
            extra = {} if smoothing is None else {"label_smoothing": smoothing}
            value = function(x, target, w, ignore_index=ignored, reduction=reduction, **extra)
            total = total + value
        return torch.sin(total * 0.1)

    check(loss, x, target, WEIGHT)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_probabilities(reduction):
    x = torch.randn(N, C, 2, generator=torch.Generator().manual_seed(0))
    target = torch.rand(N, C, 2, generator=torch.Generator().manual_seed(1)).softmax(1)

    def loss(x, target, weight):
        values = [
            F.cross_entropy(x, target, w, reduction=reduction, label_smoothing=smoothing)
            for w, smoothing in itertools.product([None, weight], [0.0, 0.2])
        ]
        return torch.sin(sum(v * (i + 1) for i, v in enumerate(values)) * 0.1)

    check(loss, x, target, WEIGHT)


def test_one_sample_without_a_batch():
    x = torch.randn(C, generator=torch.Generator().manual_seed(0))
    check(lambda x, y: torch.tanh(F.cross_entropy(x, y)), x, torch.tensor(2))
    check(lambda x, y: torch.tanh(F.nll_loss(x, y)), x, torch.tensor(2))
