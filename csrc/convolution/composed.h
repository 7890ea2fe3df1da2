#pragma once

#include "convolution/trilinear.h"

namespace torch_convfix {

// Convolutions for a backend that has none, of operators that every backend has: padding, slices,
// stacking, reshapes, batched matrix products, sums. Beside its operands and its result a call keeps one
// padded operand and columns of at most `block_bytes`, or of one sample and tap.
class Composed final : public Trilinear {
 public:
  explicit Composed(int64_t block_bytes) : block_bytes_(block_bytes) {
  }

  at::Tensor forward(const Form& form, const at::Tensor& x, const at::Tensor& w) const override;
  at::Tensor input_grad(const Form& form, const at::Tensor& g, const at::Tensor& w) const override;
  at::Tensor weight_grad(const Form& form, const at::Tensor& x, const at::Tensor& g) const override;

  // aten::convolution_overrideable and its backward; aten::convolution has the same arguments, and its
  // backward one more.
  at::Tensor convolution(
      const at::Tensor& input,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias,
      c10::SymIntArrayRef stride,
      c10::SymIntArrayRef padding,
      c10::SymIntArrayRef dilation,
      bool transposed,
      c10::SymIntArrayRef output_padding,
      c10::SymInt groups) const;
  Gradients convolution_backward_overrideable(
      const at::Tensor& grad_output,
      const at::Tensor& input,
      const at::Tensor& weight,
      c10::SymIntArrayRef stride,
      c10::SymIntArrayRef padding,
      c10::SymIntArrayRef dilation,
      bool transposed,
      c10::SymIntArrayRef output_padding,
      c10::SymInt groups,
      std::array<bool, 3> output_mask) const;
  Gradients convolution_backward(
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
      std::array<bool, 3> output_mask) const;

 private:
  int64_t block_bytes_;
};

// The operators that these call and PyTorch does not compose of others, by their schema names.
std::vector<std::string> needed_operators();

}  // namespace torch_convfix
