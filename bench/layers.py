"""The layers of the one-layer workloads."""

from dataclasses import dataclass

BATCH = 32


@dataclass(frozen=True)
class Layer:
    """A convolution with a 3 x 3 kernel, stride 2, padding 1 and no bias, and its input."""

    channels_in: int
    channels_out: int
    spatial: int
    groups: int = 1
    transposed: bool = False
    output_padding: int = 0

    @property
    def input_size(self) -> tuple[int, ...]:
        return (BATCH, self.channels_in, self.spatial, self.spatial)

    @property
    def weight_size(self) -> tuple[int, ...]:
        first, second = self.channels_out, self.channels_in
        if self.transposed:
            first, second = second, first
        return (first, second // self.groups, 3, 3)


LAYERS = {
    "seed": Layer(3, 20, 32),
    "r50": Layer(128, 128, 56),
    "dw": Layer(96, 96, 56, groups=96),
    "gr": Layer(128, 128, 56, groups=32),
    "tr": Layer(128, 64, 28, transposed=True, output_padding=1),
}
# Workloads of one layer by name; gp is a gradient-penalty step, fb a forward and backward.
PENALTIES = {f"{name}_gp": layer for name, layer in LAYERS.items()}
FORWARD_BACKWARDS = {f"{name}_fb": LAYERS[name] for name in ("r50", "dw", "tr")}
# Workloads of a whole torchvision model.
MODELS = {
    "resnet50_r1": "resnet50",
    "resnext50_r1": "resnext50_32x4d",
    "mobilenet_v2_r1": "mobilenet_v2",
    "efficientnet_b0_r1": "efficientnet_b0",
}
