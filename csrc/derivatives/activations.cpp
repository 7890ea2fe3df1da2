#include <ATen/TensorOperators.h>
#include <ATen/ops/hardsigmoid_backward_ops.h>
#include <ATen/ops/hardtanh_backward.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "derivatives/differentiable.h"
#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

// torch_xla takes self for elu's result whatever is_result says. Serves elu, selu, celu and the forms in
// place. From elu(x) = scale * x for x > 0, else alpha * scale * (exp(input_scale * x) - 1).
at::Tensor elu_backward(
    const at::Tensor& grad_output,
    const at::Scalar& alpha,
    const at::Scalar& scale,
    const at::Scalar& input_scale,
    bool is_result,
    const at::Tensor& self_or_result) {
  const double negative_scale = alpha.toDouble() * scale.toDouble();
  // Clamped, so that an overflow where the other branch is taken does not become zero times infinity.
  const auto slope = is_result ? self_or_result + negative_scale
                               : (self_or_result.clamp_max(0) * input_scale).exp() * negative_scale;
  return at::where(
      self_or_result > 0, grad_output * scale, grad_output * (slope * input_scale.toDouble()));
}

// From hardsigmoid(x) = clamp(x / 6 + 1 / 2, 0, 1).
at::Tensor hardsigmoid_backward(const at::Tensor& grad_output, const at::Tensor& self) {
  return at::hardtanh_backward(grad_output, self, -3, 3) * (1.0 / 6);
}

// TorchTPU scales by alpha the result alone. celu(x) = x for x > 0, else alpha * (exp(x / alpha) - 1).
at::Tensor celu(const at::Tensor& self, const at::Scalar& alpha) {
  TORCH_CHECK(alpha.toDouble() != 0, "celu: alpha must not be 0, got 0");
  const auto negative = (self.clamp_max(0) / alpha).expm1() * alpha;
  return at::where(self > 0, self, negative);
}

at::Tensor& celu_(at::Tensor& self, const at::Scalar& alpha) {
  return self.copy_((celu)(self.clone(), alpha));  // not at::celu, by its argument
}

// torch_xla takes a weight of one entry a channel alone, and vmap gives one a task too.
at::Tensor prelu(const at::Tensor& self, const at::Tensor& weight) {
  return at::where(self > 0, self, weight * self);
}

std::tuple<at::Tensor, at::Tensor> prelu_backward(
    const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& weight) {
  const auto positive = self > 0;
  return {
      at::where(positive, grad_output, weight * grad_output),
      at::where(positive, at::zeros({}, self.options()), self * grad_output)};
}

}  // namespace

torch::CppFunction make_prelu() {
  return make_fix<&prelu>();
}

torch::CppFunction make_prelu_backward() {
  return make_fix<&prelu_backward>();
}

torch::CppFunction make_elu_backward() {
  return make_fix<&elu_backward>();
}

torch::CppFunction make_hardsigmoid_backward() {
  return make_differentiable<at::_ops::hardsigmoid_backward, &hardsigmoid_backward>();
}

torch::CppFunction make_celu() {
  return make_fix<&celu>();
}

torch::CppFunction make_celu_() {
  return make_fix<&celu_>();
}

}  // namespace torch_convfix
