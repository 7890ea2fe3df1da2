#include "convolution/meta.h"

#include <ATen/ops/empty.h>

#include "convolution/geometry.h"

namespace torch_convfix::meta {

at::Tensor convolution_overrideable(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  const Geometry geometry(
      weight, stride, padding, dilation, transposed, output_padding, std::move(groups));
  check_forward(geometry, input, weight, bias, Unknown::kAssert);
  return at::empty_symint(geometry.output_sizes(input.sym_sizes(), weight.sym_sizes()), input.options());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward_overrideable(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> output_mask) {
  const Geometry geometry(
      weight, stride, padding, dilation, transposed, output_padding, std::move(groups));
  check_backward(geometry, grad_output, input, weight, Unknown::kAssert);
  const auto empty = [&](bool wanted, c10::SymIntArrayRef sizes) {
    return wanted ? at::empty_symint(sizes, grad_output.options()) : at::Tensor();
  };
  return {
      empty(output_mask[0], input.sym_sizes()), empty(output_mask[1], weight.sym_sizes()),
      empty(output_mask[2], grad_output.sym_sizes().slice(1, 1))};
}

}  // namespace torch_convfix::meta
