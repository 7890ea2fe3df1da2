"""Sharpness along training: the top eigenvalue of the loss's Hessian, by Lanczos, for a depthwise net.

    python examples/sharpness.py [--device cpu|xla] [--stock] [--quick]

Gradient descent with step size h raises the top eigenvalue to 2 / h, and the loss rises where it passes that
(Cohen et al., 2021, arXiv:2103.00065). Lanczos needs nothing of the Hessian but its products with vectors, the
derivative of the gradient. Checks the product against float64 on the CPU, and Lanczos' eigenvalue against the whole Hessian
in float64 on the CPU, taken by forward over reverse mode, at the start and at the end.
"""

import time

import harness
import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn import functional as F

import torch_convfix

IMAGES, STEPS, EVERY, RATE, LANCZOS = 256, 200, 10, 0.3, 16


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.MaxPool2d(2),
        nn.Tanh(),
        nn.Conv2d(8, 16, 1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def unflatten(net: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    named = dict(net.named_parameters())
    parts = flat.split([p.numel() for p in named.values()])
    return {n: part.view_as(p) for (n, p), part in zip(named.items(), parts, strict=True)}


def loss_of(net: nn.Module, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy with the parameters ``flat``, a vector."""
    return F.cross_entropy(functional_call(net, unflatten(net, flat), (x,)), y)


def hessian_product(net, flat: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
    flat = flat.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(net, flat, x, y), flat, create_graph=True)
    return torch.autograd.grad(gradient, flat, v)[0]


def top_eigenvalue(net, flat: Tensor, start: Tensor, x: Tensor, y: Tensor, count: int) -> float:
    """The largest eigenvalue by ``count`` Lanczos steps, each one run of the same graph.

    What is small is computed on the CPU in float64: the basis is made orthogonal again in every step.
    """
    basis = [start.double() / start.double().norm()]
    products = []
    for _ in range(count):
        product = hessian_product(net, flat, basis[-1].float().to(flat.device), x, y)
        harness.sync(flat.device)
        products.append(product.cpu().double())
        q = torch.stack(basis)
        rest = products[-1]
        for _ in range(2):  # once more, for what rounding left
            rest = rest - q.T @ (q @ rest)
        if rest.norm() < 1e-6:
            break
        basis.append(rest / rest.norm())
    q = torch.stack(basis[: len(products)])
    projected = q @ torch.stack(products).T
    return torch.linalg.eigvalsh((projected + projected.T) / 2)[-1].item()


def whole_hessian_top(net, flat: Tensor, x: Tensor, y: Tensor) -> float:
    """By the Hessian itself, in float64 on the CPU with PyTorch's own derivatives."""
    with torch_convfix.disabled("cpu"):
        x, y, flat = x.cpu().double(), y.cpu(), flat.detach().cpu().double()
        h = hessian(lambda flat: loss_of(net, flat, x, y))(flat)
    return torch.linalg.eigvalsh((h + h.T) / 2)[-1].item()


def draw(losses: list[float], tops: list[tuple[int, float]], exact, path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(losses)
    left.set(xlabel="step", ylabel="cross entropy", title="Loss")
    right.plot(*zip(*tops, strict=True), marker="o", markersize=4, label="Lanczos")
    if exact:
        right.plot(*zip(*exact, strict=True), "x", color="black", label="whole Hessian, float64")
    right.axhline(2 / RATE, color="gray", linestyle=":", label="2 / step size")
    right.set(xlabel="step", title="Top eigenvalue of the Hessian", ylim=(0, None))
    right.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> int:
    args = harness.options(__doc__, "sharpness").parse_args()
    device = harness.start(args)
    digits = load_digits()
    x = torch.from_numpy(digits.images[:IMAGES]).float().unsqueeze(1) / 16
    y = torch.from_numpy(digits.target[:IMAGES])
    net = make_net()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    start = torch.randn(len(flat))
    error = harness.gradient_error(
        lambda flat, v, x, y: [hessian_product(net, flat, v, x, y)], [flat, start, x, y], device
    )
    checks = {f"the Hessian-vector product is {harness.right(error)}": error < 1e-6}
    x, y, flat = x.to(device), y.to(device), flat.to(device)
    steps, every = (4, 2) if args.quick else (STEPS, EVERY)
    losses: list[float] = []
    tops: list[tuple[int, float]] = []
    exact: list[tuple[int, float]] = []
    begin = time.perf_counter()
    for step in track(range(steps + 1), "gradient descent", console=harness.console):
        if step % every == 0:
            count = 4 if args.quick else LANCZOS
            tops.append((step, top_eigenvalue(net, flat, start, x, y, count)))
        if step in (0, steps) and not args.quick:
            exact.append((step, whole_hessian_top(net, flat, x, y)))
        own = flat.detach().requires_grad_()
        loss = loss_of(net, own, x, y)
        (gradient,) = torch.autograd.grad(loss, own)
        flat = (own - RATE * gradient).detach()
        harness.sync(device)
        losses.append(loss.detach().cpu().item())
    harness.console.print(
        f"{steps} steps of gradient descent, {len(tops)} eigenvalues of {flat.numel()} parameters on "
        f"{device}: {time.perf_counter() - begin:.0f} s; loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )
    draw(losses, tops, exact, args.out / "sharpness.png")
    if not args.quick:
        for (step, want), (_, got) in zip(exact, (tops[0], tops[-1]), strict=True):
            claim = f"at step {step} Lanczos finds {got:.4f}, the whole Hessian has {want:.4f}"
            checks[claim] = abs(got - want) < 1e-3 * abs(want)
        limit = 2 / RATE
        passed = [step for step, top in tops if top > limit]
        rises = [step for step in range(1, len(losses)) if losses[step] > losses[step - 1]]
        where = f"at step {passed[0]}" if passed else "nowhere"
        claim = f"the top eigenvalue passes 2 / {RATE:g} = {limit:.2f} {where}"
        checks[claim] = bool(passed)
        claim = f"from there on, and no sooner, the loss rises: at steps {rises}"
        checks[claim] = bool(passed and rises) and rises[0] > passed[0] - EVERY
        checks[f"the eigenvalue falls below again ({tops[-1][1]:.2f})"] = tops[-1][1] < limit
    return harness.verdict(checks)


if __name__ == "__main__":
    raise SystemExit(main())
