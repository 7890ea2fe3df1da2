"""The networks of the zoo: torchvision's, as they come, at the smallest images that leave 2 x 2 before the
end, for batch statistics of less than that have no derivative."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import derivatives
import nets
import torch

nets.import_torchvision()

from torchvision.models import MaxVit, detection, get_model

BATCH, CLASSES = 2, 5


@dataclass(frozen=True)
class Net:
    """``shape`` is that of one image."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: tuple[str, ...] = ("R1 penalty",)  # XLA:CPU takes minutes to compile each


def _net(name: str, *shape: int, **options: object) -> Net:
    options = {"weights": None, "num_classes": CLASSES, **options}
    return Net(lambda: get_model(name, **options), shape or (3, 33, 33))


def _segmentation(name: str) -> Net:
    return _net(name, weights_backbone=None)


def _maxvit() -> nn.Module:
    # maxvit_t with two blocks and partitions of 2: its own are for 224 pixels.
    return MaxVit((64, 64), 64, 2, [64, 128], [1, 1], 32, 0.2, num_classes=CLASSES)


def _vgg() -> nn.Module:
    # vgg11 with a classifier of 64 features: its own takes more memory than all else.
    model = get_model("vgg11", weights=None)
    hidden = nn.Linear(512 * 7 * 7, 64)
    model.classifier = nn.Sequential(hidden, nn.ReLU(inplace=True), nn.Linear(64, CLASSES))
    return model


def _fpn() -> nn.Module:
    return detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=5
    )


# By what a row costs, the cheapest first.
NETS = {
    "squeezenet1_1": _net("squeezenet1_1"),
    "mnasnet0_5": _net("mnasnet0_5"),
    "mobilenet_v3_small": _net("mobilenet_v3_small"),
    "shufflenet_v2_x0_5": _net("shufflenet_v2_x0_5"),
    "resnet18": _net("resnet18"),
    "resnet18, FPN": Net(_fpn, (3, 33, 33)),
    "mobilenet_v2": _net("mobilenet_v2"),
    "alexnet": _net("alexnet", 3, 63, 63),
    "lraspp_mobilenet_v3_large": _segmentation("lraspp_mobilenet_v3_large"),
    "googlenet": _net("googlenet", init_weights=False),
    "r3d_18": _net("r3d_18", 3, 4, 17, 17),
    "regnet_x_400mf": _net("regnet_x_400mf"),
    "regnet_y_400mf": _net("regnet_y_400mf"),
    "efficientnet_b0": _net("efficientnet_b0"),
    "convnext_tiny": _net("convnext_tiny", 3, 32, 32),
    "maxvit": Net(_maxvit, (3, 64, 64)),
    "swin_t": _net("swin_t", 3, 32, 32),
    "swin_v2_t": _net("swin_v2_t", 3, 32, 32),
    "resnext50_32x4d": _net("resnext50_32x4d"),
    "fcn_resnet50": _segmentation("fcn_resnet50"),
    "wide_resnet50_2": _net("wide_resnet50_2"),
    "densenet121": _net("densenet121", 3, 61, 61),
    "efficientnet_v2_s": _net("efficientnet_v2_s"),
    "inception_v3": _net("inception_v3", 3, 107, 107, aux_logits=False, init_weights=False),
    "vit_b_16": _net("vit_b_16", 3, 32, 32, image_size=32),
    "vgg11": Net(_vgg, (3, 32, 32)),
}


# Small enough for every row.
for _name in (
    "squeezenet1_1",
    "mnasnet0_5",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "resnet18",
):
    NETS[_name] = replace(NETS[_name], rows=tuple(derivatives.ROWS))


def make(net: Net) -> nn.Module:
    """The network in train mode, without dropout."""
    model = net.make().train()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.count_nonzero():
            nn.init.normal_(parameter, std=0.02)  # a head of zeros makes all derivatives 0
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "Dropout2d", "StochasticDepth"):
            module.eval()
        if type(module).__name__.startswith("BatchNorm"):
            # XLA takes it as a float32: 1e-8 of it is no fault of a derivative, and some nets amplify it.
            module.eps = torch.tensor(module.eps, dtype=torch.float32).item()
    return model
