#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/slice_copy.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/unsqueeze_copy.h>
#include <ATen/ops/view_copy.h>

#include <numeric>

#include "convolution/index.h"
#include "convolution/lowering/lowering.h"

// A depthwise convolution with channel multiplier m works on [N, C, m, *spatial]: x has m = 1, and
// w is [C, m, *k]. No channel is ever mixed with another.
namespace torch_convfix::lowering::taps {
namespace {

// Sums of products of half-precision numbers are kept in float32, as convolution kernels do.
at::Tensor widen(const at::Tensor& t) {
  return c10::isReducedFloatingType(t.scalar_type()) ? t.to(at::kFloat) : t;
}

// [N, K, *O] -> [N, C, m, *O]
at::Tensor split_channels(const Form& form, const at::Tensor& t) {
  at::DimVector sizes{form.g[0], form.groups, form.g[1] / form.groups};
  sizes.append(form.g.begin() + 2, form.g.end());
  return at::view_copy(t, sizes);
}

// [K, 1, *k] -> [C, m, *k]
at::Tensor split_weight(const Form& form, const at::Tensor& w) {
  at::DimVector sizes{form.groups, form.w[0] / form.groups};
  sizes.append(form.w.begin() + 2, form.w.end());
  return at::view_copy(w, sizes);
}

at::Tensor pad_spatial(const at::Tensor& t, at::IntArrayRef before, at::IntArrayRef after) {
  std::vector<int64_t> pads;
  for (auto i = static_cast<int64_t>(before.size()) - 1; i >= 0; --i) {
    pads.push_back(before[i]);
    pads.push_back(after[i]);
  }
  return at::constant_pad_nd(t, pads);
}

// w of one tap, shaped to multiply [N, C, m, *spatial].
at::Tensor tap_of(at::Tensor w, at::IntArrayRef tap) {
  for (size_t i = 0; i < tap.size(); ++i) {
    w = at::slice_copy(w, static_cast<int64_t>(i) + 2, tap[i], tap[i] + 1);
  }
  return w;
}

// The part of padded x that meets tap t: x[o * stride + t * dilation] for every o.
at::Tensor met_by(const Form& form, at::Tensor x, at::IntArrayRef tap) {
  for (int64_t i = 0; i < form.dim(); ++i) {
    const int64_t start = tap[i] * form.dilation[i];
    x = at::slice_copy(
        x, i + 3, start, start + (form.g[i + 2] - 1) * form.stride[i] + 1, form.stride[i]);
  }
  return x;
}

at::Tensor padded_input(const Form& form, const at::Tensor& x) {
  return at::unsqueeze_copy(pad_spatial(widen(x), form.padding, form.padding), 2);
}

}  // namespace

at::Tensor forward(const Form& form, const at::Tensor& x, const at::Tensor& w) {
  const auto padded = padded_input(form, x);
  const auto weights = split_weight(form, widen(w));
  at::Tensor sum;
  for_each_index(at::IntArrayRef(form.w).slice(2), [&](at::IntArrayRef tap) {
    const auto product = met_by(form, padded, tap) * tap_of(weights, tap);
    sum = sum.defined() ? sum + product : product;
  });
  return at::view_copy(sum, form.g).to(x.scalar_type());
}

at::Tensor weight_grad(const Form& form, const at::Tensor& x, const at::Tensor& g) {
  const auto padded = padded_input(form, x);
  const auto grad = split_channels(form, widen(g));
  std::vector<int64_t> reduced(form.dim() + 1);
  std::iota(reduced.begin() + 1, reduced.end(), 3);  // batch and spatial
  std::vector<at::Tensor> taps;
  for_each_index(at::IntArrayRef(form.w).slice(2), [&](at::IntArrayRef tap) {
    taps.push_back((met_by(form, padded, tap) * grad).sum(reduced));
  });
  return at::view_copy(at::stack(taps, -1), form.w).to(x.scalar_type());
}

// Stride 1: x[j] is the sum over taps of g[j + padding - t * dilation] * w[t].
at::Tensor input_grad(const Form& form, const at::Tensor& g, const at::Tensor& w) {
  const auto weights = split_weight(form, widen(w));
  at::DimVector before, after;
  for (int64_t i = 0; i < form.dim(); ++i) {
    const int64_t reach = form.dilation[i] * (form.w[i + 2] - 1) - form.padding[i];
    before.push_back(reach);
    after.push_back(reach);
  }
  const auto padded = pad_spatial(split_channels(form, widen(g)), before, after);
  at::Tensor sum;
  for_each_index(at::IntArrayRef(form.w).slice(2), [&](at::IntArrayRef tap) {
    auto part = padded;
    for (int64_t i = 0; i < form.dim(); ++i) {
      const int64_t start = (form.w[i + 2] - 1 - tap[i]) * form.dilation[i];
      part = at::slice_copy(part, i + 3, start, start + form.x[i + 2]);
    }
    const auto product = part * tap_of(weights, tap);
    sum = sum.defined() ? sum + product : product;
  });
  return sum.sum(2).to(g.scalar_type());  // over the multiplier
}

}  // namespace torch_convfix::lowering::taps
