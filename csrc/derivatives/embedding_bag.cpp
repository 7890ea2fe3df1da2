#include <ATen/TensorOperators.h>
#include <ATen/ops/_embedding_bag_backward_ops.h>
#include <ATen/ops/_embedding_bag_forward_only_ops.h>
#include <ATen/ops/_embedding_bag_ops.h>
#include <ATen/ops/_embedding_bag_per_sample_weights_backward_ops.h>
#include <ATen/ops/_embedding_bag_sparse_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "derivatives/differentiable.h"
#include "derivatives/fixes.h"

// From the documentation of torch.nn.functional.embedding_bag. Everything is linear in the rows and in
// the weights of the samples, so its derivatives are sums over bags and over rows in turn.
namespace torch_convfix {
namespace {

enum Mode : int64_t { kSum, kMean, kMax };

// Which bag each sample is in. Core leaves it out where its kernels do not need it.
at::Tensor bag_of_samples(
    const at::Tensor& indices, const at::Tensor& offsets, const at::Tensor& offset2bag) {
  if (offset2bag.numel() == indices.numel()) {
    return offset2bag.to(at::kLong);
  }
  const auto samples = at::arange(indices.numel(), offsets.options());
  return at::searchsorted(offsets, samples, /*out_int32=*/false, /*right=*/true) - 1;
}

at::Tensor without_padding(const at::Tensor& samples, const at::Tensor& indices, int64_t padding_idx) {
  return padding_idx < 0 ? samples : samples.masked_fill((indices == padding_idx).unsqueeze(-1), 0);
}

// The row of each entry's maximum, and whether its bag has none.
std::pair<at::Tensor, at::Tensor> rows_of_maxima(
    const at::Tensor& maximum_indices, const at::Tensor& bag_size) {
  const auto row = maximum_indices.to(at::kLong);
  return {row.clamp_min(0), (bag_size == 0).unsqueeze(-1).logical_or(row < 0)};
}

at::Tensor embedding_bag_backward(
    const at::Tensor& grad,
    const at::Tensor& indices,
    const at::Tensor& offsets,
    const at::Tensor& offset2bag,
    const at::Tensor& bag_size,
    const at::Tensor& maximum_indices,
    c10::SymInt num_weights,
    bool scale_grad_by_freq,
    int64_t mode,
    bool sparse,
    const std::optional<at::Tensor>& per_sample_weights,
    int64_t padding_idx) {
  const auto bag = bag_of_samples(indices, offsets, offset2bag);
  if (sparse) {
    return at::_embedding_bag_sparse_backward_symint(
        grad, indices, offsets, bag, bag_size, num_weights, scale_grad_by_freq, mode, per_sample_weights,
        padding_idx);
  }
  const auto zeros = at::zeros_symint({num_weights, grad.sym_size(-1)}, grad.options());
  if (mode == kMax) {
    const auto [row, empty] = rows_of_maxima(maximum_indices, bag_size);
    return zeros.scatter_add(0, row, grad.masked_fill(empty, 0));
  }
  auto samples = grad.index_select(0, bag);
  if (mode == kMean) {
    samples = samples / bag_size.clamp_min(1).index_select(0, bag).unsqueeze(-1);
  }
  if (per_sample_weights && per_sample_weights->defined()) {
    samples = samples * per_sample_weights->unsqueeze(-1);
  }
  if (scale_grad_by_freq) {
    const auto ones = at::ones(indices.sizes(), grad.options());
    const auto frequency = at::zeros_symint({num_weights}, grad.options()).index_add(0, indices, ones);
    samples = samples / frequency.index_select(0, indices).unsqueeze(-1);
  }
  return zeros.index_add(0, indices, without_padding(samples, indices, padding_idx));
}

at::Tensor embedding_bag_per_sample_weights_backward(
    const at::Tensor& grad,
    const at::Tensor& weight,
    const at::Tensor& indices,
    const at::Tensor& offsets,
    const at::Tensor& offset2bag,
    int64_t mode,
    int64_t padding_idx) {
  TORCH_CHECK(mode == kSum, "embedding_bag: per_sample_weights is for mode 0 (sum), got mode ", mode);
  const auto bag = bag_of_samples(indices, offsets, offset2bag);
  const auto samples = grad.index_select(0, bag) * weight.index_select(0, indices);
  return without_padding(samples, indices, padding_idx).sum(-1);
}

using Bags = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Bags embedding_bag(
    const Bags& results,
    const at::Tensor& weight,
    const at::Tensor& indices,
    const at::Tensor& offsets,
    bool /*scale_grad_by_freq*/,
    int64_t mode,
    bool /*sparse*/,
    const std::optional<at::Tensor>& per_sample_weights,
    bool /*include_last_offset*/,
    int64_t padding_idx) {
  const auto& [bags, offset2bag, bag_size, maximum_indices] = results;
  const auto rows = primal(weight);
  const auto scale = primal(per_sample_weights);
  auto tangent = at::zeros_like(bags);
  const auto bag = bag_of_samples(indices, offsets, offset2bag);
  const auto add = [&](const at::Tensor& samples) {
    tangent = tangent.index_add(0, bag, without_padding(samples, indices, padding_idx));
  };
  if (has_tangent(weight)) {
    const auto rows_tangent = weight._fw_grad(/*level=*/0);
    if (mode == kMax) {
      const auto [row, empty] = rows_of_maxima(maximum_indices, bag_size);
      tangent = rows_tangent.gather(0, row).masked_fill(empty, 0);
    } else {
      const auto samples = rows_tangent.index_select(0, indices);
      add(scale && scale->defined() ? samples * scale->unsqueeze(-1) : samples);
    }
    if (mode == kMean) {
      tangent = tangent / bag_size.clamp_min(1).unsqueeze(-1);
    }
  }
  if (has_tangent(per_sample_weights)) {
    add(rows.index_select(0, indices) * per_sample_weights->_fw_grad(/*level=*/0).unsqueeze(-1));
  }
  return {with_tangent(bags, tangent), offset2bag, bag_size, maximum_indices};
}

}  // namespace

torch::CppFunction make_embedding_bag() {
  return make_forward_rule<at::_ops::_embedding_bag, &embedding_bag>();
}

torch::CppFunction make_embedding_bag_forward_only() {
  return make_forward_rule<at::_ops::_embedding_bag_forward_only, &embedding_bag>();
}

torch::CppFunction make_embedding_bag_backward() {
  return make_differentiable<at::_ops::_embedding_bag_backward, &embedding_bag_backward>();
}

torch::CppFunction make_embedding_bag_per_sample_weights_backward() {
  return make_differentiable<
      at::_ops::_embedding_bag_per_sample_weights_backward,
      &embedding_bag_per_sample_weights_backward>();
}

}  // namespace torch_convfix
