#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/where.h>

#include <numeric>

#include "derivatives/fixes.h"
#include "dynamic/dynamic.h"

namespace torch_convfix {
namespace {

at::Tensor linear(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  auto rows = input;
  if (input.dim() != 2) {
    c10::SymInt number = 1;
    for (int64_t i = 0; i + 1 < input.dim(); ++i) {
      number = number * sizes[i];
    }
    rows = input.reshape_symint({number, sizes.back()});
  }
  const auto matrix = weight.t();
  const auto result = bias && bias->defined() ? at::addmm(*bias, rows, matrix) : at::mm(rows, matrix);
  sizes.back() = weight.sym_size(0);
  return input.dim() == 2 ? result : result.reshape_symint(sizes);
}

bool defined(const std::optional<at::Tensor>& t) {
  return t && t->defined();
}

at::Tensor batch_norm(
    const at::Tensor& input,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var,
    bool training,
    double momentum,
    double eps,
    bool /*cudnn_enabled*/) {
  at::DimVector dims{0}, channels(input.dim(), 1);
  for (int64_t i = 2; i < input.dim(); ++i) {
    dims.push_back(i);
  }
  channels[1] = input.sym_size(1).expect_int();
  at::Tensor mean, var;
  if (training) {
    std::tie(var, mean) = at::var_mean(input, dims, /*correction=*/0, /*keepdim=*/false);
    const at::NoGradGuard no_grad;
    if (defined(running_mean)) {
      running_mean->lerp_(mean.to(running_mean->scalar_type()), momentum);
    }
    if (defined(running_var)) {
      const auto unbiased = input.var(dims, /*correction=*/1, /*keepdim=*/false);
      running_var->lerp_(unbiased.to(running_var->scalar_type()), momentum);
    }
  } else {
    mean = *running_mean;
    var = *running_var;
  }
  auto scale = (var + eps).rsqrt();
  if (defined(weight)) {
    scale = scale * *weight;
  }
  const auto result = (input - mean.view(channels)) * scale.view(channels);
  return defined(bias) ? result + bias->view(channels) : result;
}

at::Tensor normalise(const at::Tensor& t, at::IntArrayRef dims, double eps) {
  const auto [var, mean] = at::var_mean(t, dims, /*correction=*/0, /*keepdim=*/true);
  return (t - mean) * (var + eps).rsqrt();
}

at::Tensor layer_norm(
    const at::Tensor& input,
    c10::SymIntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    double eps,
    bool /*cudnn_enable*/) {
  at::DimVector dims(normalized_shape.size());
  std::iota(dims.begin(), dims.end(), input.dim() - static_cast<int64_t>(dims.size()));
  auto result = normalise(input, dims, eps);
  if (defined(weight)) {
    result = result * *weight;
  }
  return defined(bias) ? result + *bias : result;
}

at::Tensor group_norm(
    const at::Tensor& input,
    int64_t num_groups,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    double eps,
    bool /*cudnn_enabled*/) {
  const int64_t channels = input.sym_size(1).expect_int();
  TORCH_CHECK(
      channels % num_groups == 0, "group_norm: the channels, ", channels,
      ", must be divisible by num_groups, got ", num_groups);
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  auto grouped = sizes;
  grouped[1] = channels / num_groups;
  grouped.insert(grouped.begin() + 1, num_groups);
  at::DimVector dims(input.dim() - 1), one(input.dim(), 1);
  std::iota(dims.begin(), dims.end(), 2);
  one[1] = channels;
  auto result = normalise(input.reshape_symint(grouped), dims, eps).reshape_symint(sizes);
  if (defined(weight)) {
    result = result * weight->view(one);
  }
  return defined(bias) ? result + bias->view(one) : result;
}

// Whole windows alone: there it is an average pool.
at::Tensor adaptive_avg_pool2d(const at::Tensor& self, c10::SymIntArrayRef output_size) {
  at::DimVector window;
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t in = self.sym_size(i - 2).expect_int(), out = output_size[i].expect_int();
    TORCH_CHECK(
        out > 0 && in % out == 0,
        "adaptive_avg_pool2d: with a bounded-dynamic batch, output_size must "
        "divide the input's size, got ",
        output_size, " for input ", self.sym_sizes());
    window.push_back(in / out);
  }
  return at::avg_pool2d(self, window);
}

at::Tensor prelu(const at::Tensor& self, const at::Tensor& weight) {
  at::DimVector sizes(self.dim(), 1);
  if (self.dim() > 1) {
    sizes[1] = weight.numel();
  }
  return at::where(self > 0, self, self * weight.view(sizes));
}

// Along one dimension: output o is input floor(o * ratio). A whole factor repeats, whose derivative is a
// sum; another gathers.
at::Tensor stretch(const at::Tensor& t, int64_t dim, int64_t size, std::optional<double> scale) {
  const int64_t own = t.sym_size(dim).expect_int();
  if (size == own && (!scale || *scale == 1)) {
    return t;
  }
  if (size % own == 0 && (!scale || *scale == static_cast<double>(size / own))) {
    c10::SymDimVector sizes(t.sym_sizes().begin(), t.sym_sizes().end());
    auto joined = sizes;
    sizes.insert(sizes.begin() + dim + 1, size / own);
    joined[dim] = size;
    return t.unsqueeze(dim + 1).expand_symint(sizes).reshape_symint(joined);
  }
  const auto ratio = static_cast<float>(
      scale && *scale > 0 ? 1 / *scale : static_cast<double>(own) / static_cast<double>(size));
  const auto steps = at::arange(size, t.options().dtype(at::kFloat));
  return at::index_select(t, dim, (steps * ratio).floor().clamp_max(own - 1).to(at::kLong));
}

at::Tensor upsample_nearest2d(
    const at::Tensor& input,
    at::OptionalSymIntArrayRef output_size,
    std::optional<at::ArrayRef<double>> scale_factors) {
  auto result = input;
  for (int64_t i = 0; i < 2; ++i) {
    const auto scale = scale_factors ? std::make_optional((*scale_factors)[i]) : std::nullopt;
    const auto size =
        output_size
            ? (*output_size)[i].expect_int()
            : static_cast<int64_t>(static_cast<double>(input.sym_size(i + 2).expect_int()) * *scale);
    result = stretch(result, i + 2, size, scale);
  }
  return result;
}

at::Tensor mse_loss(const at::Tensor& self, const at::Tensor& target, int64_t reduction) {
  return reduce_loss((self - target).square(), reduction);
}

at::Tensor binary_cross_entropy_with_logits(
    const at::Tensor& self,
    const at::Tensor& target,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& pos_weight,
    int64_t reduction) {
  auto log_sigmoid = at::log_sigmoid(self);
  if (defined(pos_weight)) {
    log_sigmoid = log_sigmoid * ((*pos_weight - 1) * target + 1);
  }
  auto loss = self - target * self - log_sigmoid;
  if (defined(weight)) {
    loss = loss * *weight;
  }
  return reduce_loss(loss, reduction);
}

}  // namespace

std::vector<DynamicFix> dynamic_layers() {
  return {
      {"linear", kAutograd, kRefused, compose<&linear>},
      {"batch_norm", kAutograd, kBound, compose<&batch_norm>},
      {"layer_norm", kAutograd, kRefused, compose<&layer_norm>},
      {"group_norm", kAutograd, kRefused, compose<&group_norm>},
      {"adaptive_avg_pool2d", kAutograd, kRefused, compose<&adaptive_avg_pool2d>},
      {"prelu", kAutograd, kRefused, compose<&prelu>},
      {"upsample_nearest2d.vec", kAutograd, kRefused, compose<&upsample_nearest2d>},
      {"mse_loss", kAutograd, kBound, compose<&mse_loss>},
      {"binary_cross_entropy_with_logits", kAutograd, kBoth, compose<&binary_cross_entropy_with_logits>},
  };
}

}  // namespace torch_convfix
