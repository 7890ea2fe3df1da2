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


SEED = Layer(3, 20, 32)
R50 = Layer(128, 128, 56)
DW = Layer(96, 96, 56, groups=96)
GR = Layer(128, 128, 56, groups=32)
TR = Layer(128, 64, 28, transposed=True, output_padding=1)
