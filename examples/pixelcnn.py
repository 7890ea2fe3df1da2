"""A small gated PixelCNN on scikit-learn's 8x8 digits, exact and with multiplied masks.

    python examples/pixelcnn.py [--device cpu|xla] [--epochs 8] [--out out/pixelcnn]

Trains (van den Oord et al., 2016, arXiv:1606.05328), draws samples, and looks at the receptive field
of one output through NaNs: the exact net sees the past only, the same net with multiplied kernels
(same weights) is reached from everywhere its kernels extend to. Needs scikit-learn and matplotlib.
"""

import argparse
import copy
import os
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from torch_convfix.commands._options import NATURAL, Formatter, add
from torch_convfix.masked.receptive_field import leaks, plot_receptive_field
from torch_convfix.nn import MaskedConv2d, causal_mask

LEVELS = 5  # grey levels; the data has 17
CENTRE = (4, 4)


def gate(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    return a.tanh() * b.sigmoid()


class Gated(nn.Module):
    """One layer: a vertical stack sees the rows above, a horizontal one the row's own past too."""

    def __init__(self, ins: int, channels: int, kind: str) -> None:
        super().__init__()
        above = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
        above[:, :, : 1 if kind == "A" else 2] = True
        settings = dict(kernel_size=3, padding=1)
        self.vertical = MaskedConv2d(ins, 2 * channels, mask=above, **settings)
        self.across = nn.Conv2d(2 * channels, 2 * channels, 1)
        row = causal_mask((1, 3), kind)
        self.horizontal = MaskedConv2d(ins, 2 * channels, (1, 3), padding=(0, 1), mask=row)
        self.out = nn.Conv2d(channels, channels, 1)
        self.residual = kind == "B"

    def forward(self, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        vertical = self.vertical(v)
        y = self.out(gate(self.across(vertical) + self.horizontal(h)))
        return gate(vertical), y + h if self.residual else y


class PixelCNN(nn.Module):
    def __init__(self, channels: int = 24, depth: int = 4) -> None:
        super().__init__()
        kinds = "A" + "B" * depth
        sizes = [1] + [channels] * depth
        self.layers = nn.ModuleList(
            Gated(i, channels, k) for i, k in zip(sizes, kinds, strict=True)
        )
        self.head = nn.Conv2d(channels, LEVELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, levels, 8, 8) of images (batch, 1, 8, 8) between -1 and 1."""
        v = h = x
        for layer in self.layers:
            v, h = layer(v, h)
        return self.head(h)


class Multiplied(MaskedConv2d):
    """The usual masked layer: the whole kernel is read, and masked taps are multiplied by zero."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.Conv2d._conv_forward(self, input, weight * self.mask, bias)


def multiplied(net: PixelCNN) -> PixelCNN:
    twin = copy.deepcopy(net)
    for module in twin.modules():
        if type(module) is MaskedConv2d:
            module.__class__ = Multiplied
    return twin


def digits() -> Tensor:
    """(number, 1, 8, 8), grey levels 0 .. LEVELS - 1."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images).unsqueeze(1)
    return (images * (LEVELS - 1) / 16).round().long()


def scaled(levels: Tensor) -> Tensor:
    return levels.float() * (2 / (LEVELS - 1)) - 1


def loss_of(net: PixelCNN, levels: Tensor) -> Tensor:
    """Nats a pixel."""
    return F.cross_entropy(net(scaled(levels)), levels[:, 0])


def sync(device: torch.device) -> None:
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def train(
    net: PixelCNN, data: Tensor, device: torch.device, epochs: int, batch: int = 128
) -> float:
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in track(range(epochs), "training"):
        for start in range(0, len(data) - batch + 1, batch):
            optimizer.zero_grad()
            loss = loss_of(net, data[start : start + batch].to(device))
            loss.backward()
            optimizer.step()
            sync(device)
        data = data[torch.randperm(len(data))]
    return loss.item()


@torch.no_grad()
def sample(net: PixelCNN, number: int, device: torch.device) -> Tensor:
    """Pixel by pixel; one compiled step serves them all."""
    levels = torch.zeros(number, 1, 8, 8, dtype=torch.long, device=device)
    for pixel in range(64):
        here = F.one_hot(torch.tensor(pixel), 64).view(1, 1, 8, 8).to(device) == 1
        uniform = torch.rand(number, LEVELS, 8, 8).clamp_(1e-9).to(device)
        drawn = (net(scaled(levels)) - (-uniform.log()).log()).argmax(1, keepdim=True)  # Gumbel
        levels = torch.where(here, drawn, levels)
        sync(device)
    return levels.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add(parser, "--device", choices=("cpu", "xla"), default="xla")
    parser.add_argument("--epochs", type=NATURAL, default=8, metavar="N", help="of training")
    add(parser, "--out", "plots", metavar="FOLDER", default=Path("out/pixelcnn"))
    args = parser.parse_args()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    device = torch.device("cpu")
    if args.device == "xla":
        import torch_xla

        device = torch_xla.device()
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    data = digits()[torch.randperm(1797)]
    held_out, data = data[:256], data[256:]

    net = PixelCNN().to(device)
    start = time.perf_counter()
    loss = train(net, data, device, args.epochs)
    seconds = time.perf_counter() - start
    drawn = sample(net, 32, device)

    table = Table(title=f"after {args.epochs} epochs on {device} ({seconds:.0f} s)")
    for column in ("net", "train loss", "test loss", "future pixels that reach the output"):
        table.add_column(column)
    x = scaled(held_out[:1]).to(device)
    past = (torch.arange(64) < CENTRE[0] * 8 + CENTRE[1]).view(8, 8)
    index = (0, slice(None), *CENTRE)
    for name, own in (("exact", net), ("multiplied", multiplied(net))):
        found = leaks(own, x, index, past, "nan")
        plot_receptive_field(own, x, index, args.out / f"{name}.png", past, "nan")
        with torch.no_grad():
            own_loss = loss_of(own, held_out.to(device)).item()
        table.add_row(name, f"{loss:.4f}", f"{own_loss:.4f}", str(len(found)))
    Console().print(table)
    save_grid(drawn, args.out / "samples.png")
    Console().print(f"samples and receptive fields: {args.out}")


def save_grid(levels: Tensor, path: Path) -> None:
    from matplotlib import image

    rows = F.pad(levels[:, 0], [1, 1, 1, 1]).unflatten(0, (4, -1))
    image.imsave(path, rows.transpose(1, 2).flatten(2).flatten(0, 1).numpy(), cmap="gray")


if __name__ == "__main__":
    main()
