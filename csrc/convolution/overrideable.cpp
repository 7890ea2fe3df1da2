#include "convolution/overrideable.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/slice_copy.h>
#include <ATen/ops/view_copy.h>

#include <algorithm>
#include <numeric>

#include "convolution/lowering/lowering.h"
#include "convolution/traced_shapes.h"

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

// In float32 for half-precision numbers: a running bfloat16 sum of ones never exceeds 256.
at::Tensor bias_grad(const at::Tensor& grad_output) {
  at::DimVector dims(grad_output.dim() - 1);
  std::iota(dims.begin() + 1, dims.end(), 2);
  const auto dtype = grad_output.scalar_type();
  return c10::isReducedFloatingType(dtype)
             ? grad_output.sum(dims, /*keepdim=*/false, at::kFloat).to(dtype)
             : grad_output.sum(dims);
}

bool direct_input_grad(const Plan& plan) {
  return plan.input_grad == Strategy::kDirect && !plan.phased;
}

}  // namespace

at::Tensor Overrideable::convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) const {
  const Geometry geometry(
      weight, stride, padding, dilation, transposed, output_padding, std::move(groups));
  check_forward(geometry, input, weight, bias);
  count_traced(input.sym_sizes());
  const auto form = make_form(geometry, input.sym_sizes(), weight.sym_sizes());
  if (!form) {
    return stock_.convolution(geometry, input, weight, bias);
  }
  const auto plan = make_plan(*form, input.scalar_type(), planner_);
  const bool direct = transposed ? direct_input_grad(plan) : plan.forward == Strategy::kDirect;
  if (direct && stock_pads(geometry)) {
    return stock_.convolution(geometry, input, weight, bias);
  }
  const auto result = transposed ? input_grad(plan, *form, append_zeros(*form, input), weight)
                                 : forward(plan, *form, input, weight);
  return add_bias(result, bias);
}

Gradients Overrideable::convolution_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> output_mask) const {
  const Geometry geometry(
      weight, stride, padding, dilation, transposed, output_padding, std::move(groups));
  check_backward(geometry, grad_output, input, weight);
  const auto form = make_form(geometry, input.sym_sizes(), weight.sym_sizes());
  if (!form) {
    const bool grouped = output_mask[1] && geometry.groups != 1;
    auto gradients = stock_.convolution_backward(
        geometry, grad_output, input, weight, {output_mask[0], output_mask[1] && !grouped, false});
    if (grouped) {
      std::get<1>(gradients) =
          lowering::ungrouped::weight_grad(stock_, geometry, grad_output, input, weight);
    }
    if (output_mask[2]) {
      std::get<2>(gradients) = bias_grad(grad_output);
    }
    return gradients;
  }
  const auto plan = make_plan(*form, input.scalar_type(), planner_);
  const bool direct_input = transposed ? plan.forward == Strategy::kDirect : direct_input_grad(plan);
  const bool direct_weight = plan.weight_grad == Strategy::kDirect;
  if (stock_pads(geometry) && (direct_input || !output_mask[0]) && (direct_weight || !output_mask[1])) {
    auto gradients = stock_.convolution_backward(geometry, grad_output, input, weight, output_mask);
    if (output_mask[2] && c10::isReducedFloatingType(grad_output.scalar_type())) {
      std::get<2>(gradients) = bias_grad(grad_output);
    }
    return gradients;
  }

  const auto appended = transposed ? append_zeros(*form, input) : input;
  Gradients gradients;
  if (output_mask[0]) {
    const at::DimVector sizes(input.sizes());
    std::get<0>(gradients) = transposed ? cut_to(forward(plan, *form, grad_output, weight), sizes)
                                        : input_grad(plan, *form, grad_output, weight);
  }
  if (output_mask[1]) {
    std::get<1>(gradients) = transposed ? weight_grad(plan, *form, grad_output, appended)
                                        : weight_grad(plan, *form, appended, grad_output);
  }
  if (output_mask[2]) {
    std::get<2>(gradients) = bias_grad(grad_output);
  }
  return gradients;
}

bool Overrideable::stock_pads(const Geometry& geometry) const {
  return !geometry.transposed || output_padding_ == OutputPadding::kNative;
}

at::Tensor Overrideable::forward(
    const Plan& plan, const Form& form, const at::Tensor& x, const at::Tensor& w) const {
  switch (plan.forward) {
    case Strategy::kTaps:
      return lowering::taps::forward(form, x, w);
    case Strategy::kMerged:
      return lowering::merged::forward(stock_, form, plan.merge.forward, x, w);
    default:
      return stock_.forward(form, x, w);
  }
}

at::Tensor Overrideable::input_grad(
    const Plan& plan, const Form& form, const at::Tensor& g, const at::Tensor& w) const {
  const auto unphased = [&](const Form& form, const at::Tensor& g, const at::Tensor& w) {
    switch (plan.input_grad) {
      case Strategy::kTaps:
        return lowering::taps::input_grad(form, g, w);
      case Strategy::kMerged:
        return lowering::merged::input_grad(stock_, form, plan.merge.input_grad, g, w);
      default:
        return stock_.input_grad(form, g, w);
    }
  };
  return plan.phased ? lowering::phased::input_grad(form, g, w, unphased) : unphased(form, g, w);
}

at::Tensor Overrideable::weight_grad(
    const Plan& plan, const Form& form, const at::Tensor& x, const at::Tensor& g) const {
  switch (plan.weight_grad) {
    case Strategy::kTaps:
      return lowering::taps::weight_grad(form, x, g);
    case Strategy::kFeatureGrouped:
      return lowering::feature_grouped::weight_grad(stock_, form, x, g);
    case Strategy::kMerged:
      return lowering::merged::weight_grad(stock_, form, plan.merge.weight_grad, x, g);
    case Strategy::kDirect:
      break;
  }
  return stock_.weight_grad(form, x, g);
}

}  // namespace torch_convfix
