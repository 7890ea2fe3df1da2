"""The networks of the whole-step workloads, without what is random: dropout is left out."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import library, nn


@cache
def import_torchvision() -> Any:
    # Beside a CPU build of torch, PyPI's torchvision on Linux cannot load its kernels, and its import
    # asks for these two all the same; no classifier uses them.
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        raise ImportError("the whole models need torchvision")
    try:
        torch.ops.load_library(Path(package.origin).with_name("_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
    return importlib.import_module("torchvision")


def _without_dropout(model: nn.Module) -> nn.Module:
    from torchvision.ops import StochasticDepth

    for name, child in model.named_children():
        if isinstance(child, (nn.Dropout, StochasticDepth)):
            setattr(model, name, nn.Identity())
        else:
            _without_dropout(child)
    return model


def _batch_statistics(model: nn.Module) -> nn.Module:
    # Running statistics have no part in a gradient in train mode, and would be state of the step.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return model.train()


def classifier(name: str) -> nn.Module:
    """A torchvision classifier with 10 classes, in train mode."""
    make = getattr(import_torchvision().models, name)
    return _batch_statistics(_without_dropout(make(weights=None, num_classes=10)))


def generator(width: int = 64) -> nn.Module:
    """DCGAN's generator for 64 x 64 images: transposed convolutions with output padding.

    Radford et al., 2016, https://arxiv.org/abs/1511.06434, figure 1, without the first projection.
    """
    layers: list[nn.Module] = [nn.ConvTranspose2d(100, 8 * width, 4)]
    for k in (8, 4, 2):
        layers += [nn.BatchNorm2d(k * width), nn.ReLU()]
        layers += [nn.ConvTranspose2d(k * width, k * width // 2, 5, 2, 2, output_padding=1)]
    layers += [nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.ConvTranspose2d(width, 3, 5, 2, 2, output_padding=1), nn.Tanh()]
    return _batch_statistics(nn.Sequential(*layers))


def critic(width: int = 64) -> nn.Module:
    """WGAN-GP's critic: DCGAN's discriminator without normalization.

    Gulrajani et al., 2017, https://arxiv.org/abs/1704.00028.
    """
    layers: list[nn.Module] = []
    channels = 3
    for k in (1, 2, 4, 8):
        layers += [nn.Conv2d(channels, k * width, 5, 2, 2), nn.LeakyReLU(0.2)]
        channels = k * width
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 4), nn.Flatten())


def conv4(classes: int = 5) -> nn.Module:
    """MAML's network for Omniglot: four strided convolutions (Finn et al., 2017,
    https://arxiv.org/abs/1703.03400, section 5.2)."""
    layers: list[nn.Module] = []
    channels = 1
    for _ in range(4):
        layers += [nn.Conv2d(channels, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU()]
        channels = 64
    return _batch_statistics(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, classes)))
