#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution_backward_overrideable_ops.h>
#include <ATen/ops/convolution_overrideable_ops.h>

// Shape functions of the two overrideable operators, which core leaves without one.
namespace torch_convfix::meta {

at::_ops::convolution_overrideable::schema convolution_overrideable;
at::_ops::convolution_backward_overrideable::schema convolution_backward_overrideable;

}  // namespace torch_convfix::meta
