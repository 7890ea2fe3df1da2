#pragma once

#include <array>
#include <tuple>

#include "convolution/geometry.h"

namespace torch_convfix {

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// F, I and W: the three derivatives of the trilinear form <F(x, w), g> of a plain convolution.
class Trilinear {
 public:
  virtual ~Trilinear() = default;
  virtual at::Tensor forward(const Form& form, const at::Tensor& x, const at::Tensor& w) const = 0;
  virtual at::Tensor input_grad(const Form& form, const at::Tensor& g, const at::Tensor& w) const = 0;
  virtual at::Tensor weight_grad(const Form& form, const at::Tensor& x, const at::Tensor& g) const = 0;
};

// The two operators that ATen leaves to backends, of these three: a transposed convolution is I, with F
// and W for its gradients.
at::Tensor convolution(
    const Trilinear& of,
    const Form& form,
    bool transposed,
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias);
Gradients convolution_backward(
    const Trilinear& of,
    const Form& form,
    bool transposed,
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    std::array<bool, 3> output_mask);

at::Tensor bias_grad(const at::Tensor& grad_output);

}  // namespace torch_convfix
