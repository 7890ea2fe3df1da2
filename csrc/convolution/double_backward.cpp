#include "convolution/double_backward.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

namespace torch_convfix {

// For the trilinear form T = <F(x, w), g>, convolution_backward is (dT/dx, dT/dw, sum of g). With the
// cotangents (ggI, ggW, ggb) of its results, each gradient below is again a partial derivative of T.
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
    std::array<bool, 3> output_mask) {
  const auto defined = [](const std::optional<at::Tensor>& t) { return t && t->defined(); };
  const auto forward = [&](const at::Tensor& x, const at::Tensor& w) {
    return at::convolution_symint(
        x, w, std::nullopt, stride, padding, dilation, transposed, output_padding, groups);
  };
  const auto backward = [&](const at::Tensor& x, const at::Tensor& w, std::array<bool, 3> mask) {
    return at::convolution_backward_symint(
        gO, x, w, std::nullopt, stride, padding, dilation, transposed, output_padding, groups, mask);
  };

  at::Tensor ggO, gI, gW;
  if (output_mask[0]) {
    const auto accumulate = [&](at::Tensor term) { ggO = ggO.defined() ? ggO + term : std::move(term); };
    if (defined(ggI)) {
      accumulate(forward(*ggI, weight));
    }
    if (defined(ggW)) {
      accumulate(forward(input, *ggW));
    }
    if (defined(ggb)) {
      c10::SymDimVector sizes(gO.dim(), 1);
      sizes[1] = gO.sym_size(1);
      const auto bias = ggb->reshape_symint(sizes);
      accumulate(ggO.defined() ? bias : bias.expand_symint(gO.sym_sizes()));
    }
  }
  if (output_mask[1] && defined(ggW)) {
    gI = std::get<0>(backward(input, *ggW, {true, false, false}));  // input gives its sizes alone
  }
  if (output_mask[2] && defined(ggI)) {
    gW = std::get<1>(backward(*ggI, weight, {false, true, false}));  // weight gives its sizes alone
  }
  return {ggO, gI, gW};
}

}  // namespace torch_convfix
