#include <ATen/TensorOperators.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones_like.h>

#include "dynamic/dynamic.h"

namespace torch_convfix {
namespace {

// How many elements of `t` each element of its sum over `dim` has. A symbolic size in arithmetic with a
// tensor would count as its bound.
at::Tensor count(const at::Tensor& t, at::OptionalIntArrayRef dim, bool keepdim) {
  const auto dtype = t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::ones_like(t.detach(), t.options().dtype(dtype)).sum(dim, keepdim);
}

at::Tensor mean_dim(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    bool keepdim,
    std::optional<at::ScalarType> dtype) {
  const auto sum = self.sum(dim, keepdim, dtype);
  return sum / count(self, dim, keepdim).to(sum.scalar_type());
}

at::Tensor mean(const at::Tensor& self, std::optional<at::ScalarType> dtype) {
  return mean_dim(self, std::nullopt, false, dtype);
}

std::tuple<at::Tensor, at::Tensor> moments(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  const auto centred = self - mean_dim(self, dim, true, std::nullopt);
  const auto freedom = count(self, dim, keepdim) - correction.value_or(1);
  return {
      centred.square().sum(dim, keepdim) / freedom.clamp_min(0).to(self.scalar_type()),
      mean_dim(self, dim, keepdim, std::nullopt)};
}

at::Tensor variance(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  return std::get<0>(moments(self, dim, correction, keepdim));
}

at::Tensor deviation(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  return variance(self, dim, correction, keepdim).sqrt();
}

at::Tensor log_softmax(const at::Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  const auto x = self.to(dtype.value_or(self.scalar_type()));
  return x - at::logsumexp(x, dim, /*keepdim=*/true);
}

}  // namespace

std::vector<DynamicFix> dynamic_reductions() {
  return {
      {"mean", kAutograd, kBound, compose<&mean>},
      {"mean.dim", kAutograd, kBound, compose<&mean_dim>},
      {"var.correction", kAutograd, kBound, compose<&variance>},
      {"std.correction", kAutograd, kBound, compose<&deviation>},
      {"var_mean.correction", kAutograd, kBound, compose<&moments>},
      {"log_softmax.int", kAutograd, kRefused, compose<&log_softmax>},
  };
}

}  // namespace torch_convfix
