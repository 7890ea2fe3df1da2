#include "convolution/trilinear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/slice_copy.h>
#include <ATen/ops/view_copy.h>

#include <algorithm>
#include <numeric>

namespace torch_convfix {
namespace {

// A transposed convolution's input as the grad_output of the plain convolution over its result.
at::Tensor append_zeros(const Form& form, const at::Tensor& input) {
  std::vector<int64_t> pads;
  for (int64_t i = form.dim() + 1; i >= 2; --i) {
    pads.insert(pads.end(), {0, form.g[i] - input.size(i)});
  }
  const bool any = std::any_of(pads.begin(), pads.end(), [](int64_t pad) { return pad != 0; });
  return any ? at::constant_pad_nd(input, pads) : input;
}

at::Tensor cut_to(at::Tensor t, at::IntArrayRef sizes) {
  for (int64_t i = 2; i < t.dim(); ++i) {
    if (t.size(i) != sizes[i]) {
      t = at::slice_copy(t, i, 0, sizes[i]);
    }
  }
  return t;
}

at::Tensor add_bias(const at::Tensor& t, const std::optional<at::Tensor>& bias) {
  if (!bias || !bias->defined()) {
    return t;
  }
  at::DimVector sizes(t.dim(), 1);
  sizes[1] = t.size(1);
  return t + at::view_copy(*bias, sizes);
}

}  // namespace

// In float32 for half-precision numbers: a running bfloat16 sum of ones never exceeds 256.
at::Tensor bias_grad(const at::Tensor& grad_output) {
  at::DimVector dims(grad_output.dim() - 1);
  std::iota(dims.begin() + 1, dims.end(), 2);
  const auto dtype = grad_output.scalar_type();
  return c10::isReducedFloatingType(dtype)
             ? grad_output.sum(dims, /*keepdim=*/false, at::kFloat).to(dtype)
             : grad_output.sum(dims);
}

at::Tensor convolution(
    const Trilinear& of,
    const Form& form,
    bool transposed,
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias) {
  return add_bias(
      transposed ? of.input_grad(form, append_zeros(form, input), weight)
                 : of.forward(form, input, weight),
      bias);
}

Gradients convolution_backward(
    const Trilinear& of,
    const Form& form,
    bool transposed,
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    std::array<bool, 3> output_mask) {
  Gradients gradients;
  if (output_mask[0]) {
    const at::DimVector sizes(input.sizes());
    std::get<0>(gradients) = transposed ? cut_to(of.forward(form, grad_output, weight), sizes)
                                        : of.input_grad(form, grad_output, weight);
  }
  if (output_mask[1]) {
    std::get<1>(gradients) = transposed ? of.weight_grad(form, grad_output, append_zeros(form, input))
                                        : of.weight_grad(form, input, grad_output);
  }
  if (output_mask[2]) {
    std::get<2>(gradients) = bias_grad(grad_output);
  }
  return gradients;
}

}  // namespace torch_convfix
