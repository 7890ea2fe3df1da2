#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <c10/core/DispatchKeySet.h>

#include "convolution/trilinear.h"

namespace torch_convfix {

// A backend's own convolution kernels, fetched before ours take their place.
class StockKernels final : public Trilinear {
 public:
  explicit StockKernels(c10::DispatchKey key);

  // The two overrideable operators, as the backend has them.
  at::Tensor convolution(
      const Geometry& geometry,
      const at::Tensor& input,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias) const;
  Gradients convolution_backward(
      const Geometry& geometry,
      const at::Tensor& grad_output,
      const at::Tensor& input,
      const at::Tensor& weight,
      std::array<bool, 3> output_mask) const;

  at::Tensor forward(const Form& form, const at::Tensor& x, const at::Tensor& w) const override;
  at::Tensor input_grad(const Form& form, const at::Tensor& g, const at::Tensor& w) const override;
  at::Tensor weight_grad(const Form& form, const at::Tensor& x, const at::Tensor& g) const override;

 private:
  c10::DispatchKeySet keys_;
  c10::SafeKernelFunction convolution_, convolution_backward_;
};

}  // namespace torch_convfix
