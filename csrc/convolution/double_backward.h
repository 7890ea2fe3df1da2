#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>
#include <optional>
#include <tuple>

namespace torch_convfix {

// Gradients of convolution_backward with respect to grad_output, input and weight, each as one or two
// convolutions of the same geometry, whatever the number of groups. A drop-in for
// at::_convolution_double_backward, from differentiable operators alone.
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_double_backward(
    const std::optional<at::Tensor>& ggI,
    const std::optional<at::Tensor>& ggW,
    const std::optional<at::Tensor>& ggb,
    const at::Tensor& gO,
    const at::Tensor& weight,
    const at::Tensor& input,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> output_mask);

}  // namespace torch_convfix
