"""The libraries of the zoo: the call that each is used for, on a small convolutional net."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPE, CLASSES = (3, 8, 8), 4


def make() -> nn.Module:
    """In-place activation before a pool, as most nets have it."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )


def _higher(net: nn.Module, x: Tensor, y: Tensor, v: list[Tensor]) -> Any:
    import higher

    slow = list(net.parameters())
    optimizer = torch.optim.SGD(slow, lr=0.1)
    with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False) as (fast, inner):
        inner.step(F.cross_entropy(fast(x), y))
        return torch.autograd.grad(F.cross_entropy(fast(x.flip(0)), y), slow)


def _torchopt(name: str, rate: float) -> Callable[..., Any]:
    def step(net: nn.Module, x: Tensor, y: Tensor, v: list[Tensor]) -> Any:
        import torchopt

        slow = list(net.parameters())
        inner = getattr(torchopt, name)(net, lr=rate)
        inner.step(F.cross_entropy(net(x), y))
        return torch.autograd.grad(F.cross_entropy(net(x.flip(0)), y), slow)

    return step


def _curvlinops(name: str, **options: Any) -> Callable[..., Any]:
    def step(net: nn.Module, x: Tensor, y: Tensor, v: list[Tensor]) -> Any:
        import curvlinops

        operator = getattr(curvlinops, name)(
            net.eval(), nn.CrossEntropyLoss(), list(net.parameters()), [(x.detach(), y)],
            check_deterministic=False, **options,
        )  # fmt: skip
        return operator @ v

    return step


def _backpack(net: nn.Module, x: Tensor, y: Tensor, v: list[Tensor]) -> Any:
    import backpack
    from backpack.extensions import BatchGrad, DiagGGNExact

    net[1].inplace = False  # backpack refuses activations in place
    net, loss = backpack.extend(net), backpack.extend(nn.CrossEntropyLoss())
    with backpack.backpack(BatchGrad(), DiagGGNExact()):
        loss(net(x), y).backward()
    return [t for p in net.parameters() for t in (p.grad_batch, p.diag_ggn_exact)]


def _learn2learn(net: nn.Module, x: Tensor, y: Tensor, v: list[Tensor]) -> Any:
    import learn2learn

    slow = list(net.parameters())
    learner = learn2learn.algorithms.MAML(net, lr=0.1, first_order=False).clone()
    learner.adapt(F.cross_entropy(learner(x), y))
    return torch.autograd.grad(F.cross_entropy(learner(x.flip(0)), y), slow)


def _hessian_eigenthings(net: nn.Module, x: Tensor, y: Tensor, v: list[Tensor]) -> Any:
    from hessian_eigenthings import HessianOperator, supervised_loss

    operator = HessianOperator(net, [(x.detach(), y)], supervised_loss(F.cross_entropy))
    return operator.matvec(torch.cat([t.flatten() for t in v]))


def _laplace(net: nn.Module, x: Tensor, y: Tensor, v: list[Tensor]) -> Any:
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    made = Laplace(net, "classification", subset_of_weights="all", hessian_structure="diag")
    made.fit(DataLoader(TensorDataset(x.detach(), y), batch_size=len(x)))
    return made.H


LIBRARIES: dict[str, Callable[..., Any]] = {
    "higher, innerloop_ctx": _higher,
    "torchopt, MetaSGD": _torchopt("MetaSGD", 0.1),
    "torchopt, MetaAdam": _torchopt("MetaAdam", 0.01),
    "curvlinops, Hessian": _curvlinops("HessianLinearOperator"),
    "curvlinops, GGN": _curvlinops("GGNLinearOperator"),
    "curvlinops, KFAC": _curvlinops("KFACLinearOperator", fisher_type="type-2"),
    "backpack, BatchGrad and DiagGGN": _backpack,
    "hessian-eigenthings": _hessian_eigenthings,
    "laplace-torch, diagonal": _laplace,
    "learn2learn, MAML": _learn2learn,
}
CALL = "call"


def installed() -> list[str]:
    """The libraries to take: learn2learn is not in the lock, for it does not build everywhere."""
    optional = [] if importlib.util.find_spec("learn2learn") else ["learn2learn, MAML"]
    return [name for name in LIBRARIES if name not in optional]


# What a library itself does not do on a device, by a part of what it says.
REFUSED = {
    ("curvlinops, KFAC", "xla"): "Found parameters in un-supported layers",
}


def inputs(net: nn.Module) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Images, labels and a direction in the parameters, at random."""
    x = torch.randn(4, *SHAPE).requires_grad_()
    return x, torch.arange(4) % CLASSES, [torch.randn_like(p) for p in net.parameters()]
