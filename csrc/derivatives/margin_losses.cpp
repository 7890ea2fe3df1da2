#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/multi_margin_loss_backward_ops.h>
#include <ATen/ops/multi_margin_loss_ops.h>
#include <ATen/ops/multilabel_margin_loss_backward_ops.h>
#include <ATen/ops/multilabel_margin_loss_forward_ops.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/zeros_like.h>

#include "derivatives/differentiable.h"
#include "derivatives/fixes.h"

// The formulas are those in the documentation of torch.nn.MultiMarginLoss and MultiLabelMarginLoss.
namespace torch_convfix {
namespace {

at::Tensor batched(const at::Tensor& t) {
  return t.dim() < 2 ? t.reshape({1, -1}) : t;
}

// What a hinge of each sample adds to the loss, times grad_output: a column.
at::Tensor per_hinge(const at::Tensor& grad_output, const at::Tensor& self, int64_t reduction) {
  const auto samples = batched(self);
  const auto n = static_cast<double>(samples.size(0)), classes = static_cast<double>(samples.size(1));
  const auto scale = grad_output.reshape({-1, 1}) / classes;
  return reduction == at::Reduction::Mean ? scale / n : scale;
}

// With the Jacobian times self's tangent, from the gradient of the sum.
at::Tensor with_loss_tangent(
    const at::Tensor& loss, const at::Tensor& gradient, const at::Tensor& self) {
  const auto products = gradient * self._fw_grad(/*level=*/0);
  return with_tangent(loss, loss.dim() == 0 ? products.sum() : products.sum(-1));
}

at::Tensor multi_margin_loss_gradient(
    const at::Tensor& grad_output,
    const at::Tensor& self,
    const at::Tensor& target,
    const at::Scalar& p,
    const at::Scalar& margin,
    const std::optional<at::Tensor>& weight,
    int64_t reduction) {
  const auto x = batched(self);
  const auto label = target.reshape({-1, 1});
  const auto classes = at::arange(x.size(1), label.options());
  const auto own = classes == label;
  const auto hinge = x - x.gather(1, label) + margin;
  auto scale = per_hinge(grad_output, self, reduction);
  if (weight && weight->defined()) {
    scale = scale * weight->index_select(0, label.flatten()).unsqueeze(-1);
  }
  // Of hinge too, if only by a derivative that is zero.
  auto pull = at::threshold_backward(scale.expand_as(hinge), hinge, 0);
  if (p.toDouble() == 2) {
    pull = pull * hinge * 2;
  }
  pull = pull.masked_fill(own, 0);
  return (pull - own * pull.sum(1, /*keepdim=*/true)).reshape(self.sizes());
}

at::Tensor multi_margin_loss(
    const at::Tensor& loss,
    const at::Tensor& self,
    const at::Tensor& target,
    const at::Scalar& p,
    const at::Scalar& margin,
    const std::optional<at::Tensor>& weight,
    int64_t reduction) {
  const auto gradient = multi_margin_loss_gradient(
      at::ones_like(loss), primal(self), target, p, margin, weight, reduction);
  return with_loss_tangent(loss, gradient, self);
}

at::Tensor multilabel_margin_loss_gradient(
    const at::Tensor& grad_output,
    const at::Tensor& self,
    const at::Tensor& target,
    int64_t reduction,
    const at::Tensor& is_target) {
  const auto x = batched(self), labels = batched(target);
  // The labels end at the first negative one.
  const auto listed = (labels >= 0).to(at::kLong).cumprod(1).unsqueeze(-1);
  const auto index = labels.clamp_min(0);
  // [samples, labels, classes]
  const auto hinge = x.unsqueeze(1) - x.gather(1, index).unsqueeze(-1) + 1;
  const auto counts = listed * (batched(is_target).unsqueeze(1) == 0);
  const auto scale = per_hinge(grad_output, self, reduction).unsqueeze(-1) * counts;
  const auto pull = at::threshold_backward(scale, hinge, 0);
  return pull.sum(1).scatter_add(1, index, -pull.sum(2)).reshape(self.sizes());
}

std::tuple<at::Tensor, at::Tensor> multilabel_margin_loss_forward(
    const std::tuple<at::Tensor, at::Tensor>& results,
    const at::Tensor& self,
    const at::Tensor& target,
    int64_t reduction) {
  const auto& [loss, is_target] = results;
  const auto gradient =
      multilabel_margin_loss_gradient(at::ones_like(loss), primal(self), target, reduction, is_target);
  return {with_loss_tangent(loss, gradient, self), is_target};
}

}  // namespace

torch::CppFunction make_multi_margin_loss() {
  return make_forward_rule<at::_ops::multi_margin_loss, &multi_margin_loss>();
}

torch::CppFunction make_multi_margin_loss_backward() {
  return make_differentiable<at::_ops::multi_margin_loss_backward, &multi_margin_loss_gradient>();
}

torch::CppFunction make_multilabel_margin_loss() {
  return make_forward_rule<at::_ops::multilabel_margin_loss_forward, &multilabel_margin_loss_forward>();
}

torch::CppFunction make_multilabel_margin_loss_backward() {
  return make_differentiable<
      at::_ops::multilabel_margin_loss_backward, &multilabel_margin_loss_gradient>();
}

}  // namespace torch_convfix
