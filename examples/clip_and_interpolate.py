"""Conv, interpolate, conv, with clipped gradients: the loop that once died in its second forward.

    python examples/clip_and_interpolate.py

Trains the net on the XLA device and on the CPU side by side, in each of the ways in which shapes
change or steps are cut, and prints the largest deviation of any step's loss or gradient.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_NORM = 0.1
BATCHES = (1, 2, 3, 5, 8)


class Net(nn.Module):
    """``[N, 3, H, W]`` -> ``[N, 2, H, W]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(torch.tanh(self.first(x)), scale_factor=1, mode="nearest")
        return self.second(x)


def make_net(device: torch.device, dtype: torch.dtype = torch.float32) -> Net:
    """The same weights on every device, large enough that clipping clips."""
    torch.manual_seed(0)
    return Net().to(dtype).to(device)


def draw_images(sizes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes]


def plain_loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x) + 0).square().mean()


def penalty_loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """With the WGAN-GP penalty on the gradient with respect to the images."""
    x = x.detach().requires_grad_()
    y = model(x) + 0
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()


@dataclass(frozen=True)
class Variation:
    """One way to run the loop. ``sizes``: of the images, step by step."""

    sizes: Sequence[Sequence[int]]
    loss: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = plain_loss
    accumulate: int = 1
    sync_at: Sequence[str] = ("step",)
    compiled: str = ""


STEADY = [(2, 3, 8, 8)] * 4
VARIATIONS: dict[str, Variation] = {
    "plain": Variation(STEADY),
    "gradient penalty": Variation(STEADY, penalty_loss),
    "changing batch sizes": Variation([(n, 3, 8, 8) for n in (2, 5, 1, 8, 3, 2)]),
    "changing image sizes": Variation([(2, 3, h, w) for h, w in ((8, 8), (7, 9), (12, 5), (8, 8))]),
    "penalty, all sizes changing": Variation(
        [(2, 3, 8, 8), (3, 3, 7, 9), (1, 3, 12, 5), (2, 3, 8, 8)], penalty_loss
    ),
    "torch_xla.compile": Variation(STEADY, compiled="torch_xla"),
    "torch_xla.compile, changing": Variation(
        [(n, 3, 8, 8) for n in (2, 3, 2, 3)], penalty_loss, compiled="torch_xla"
    ),
    "torch.compile, openxla": Variation(STEADY, compiled="openxla"),
    "torch.compile, changing": Variation([(n, 3, 8, 8) for n in (2, 3, 2)], compiled="openxla"),
    "accumulating 3 gradients": Variation(
        [(n, 3, 8, 8) for n in (1, 2, 3, 3, 2, 1)], penalty_loss, accumulate=3
    ),
    "sync everywhere": Variation(
        [(n, 3, 8, 8) for n in (2, 3, 2)],
        penalty_loss,
        sync_at=("forward", "backward", "clip", "step"),
    ),
    "sync never but at the end": Variation([(n, 3, 8, 8) for n in (2, 3, 2)], sync_at=()),
}

Step = tuple[Tensor, list[Tensor]]  # the loss, and the clipped gradients


def train(
    variation: Variation, device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[Step]:
    """Run the loop; yields each step's loss and clipped gradients, on ``device`` and maybe lazy."""
    on_xla = device.type == "xla"
    if on_xla:
        import torch_xla

    def sync(where: str) -> None:
        if on_xla and where in variation.sync_at:
            torch_xla.sync()

    model = make_net(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    forward = torch.compile(model, backend="openxla") if variation.compiled == "openxla" else model
    if not on_xla:
        forward = model

    def gradients(x: Tensor) -> Tensor:
        loss = variation.loss(forward, x)
        sync("forward")
        (loss / variation.accumulate).backward()
        sync("backward")
        return loss

    if on_xla and variation.compiled == "torch_xla":
        gradients = torch_xla.compile(gradients)
    for i, x in enumerate(draw_images(variation.sizes, dtype)):
        loss = gradients(x.to(device))
        if (i + 1) % variation.accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            sync("clip")
        clipped = [p.grad.clone() for p in model.parameters()]
        if (i + 1) % variation.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        sync("step")
        yield loss.detach(), clipped


def flat(steps: Sequence[Step]) -> list[Tensor]:
    return [t for loss, gradients in steps for t in (loss, *gradients)]


def worst_deviation(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """In units of the largest entry of the tensor that it is in."""
    return max(
        ((g.double() - w).abs().max() / w.abs().max()).item()
        for g, w in zip(got, want, strict=True)
    )


def main() -> None:
    import torch_xla
    from rich.console import Console
    from rich.table import Table

    import torch_convfix

    device = torch_xla.device()
    table = Table(title="Conv, interpolate, conv on XLA against float64 on the CPU", box=None)
    table.add_column("the loop")
    for column in ("steps", "last loss", "largest deviation"):
        table.add_column(column, justify="right")
    for name, variation in VARIATIONS.items():
        want = flat(list(train(variation, torch.device("cpu"), torch.float64)))
        steps = list(train(variation, device))
        torch_xla.sync()
        got = [t.cpu() for t in flat(steps)]
        deviation = f"{worst_deviation(got, want):.0e}"
        table.add_row(name, str(len(steps)), f"{steps[-1][0].item():.4f}", deviation)
    console = Console()
    console.print(table)
    console.print(f"\n{torch_convfix.status().compilation}", markup=False)


if __name__ == "__main__":
    main()
