"""F, I and W: a convolution and its two gradients, as functions that differentiate to any order.

For one geometry a convolution is a trilinear form ``T(x, w, g) = <F(x, w), g>``. Its three partial
derivatives are `conv_forward`, `conv_input_grad` and `conv_weight_grad`; differentiating any of them
gives the other two, in the same geometry. All take 1 to 3 spatial dimensions, with the shapes and
the meaning of ``stride``, ``padding``, ``dilation``, ``groups`` and ``output_padding`` that
`torch.nn.functional.conv2d` and `conv_transpose2d` document. ``input`` may come without a batch
dimension, and then so do its gradient and ``grad_output``. `masked_conv` never reads a masked weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_convfix import _C
from torch_convfix.masked.application import masked_conv, masked_conv_transpose

__all__ = [
    "conv_forward",
    "conv_input_grad",
    "conv_weight_grad",
    "masked_conv",
    "masked_conv_transpose",
]

_Size = int | Sequence[int]


def _per_dimension(value: _Size, dim: int) -> list[int]:
    return [value] * dim if isinstance(value, int) else list(value)


def _parameters(
    weight_dim: int,
    stride: _Size,
    padding: _Size,
    dilation: _Size,
    transposed: bool,
    output_padding: _Size,
    groups: int,
) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
    def spread(value: _Size) -> list[int]:
        return _per_dimension(value, weight_dim - 2)

    return (
        spread(stride),
        spread(padding),
        spread(dilation),
        transposed,
        spread(output_padding),
        groups,
    )


def conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _Size = 1,
    padding: _Size = 0,
    dilation: _Size = 1,
    groups: int = 1,
    *,
    transposed: bool = False,
    output_padding: _Size = 0,
) -> Tensor:
    """The convolution F.

    Args:
        input: ``[N, C_in, *spatial]``, or without ``N``.
        weight: ``[C_out, C_in / groups, *kernel]``; transposed ``[C_in, C_out / groups, *kernel]``.
        bias: ``[C_out]``.

    Returns:
        ``[N, C_out, *spatial]`` of ``input``'s dtype.

    Raises:
        RuntimeError: where shapes, dtypes or devices do not fit together.
    """
    parameters = _parameters(
        weight.dim(), stride, padding, dilation, transposed, output_padding, groups
    )
    batched = input.dim() == weight.dim()
    result = torch.ops.aten.convolution(
        input if batched else input.unsqueeze(0), weight, bias, *parameters
    )
    return result if batched else result.squeeze(0)


def conv_input_grad(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    stride: _Size = 1,
    padding: _Size = 0,
    dilation: _Size = 1,
    groups: int = 1,
    *,
    transposed: bool = False,
    output_padding: _Size = 0,
) -> Tensor:
    """The gradient I of ``<conv_forward(input, weight), grad_output>`` with respect to ``input``.

    Args:
        grad_output: ``[N, C_out, *spatial]``, or without ``N``.
        weight: as in `conv_forward`.
        input_size: the size of ``input``, with ``N`` where ``grad_output`` has it.

    Returns:
        A tensor of ``input_size``.

    Raises:
        RuntimeError: where shapes, dtypes or devices do not fit together.
    """
    # Only the sizes of this one are used.
    input = grad_output.new_empty(1).expand(list(input_size))
    return _backward(
        grad_output, input, weight, 0, stride, padding, dilation, transposed, output_padding, groups
    )


def conv_weight_grad(
    input: Tensor,
    grad_output: Tensor,
    weight_size: Sequence[int],
    stride: _Size = 1,
    padding: _Size = 0,
    dilation: _Size = 1,
    groups: int = 1,
    *,
    transposed: bool = False,
    output_padding: _Size = 0,
) -> Tensor:
    """The gradient W of ``<conv_forward(input, weight), grad_output>`` with respect to ``weight``.

    Args:
        input: as in `conv_forward`.
        grad_output: ``[N, C_out, *spatial]``, or without ``N``.
        weight_size: the size of ``weight``.

    Returns:
        A tensor of ``weight_size``.

    Raises:
        RuntimeError: where shapes, dtypes or devices do not fit together.
    """
    # Only the sizes of this one are used.
    weight = grad_output.new_empty(1).expand(list(weight_size))
    return _backward(
        grad_output, input, weight, 1, stride, padding, dilation, transposed, output_padding, groups
    )


def _backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    which: int,
    stride: _Size,
    padding: _Size,
    dilation: _Size,
    transposed: bool,
    output_padding: _Size,
    groups: int,
) -> Tensor:
    parameters = _parameters(
        weight.dim(), stride, padding, dilation, transposed, output_padding, groups
    )
    batched = input.dim() == weight.dim()
    if not batched:
        grad_output, input = grad_output.unsqueeze(0), input.unsqueeze(0)
    _C.check_backward(grad_output, input, weight, *parameters)
    mask = [which == i for i in range(3)]
    gradients = torch.ops.aten.convolution_backward(
        grad_output, input, weight, None, *parameters, mask
    )
    gradient = gradients[which]
    return gradient.squeeze(0) if which == 0 and not batched else gradient
