#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_convolution_double_backward_ops.h>

namespace torch_convfix {

// Gradients of convolution_backward with respect to grad_output, input and weight, each as one or two
// convolutions of the same geometry, whatever the number of groups. A drop-in for
// at::_convolution_double_backward, from differentiable operators alone.
at::_ops::_convolution_double_backward::schema convolution_double_backward;

}  // namespace torch_convfix
