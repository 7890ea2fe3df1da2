import enum
from collections.abc import Sequence

from torch import Tensor

class OutputPadding(enum.Enum):
    native = ...
    pad = ...

class Hardware(enum.Enum):
    cpu = ...
    tpu = ...
    other = ...

class Grouped(enum.Enum):
    direct = ...
    merge = ...

class Convolutions(enum.Enum):
    native = ...
    composed = ...

class Options:
    output_padding: OutputPadding
    hardware: Hardware
    derivatives: bool
    grouped: Grouped
    dynamic: bool
    convolutions: Convolutions
    def __init__(
        self,
        output_padding: OutputPadding,
        hardware: Hardware,
        derivatives: bool,
        grouped: Grouped = ...,
        merge: int = 0,
        dynamic: bool = False,
        convolutions: Convolutions = ...,
        block_bytes: int = ...,
    ) -> None: ...

def enable(device: str, options: Options) -> None: ...
def disable(device: str) -> None: ...
def enabled_options(device: str) -> Options | None: ...
def registrations() -> list[list[str]]: ...  # device, operator, dispatch key, purpose
def needed_operators() -> list[str]: ...  # of the device, that composed convolutions call
def traced_shapes() -> list[tuple[list[int], int]]: ...  # input shape, how often
def check_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> None: ...
