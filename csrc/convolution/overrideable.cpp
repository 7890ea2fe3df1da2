#include "convolution/overrideable.h"

#include "convolution/lowering/lowering.h"
#include "convolution/traced_shapes.h"

namespace torch_convfix {
namespace {

// Each of the three by the strategy of a plan.
class Planned final : public Trilinear {
 public:
  Planned(const StockKernels& stock, const Plan& plan) : stock_(stock), plan_(plan) {
  }

  at::Tensor forward(const Form& form, const at::Tensor& x, const at::Tensor& w) const override {
    switch (plan_.forward) {
      case Strategy::kTaps:
        return lowering::taps::forward(form, x, w);
      case Strategy::kMerged:
        return lowering::merged::forward(stock_, form, plan_.merge.forward, x, w);
      default:
        return stock_.forward(form, x, w);
    }
  }

  at::Tensor input_grad(const Form& form, const at::Tensor& g, const at::Tensor& w) const override {
    const auto unphased = [&](const Form& form, const at::Tensor& g, const at::Tensor& w) {
      switch (plan_.input_grad) {
        case Strategy::kTaps:
          return lowering::taps::input_grad(form, g, w);
        case Strategy::kMerged:
          return lowering::merged::input_grad(stock_, form, plan_.merge.input_grad, g, w);
        default:
          return stock_.input_grad(form, g, w);
      }
    };
    return plan_.phased ? lowering::phased::input_grad(form, g, w, unphased) : unphased(form, g, w);
  }

  at::Tensor weight_grad(const Form& form, const at::Tensor& x, const at::Tensor& g) const override {
    switch (plan_.weight_grad) {
      case Strategy::kTaps:
        return lowering::taps::weight_grad(form, x, g);
      case Strategy::kFeatureGrouped:
        return lowering::feature_grouped::weight_grad(stock_, form, x, g);
      case Strategy::kMerged:
        return lowering::merged::weight_grad(stock_, form, plan_.merge.weight_grad, x, g);
      case Strategy::kDirect:
        break;
    }
    return stock_.weight_grad(form, x, g);
  }

 private:
  const StockKernels& stock_;
  const Plan& plan_;
};

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
  return torch_convfix::convolution(Planned(stock_, plan), *form, transposed, input, weight, bias);
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
  return torch_convfix::convolution_backward(
      Planned(stock_, plan), *form, transposed, grad_output, input, weight, output_mask);
}

bool Overrideable::stock_pads(const Geometry& geometry) const {
  return !geometry.transposed || output_padding_ == OutputPadding::kNative;
}

}  // namespace torch_convfix
