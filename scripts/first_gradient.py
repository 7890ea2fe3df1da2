"""first_gradient.py DEVICE: a second-order gradient on the device, against float64 on the CPU."""

import sys

import torch
from torch import Tensor
from torch.nn.functional import conv_transpose2d, max_pool2d

import torch_convfix


def second_order(device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = (2, 6, 7, 7), (6, 1, 3, 3), (2, 6, 7, 7)
    x, w, v = (torch.randn(s, dtype=torch.float64).to(device, dtype) for s in shapes)
    x.requires_grad_()
    w.requires_grad_()
    y = conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=6)
    (g,) = torch.autograd.grad(max_pool2d(y.tanh(), 2).square().sum(), x, create_graph=True)
    return torch.autograd.grad((g * v).sum(), (x, w))


device = sys.argv[1]
torch_convfix.enable(device)
ours = second_order(device, torch.float32)
if device == "xla":
    import torch_xla

    torch_xla.sync()
for a, b in zip(ours, second_order("cpu", torch.float64), strict=True):
    error = ((a.cpu().double() - b).norm() / b.norm()).item()
    if not error < 1e-4:
        sys.exit(f"wrong by {error:.1e} on {device}")
print(f"right on {device}, torch {torch.__version__}")
