#include <ATen/ops/convolution_backward_overrideable.h>
#include <ATen/ops/convolution_overrideable.h>
#include <ATen/ops/squeeze_copy.h>
#include <ATen/ops/unsqueeze_copy.h>

#include "dynamic/dynamic.h"

namespace torch_convfix {
namespace {

// One spatial dimension as two, the first of size 1, which is all that torch_xla's gradients know.
struct Widened {
  c10::SymDimVector stride, padding, dilation, output_padding;

  Widened(
      c10::SymIntArrayRef stride_,
      c10::SymIntArrayRef padding_,
      c10::SymIntArrayRef dilation_,
      c10::SymIntArrayRef output_padding_)
      : stride{1, stride_[0]},
        padding{0, padding_[0]},
        dilation{1, dilation_[0]},
        output_padding{0, output_padding_[0]} {
  }
};

at::Tensor widen(const at::Tensor& t) {
  return at::unsqueeze_copy(t, 2);
}

at::Tensor narrow(const at::Tensor& t) {
  return t.defined() && t.dim() == 4 ? at::squeeze_copy(t, 2) : t;
}

// Core asks for concrete sizes to choose a backend, and on XLA the choice is always this one.
at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  if (input.dim() == 3 && weight.dim() == 3) {
    const Widened two(stride, padding, dilation, output_padding);
    return narrow((convolution)(widen(input), widen(weight), bias, two.stride, two.padding, two.dilation,
                                transposed, two.output_padding, std::move(groups)));
  }
  return at::convolution_overrideable_symint(
      input, weight, bias, stride, padding, dilation, transposed, output_padding, std::move(groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::OptionalSymIntArrayRef bias_sizes,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> output_mask) {
  if (input.dim() == 3 && weight.dim() == 3) {
    const Widened two(stride, padding, dilation, output_padding);
    const auto [gx, gw, gb] =
        (convolution_backward)(widen(grad_output), widen(input), widen(weight), bias_sizes, two.stride,
                               two.padding, two.dilation, transposed, two.output_padding,
                               std::move(groups), output_mask);
    return {narrow(gx), narrow(gw), gb};
  }
  return at::convolution_backward_overrideable_symint(
      grad_output, input, weight, stride, padding, dilation, transposed, output_padding,
      std::move(groups), output_mask);
}

}  // namespace

const std::vector<DynamicFix>& dynamic_convolutions() {
  static const std::vector<DynamicFix> fixes{
      {"convolution", kXLA, "refuses symbolic sizes", compose<&convolution>},
      {"convolution_backward", kXLA, "refuses symbolic sizes", compose<&convolution_backward>},
  };
  return fixes;
}

}  // namespace torch_convfix
