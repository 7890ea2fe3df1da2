"""torchvision's resnet18 as it comes, with an input-gradient penalty: how robust it is to noise.

    python examples/r1_resnet.py [--device cpu|xla] [--stock] [--quick]

Adds the squared norm of the loss's gradient with respect to the images (Ross and Doshi-Velez, 2018,
arXiv:1711.09404), as R1 does for a critic. Trains scikit-learn's digits with and without it, in one graph:
the penalty's factor is a tensor. Checks the first step's gradient against float64 on the CPU, and that the
penalty raises the accuracy on noisy images. Without torchvision it says so and ends with 0.
"""

import copy
import importlib.util
import time

import harness
import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torch_convfix

SIZE, BATCH, STEPS, RATE, PENALTY, HELD_OUT = 16, 64, 100, 1e-3, 1.0, 297
NOISES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def load() -> tuple[Tensor, Tensor]:
    """Images ``[number, 3, SIZE, SIZE]`` between -1 and 1, and labels, in random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.images))
    x = torch.from_numpy(digits.images).float().unsqueeze(1)[order] / 8 - 1
    x = F.interpolate(x, (SIZE, SIZE), mode="bilinear")
    return x.expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(digits.target)[order]


def loss_and_penalty(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy, and the mean squared norm of an image's loss gradient."""
    x = x.detach().requires_grad_()
    losses = F.cross_entropy(net(x), y, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses.mean(), gradient.square().sum((1, 2, 3)).mean()


def step_gradients(net: nn.Module, x: Tensor, y: Tensor, factor: Tensor) -> list[Tensor]:
    """Loss, penalty and the gradients of loss + factor * penalty."""
    loss, penalty = loss_and_penalty(net, x, y)
    gradients = torch.autograd.grad(loss + factor * penalty, list(net.parameters()))
    return [loss.detach(), penalty.detach(), *gradients]


def error_of(got: list[Tensor], net: nn.Module, x: Tensor, y: Tensor, factor: float) -> float:
    """Of the loss, the penalty and all gradients as one vector, against float64 on the CPU."""
    with torch_convfix.disabled("cpu"):
        reference = copy.deepcopy(net).double()
        want = step_gradients(reference, x.double(), y, torch.tensor(factor).double())

    def relative(got: list[Tensor], want: list[Tensor]) -> float:
        g, w = (torch.cat([t.flatten().double() for t in part]) for part in (got, want))
        return ((g - w).norm() / w.norm()).item()

    parts = (slice(0, 1), slice(1, 2), slice(2, None))
    return max(relative(got[part], want[part]) for part in parts)


def train(net: nn.Module, x: Tensor, y: Tensor, factor: float, steps: int, device: torch.device):
    """The net on ``device``, loss and penalty step by step, and the first step's error."""
    first = copy.deepcopy(net)
    net = net.to(device)
    weight = torch.tensor(factor, device=device)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(1)
    losses, penalties, error = [], [], 0.0
    for i in track(range(steps), f"penalty {factor:g}", console=harness.console):
        chosen = torch.randint(len(x), (BATCH,), generator=generator)
        results = step_gradients(net, x[chosen].to(device), y[chosen].to(device), weight)
        # The optimizer's graph, which differs in its first step, is one of its own.
        harness.sync(device)
        if i == 0:
            error = error_of([t.cpu() for t in results], first, x[chosen], y[chosen], factor)
        for p, g in zip(net.parameters(), results[2:], strict=True):
            p.grad = g
        optimizer.step()
        harness.sync(device)
        losses.append(results[0].cpu().item())
        penalties.append(results[1].cpu().item())
    return net, losses, penalties, error


def noisy_accuracy(net: nn.Module, x: Tensor, y: Tensor, device: torch.device) -> list[float]:
    """For each of NOISES, the standard deviation of what is added to every pixel."""
    generator = torch.Generator().manual_seed(2)
    net.eval()
    accuracies = []
    for noise in NOISES:
        seen = x + noise * torch.randn(x.shape, generator=generator)
        with torch.no_grad():
            answers = net(seen.to(device)).argmax(1)
        harness.sync(device)
        accuracies.append((answers.cpu() == y).float().mean().item())
    return accuracies


def draw(results, path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, (losses, penalties, accuracies) in results.items():
        left.plot(losses, label=name)
        middle.semilogy(penalties, label=name)
        right.plot(NOISES, accuracies, marker="o", markersize=4, label=name)
    left.set(xlabel="step", title="Cross entropy")
    middle.set(xlabel="step", title="Squared norm of its image gradient")
    right.set(xlabel="standard deviation of the noise", title="Held-out accuracy", ylim=(0, 1.02))
    for axes in (left, middle, right):
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    args = harness.options(__doc__, "r1_resnet").parse_args()
    if importlib.util.find_spec("torchvision") is None:
        harness.console.print("torchvision is not installed, and this trains its resnet18: skipped")
        return 0
    from torchvision.models import resnet18

    device = harness.start(args)
    x, y = load()
    begin_with = resnet18(num_classes=10)
    results, checks = {}, {}
    for factor in (0.0, PENALTY):
        begin = time.perf_counter()
        net, losses, penalties, error = train(
            copy.deepcopy(begin_with),
            x[HELD_OUT:],
            y[HELD_OUT:],
            factor,
            2 if args.quick else STEPS,
            device,
        )
        name = f"with penalty {factor:g}" if factor else "without penalty"
        claim = f"{name}: the first step's gradient in float32 is {harness.right(error, 1e-2)}"
        checks[claim] = error < 1e-2
        tested = 64 if args.quick else HELD_OUT
        accuracies = noisy_accuracy(net, x[:tested], y[:tested], device)
        results[name] = losses, penalties, accuracies
        harness.console.print(
            f"{name}: {time.perf_counter() - begin:.0f} s on {device}, loss {losses[-1]:.3f}, squared "
            f"gradient norm {penalties[-1]:.3f}, held-out accuracy "
            + ", ".join(f"{a:.1%} at noise {n:g}" for n, a in zip(NOISES, accuracies, strict=True))
        )
    draw(results, args.out / "r1_resnet.png")
    if not args.quick:
        (_, _, without), (_, _, with_) = results.values()
        checks[f"accuracy without noise at least 90 % ({with_[0]:.1%} with)"] = with_[0] >= 0.9
        means = [sum(a[1:]) / len(a[1:]) for a in (without, with_)]
        claim = f"with noise the penalty helps: {means[1]:.1%} against {means[0]:.1%} in the mean"
        checks[claim] = means[1] > means[0]
    compilation = torch_convfix.status().compilation
    if compilation is not None and device.type == "xla":
        harness.console.print(str(compilation).splitlines()[0], markup=False)
    return harness.verdict(checks)


if __name__ == "__main__":
    raise SystemExit(main())
