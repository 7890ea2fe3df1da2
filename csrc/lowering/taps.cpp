#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/permute_copy.h>
#include <ATen/ops/slice_copy.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/unsqueeze_copy.h>
#include <ATen/ops/view_copy.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "lowering.h"

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

// Calls visit(index) for every index of a box of `sizes`, the last dimension fastest.
template <class Visit>
void for_each_index(at::IntArrayRef sizes, Visit visit) {
  at::DimVector index(sizes.size(), 0);
  const int64_t count = c10::multiply_integers(sizes);
  for (int64_t n = 0; n < count; ++n) {
    visit(index);
    for (auto i = static_cast<int64_t>(sizes.size()) - 1; i >= 0 && ++index[i] == sizes[i]; --i) {
      index[i] = 0;
    }
  }
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

// x[j] receives g[o] * w[t] where o * stride + t * dilation - padding = j. So the positions j of one
// residue (j + padding) mod stride have taps of their own, and are a sum over those of shifted g; the
// residues' results are then interleaved. No product with a zero of an upsampled g is ever made.
at::Tensor input_grad(const Form& form, const at::Tensor& g, const at::Tensor& w) {
  const int64_t dim = form.dim();
  const auto weights = split_weight(form, widen(w));
  // Per dimension: phase r holds padded positions r, r + stride, ..., `length` of them. Tap t sends
  // g[o] to position o + shift of phase r, where t * dilation = shift * stride + r.
  at::DimVector length(dim), before(dim), after(dim);
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t positions = form.x[i + 2] + 2 * form.padding[i];
    length[i] = (positions + form.stride[i] - 1) / form.stride[i];
    before[i] = (form.w[i + 2] - 1) * form.dilation[i] / form.stride[i];
    after[i] = std::max<int64_t>(length[i] - form.g[i + 2], 0);
  }
  const auto padded = pad_spatial(split_channels(form, widen(g)), before, after);

  std::vector<at::Tensor> phases;
  for_each_index(form.stride, [&](at::IntArrayRef residue) {
    at::Tensor sum;
    for_each_index(at::IntArrayRef(form.w).slice(2), [&](at::IntArrayRef tap) {
      auto part = padded;
      for (int64_t i = 0; i < dim; ++i) {
        const int64_t offset = tap[i] * form.dilation[i];
        if (offset % form.stride[i] != residue[i]) {
          return;
        }
        const int64_t start = before[i] - offset / form.stride[i];
        part = at::slice_copy(part, i + 3, start, start + length[i]);
      }
      const auto product = part * tap_of(weights, tap);
      sum = sum.defined() ? sum + product : product;
    });
    if (sum.defined()) {
      sum = sum.sum(2);  // over the multiplier
    } else {
      at::DimVector sizes{form.x[0], form.x[1]};
      sizes.append(length.begin(), length.end());
      sum = at::zeros(sizes, padded.options());
    }
    phases.push_back(sum);
  });

  // [*stride residues, N, C, *length] -> [N, C, length, residue, length, residue, ...]
  at::Tensor x = phases[0];
  if (phases.size() > 1) {
    at::DimVector sizes(form.stride.begin(), form.stride.end());
    sizes.append({form.x[0], form.x[1]});
    sizes.append(length.begin(), length.end());
    at::DimVector order{dim, dim + 1}, joined{form.x[0], form.x[1]};
    for (int64_t i = 0; i < dim; ++i) {
      order.push_back(dim + 2 + i);
      order.push_back(i);
      joined.push_back(length[i] * form.stride[i]);
    }
    x = at::view_copy(at::permute_copy(at::view_copy(at::stack(phases), sizes), order), joined);
  }
  for (int64_t i = 0; i < dim; ++i) {
    x = at::slice_copy(x, i + 2, form.padding[i], form.padding[i] + form.x[i + 2]);
  }
  return x.to(g.scalar_type());
}

}  // namespace torch_convfix::lowering::taps
