#include <ATen/TensorOperators.h>
#include <ATen/ops/_cdist_backward_ops.h>
#include <ATen/ops/_cdist_forward.h>
#include <ATen/ops/_cdist_forward_ops.h>
#include <ATen/ops/_euclidean_dist_ops.h>
#include <ATen/ops/_pdist_backward_ops.h>
#include <ATen/ops/_pdist_forward.h>
#include <ATen/ops/_pdist_forward_ops.h>
#include <ATen/ops/triu_indices.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "derivatives/differentiable.h"
#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

// The derivative of the norm ||difference||_p = distance along the last dimension, as core's kernels
// have it: 0 where the distance is 0, and where a difference is 0; each of the maxima counts for p =
// inf. So are its own derivatives there, where they would not be finite. From d ||x||_p / dx = sign(x) *
// (|x| / ||x||_p) ^ (p - 1).
at::Tensor norm_derivative(const at::Tensor& difference, const at::Tensor& distance, double p) {
  if (p == 0 || difference.sym_numel() == 0) {
    return at::zeros_like(difference);
  }
  if (p == 1) {
    return difference.sign();
  }
  if (std::isinf(p)) {
    const auto size = difference.abs();
    return difference.sign().masked_fill(size < size.amax(-1, /*keepdim=*/true), 0);
  }
  const auto coincide = (distance == 0).unsqueeze(-1);
  const auto norm = distance.unsqueeze(-1).masked_fill(coincide, 1);
  if (std::fmod(p, 2) == 0) {  // no kink, and nothing to mask but coinciding points
    return (difference / norm).pow(p - 1).masked_fill(coincide, 0);
  }
  const auto kink = difference == 0;
  const auto ratio = difference.abs().masked_fill(kink, 1) / norm;
  return (difference.sign() * ratio.pow(p - 1)).masked_fill(kink, 0);
}

at::Tensor pairwise_difference(const at::Tensor& x1, const at::Tensor& x2) {
  return x1.unsqueeze(-2) - x2.unsqueeze(-3);
}

// A result that core saved has no tangent.
template <class Distance>
at::Tensor saved(const at::Tensor& result, bool differentiated_forward, Distance&& distance) {
  return differentiated_forward ? distance() : result;
}

constexpr int64_t kNotByProduct = 2;

at::Tensor cdist_backward(
    const at::Tensor& grad,
    const at::Tensor& x1,
    const at::Tensor& x2,
    double p,
    const at::Tensor& cdist) {
  const auto distance = saved(cdist, has_tangent(x1) || has_tangent(x2), [&] {
    return at::_cdist_forward(x1, x2, p, kNotByProduct);
  });
  const auto derivative = norm_derivative(pairwise_difference(x1, x2), distance, p);
  return (grad.unsqueeze(-1) * derivative).sum(-2);
}

at::Tensor tangent_or_zeros(const at::Tensor& t) {
  return has_tangent(t) ? t._fw_grad(/*level=*/0) : at::zeros_like(primal(t));
}

at::Tensor with_cdist_tangent(
    const at::Tensor& distance, const at::Tensor& x1, const at::Tensor& x2, double p) {
  const auto derivative = norm_derivative(pairwise_difference(primal(x1), primal(x2)), distance, p);
  const auto tangent = pairwise_difference(tangent_or_zeros(x1), tangent_or_zeros(x2));
  return with_tangent(distance, (derivative * tangent).sum(-1));
}

at::Tensor cdist_forward(
    const at::Tensor& distance,
    const at::Tensor& x1,
    const at::Tensor& x2,
    double p,
    std::optional<int64_t> /*compute_mode*/) {
  return with_cdist_tangent(distance, x1, x2, p);
}

at::Tensor euclidean_dist(const at::Tensor& distance, const at::Tensor& x1, const at::Tensor& x2) {
  if (distance.requires_grad()) {  // core's derivative takes the result that it saved
    return at::_cdist_forward(x1, x2, 2, kNotByProduct);
  }
  return with_cdist_tangent(distance, x1, x2, 2);
}

// The two points of each pair, in the order of pdist's result.
struct Pairs {
  at::Tensor first, second;

  explicit Pairs(const at::Tensor& self) {
    const auto n = self.size(0);
    const auto indices = at::triu_indices(n, n, 1, self.options().dtype(at::kLong).requires_grad(false));
    first = indices.select(0, 0);
    second = indices.select(0, 1);
  }

  at::Tensor difference(const at::Tensor& self) const {
    return self.index_select(0, first) - self.index_select(0, second);
  }
};

at::Tensor pdist_backward(
    const at::Tensor& grad, const at::Tensor& self, double p, const at::Tensor& pdist) {
  const Pairs pairs(self);
  const auto distance = saved(pdist, has_tangent(self), [&] { return at::_pdist_forward(self, p); });
  const auto pull = grad.unsqueeze(-1) * norm_derivative(pairs.difference(self), distance, p);
  const auto zeros = at::zeros_like(self);
  return zeros.index_add(0, pairs.first, pull) - zeros.index_add(0, pairs.second, pull);
}

at::Tensor pdist_forward(const at::Tensor& distance, const at::Tensor& self, double p) {
  const auto points = primal(self);
  const Pairs pairs(points);
  const auto derivative = norm_derivative(pairs.difference(points), distance, p);
  const auto tangent = pairs.difference(self._fw_grad(/*level=*/0));
  return with_tangent(distance, (derivative * tangent).sum(-1));
}

}  // namespace

torch::CppFunction make_cdist_forward() {
  return make_forward_rule<at::_ops::_cdist_forward, &cdist_forward>();
}

torch::CppFunction make_cdist_backward() {
  return make_differentiable<at::_ops::_cdist_backward, &cdist_backward>();
}

// functorch's own rule takes the result for one without a batch where only grad has one.
torch::CppFunction make_cdist_backward_under_vmap() {
  return make_fix<&cdist_backward>();
}

torch::CppFunction make_euclidean_dist() {
  return make_forward_rule<at::_ops::_euclidean_dist, &euclidean_dist>();
}

torch::CppFunction make_pdist_forward() {
  return make_forward_rule<at::_ops::_pdist_forward, &pdist_forward>();
}

// torch_xla computes the power of an infinite order.
torch::CppFunction make_infinite_pdist() {
  const auto stock = std::make_shared<Stock>("aten::_pdist_forward", "", c10::DispatchKey::XLA);
  return torch::CppFunction([stock](c10::DispatchKeySet keys, const at::Tensor& self, double p) {
    if (std::isinf(p) && self.size(0) > 1 && self.size(1) > 0) {
      return Pairs(self).difference(self).abs().amax(-1);
    }
    return (*stock)(keys, {self, p});
  });
}

torch::CppFunction make_pdist_backward() {
  return make_differentiable<at::_ops::_pdist_backward, &pdist_backward>();
}

}  // namespace torch_convfix
