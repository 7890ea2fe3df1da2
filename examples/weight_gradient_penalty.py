"""A penalty on the gradient with respect to the weights: the case that began this project, in training.

    python examples/weight_gradient_penalty.py [--device cpu|xla] [--stock] [--quick]

Adds the squared norm of the loss's weight gradient, which prefers flat minima (Barrett and Dherin, 2021,
arXiv:2009.11162). Its backward differentiates a weight gradient. Checks that gradient against
float64 on the CPU, and that the penalty lowers the largest gradient norm in training.
"""

import time

import harness
import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

BATCH, HELD_OUT, PENALTY = 128, 297, 1.0


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 3, stride=2, padding=1),  # the geometry of the report that began it
        nn.Tanh(),
        nn.Conv2d(20, 20, 3, padding=1, groups=4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(320, 10),
    )


def loss_and_norm(net, parameters, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy, and the squared norm of its gradient with respect to ``parameters``."""
    loss = F.cross_entropy(net(x), y)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    return loss, sum(g.square().sum() for g in gradients)


def penalty_step(x: Tensor, y: Tensor):
    """The gradient of loss and penalty as a function of tensors, and these."""
    net = make_net()
    names, values = zip(*net.named_parameters(), strict=True)

    def step(x, y, *parameters):
        own = dict(zip(names, parameters, strict=True))
        loss, norm = loss_and_norm(lambda x: functional_call(net, own, x), parameters, x, y)
        return [loss, norm, *torch.autograd.grad(loss + PENALTY * norm, parameters)]

    return step, [x, y, *values]


def train(x: Tensor, y: Tensor, penalty: float, epochs: int, device: torch.device):
    """The net, and its loss and squared gradient norm step by step."""
    torch.manual_seed(0)
    net = make_net().to(device)
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses, norms = [], []
    for _ in track(range(epochs), f"penalty {penalty:g}", console=harness.console):
        order = torch.randperm(len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            loss, norm = loss_and_norm(net, parameters, x[chosen].to(device), y[chosen].to(device))
            optimizer.zero_grad()
            (loss + penalty * norm).backward()
            optimizer.step()
            harness.sync(device)
            losses.append(loss.detach().cpu().item())
            norms.append(norm.detach().cpu().item())
    return net, losses, norms


def draw(curves, path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, (losses, norms) in curves.items():
        left.plot(losses, label=name)
        right.semilogy(norms, label=name)
    left.set(xlabel="step", title="Cross entropy")
    right.set(xlabel="step", title="Squared norm of its weight gradient")
    left.legend()
    right.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    args = harness.options(__doc__, "weight_gradient_penalty").parse_args()
    device = harness.start(args)
    digits = load_digits()
    order = torch.randperm(len(digits.images))
    x = (torch.from_numpy(digits.images).float().unsqueeze(1) / 16)[order]
    y = torch.from_numpy(digits.target)[order]
    error = harness.gradient_error(*penalty_step(x[:8], y[:8]), device)
    checks = {f"the penalty's gradient is {harness.right(error)}": error < 1e-6}
    curves, accuracy, peaks = {}, {}, {}
    for penalty in (0.0, PENALTY):
        begin = time.perf_counter()
        net, losses, norms = train(
            x[HELD_OUT:], y[HELD_OUT:], penalty, 1 if args.quick else 30, device
        )
        name = f"with penalty {penalty:g}" if penalty else "without penalty"
        curves[name], peaks[name] = (losses, norms), max(norms)
        with torch.no_grad():
            answers = net(x[:HELD_OUT].to(device)).argmax(1).cpu()
        accuracy[name] = (answers == y[:HELD_OUT]).float().mean().item()
        harness.console.print(
            f"{name}: {time.perf_counter() - begin:.0f} s on {device}, loss {losses[-1]:.3f}, largest "
            f"squared gradient norm {max(norms):.2f}, held-out accuracy {accuracy[name]:.1%}"
        )
    draw(curves, args.out / "weight_gradient_penalty.png")
    if not args.quick:
        without, with_ = peaks.values()
        claim = f"the penalty lowers the largest gradient norm: {with_:.2f} against {without:.2f}"
        checks[claim] = with_ < without
        worst = min(accuracy.values())
        checks[f"held-out accuracy at least 90 % ({worst:.1%})"] = worst >= 0.9
    return harness.verdict(checks)


if __name__ == "__main__":
    raise SystemExit(main())
