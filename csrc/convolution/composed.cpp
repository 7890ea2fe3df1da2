#include "convolution/composed.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/slice.h>
#include <ATen/ops/slice_copy.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "convolution/index.h"
#include "convolution/lowering/lowering.h"

// With G groups, x [N, G * Cg, *H], w [G * Kg, Cg, T taps] and g [N, G * Kg, O positions]: the columns
// of x, what each tap meets at each position, turn F and W into a matrix product, and I of stride 1 is F
// of the turned weight.
namespace torch_convfix {
namespace {

// Sums of products of half-precision numbers are kept in float32.
at::Tensor widen(const at::Tensor& t) {
  return c10::isReducedFloatingType(t.scalar_type()) ? t.to(at::kFloat) : t;
}

at::Tensor slice(const at::Tensor& t, int64_t dim, int64_t start, int64_t end, int64_t step = 1) {
  if (start == 0 && end == t.size(dim) && step == 1) {
    return t;
  }
  // A view below functionalization is dear on XLA: see lowering.h.
  return t.is_xla() ? at::slice_copy(t, dim, start, end, step) : at::slice(t, dim, start, end, step);
}

at::Tensor pad_by(const at::Tensor& t, at::IntArrayRef padding) {
  if (std::all_of(padding.begin(), padding.end(), [](int64_t p) { return p == 0; })) {
    return t;
  }
  std::vector<int64_t> pads;
  for (auto p = padding.rbegin(); p != padding.rend(); ++p) {
    pads.insert(pads.end(), {*p, *p});
  }
  return at::constant_pad_nd(t, pads);
}

int64_t product(const at::DimVector& sizes) {
  return c10::multiply_integers(sizes.begin() + 2, sizes.end());
}

at::Tensor in_format_of(const at::Tensor& like, const at::Tensor& t) {
  return t.to(like.scalar_type()).contiguous(like.suggest_memory_format());
}

struct Columns {
  const Form& form;
  int64_t groups = form.groups, per_group = form.x[1] / groups, outputs = form.g[1] / groups;
  int64_t taps = product(form.w), positions = product(form.g);
  int64_t block_taps, block_samples;
  std::vector<at::DimVector> index;  // of each tap

  // In blocks: of a layer of a network all taps of some samples, of a huge image one tap of one sample.
  Columns(const Form& form_, const at::Tensor& like, int64_t block_bytes) : form(form_) {
    const int64_t one = std::max<int64_t>(1, form.x[1] * positions * like.element_size());
    block_taps = one * taps <= block_bytes && !like.is_xla() ? taps : 1;  // XLA fuses slices, no strides
    block_samples = std::clamp<int64_t>(block_bytes / (one * block_taps), 1, form.x[0]);
    for_each_index(at::IntArrayRef(form.w).slice(2), [&](at::IntArrayRef tap) {
      index.emplace_back(tap.begin(), tap.end());
    });
  }

  // The part of padded x that meets a tap: x[o * stride + t * dilation] for every o.
  at::Tensor met_by(at::Tensor x, int64_t tap) const {
    for (int64_t i = 0; i < form.dim(); ++i) {
      const int64_t start = index[tap][i] * form.dilation[i];
      const int64_t end = start + (form.g[i + 2] - 1) * form.stride[i] + 1;
      x = slice(x, i + 2, start, end, form.stride[i]);
    }
    return x;
  }

  // Those of all taps, [n, C, *k, *O], and with the samples behind the taps, [C, *k, n, *O].
  at::Tensor met_by_all(const at::Tensor& x, bool samples_last) const {
    at::DimVector sizes{form.x[1]}, strides{x.stride(1)};
    const auto samples = [&] {
      sizes.push_back(x.size(0));
      strides.push_back(x.stride(0));
    };
    if (!samples_last) {
      sizes = {x.size(0), form.x[1]};
      strides = {x.stride(0), x.stride(1)};
    }
    for (int64_t i = 2; i < x.dim(); ++i) {
      sizes.push_back(form.w[i]);
      strides.push_back(x.stride(i) * form.dilation[i - 2]);
    }
    if (samples_last) {
      samples();
    }
    for (int64_t i = 2; i < x.dim(); ++i) {
      sizes.push_back(form.g[i]);
      strides.push_back(x.stride(i) * form.stride[i - 2]);
    }
    return x.as_strided(sizes, strides);
  }

  // [n, C * block of taps, O]: of 1 x 1 without stride x itself, without a copy.
  at::Tensor by_sample(const at::Tensor& padded, int64_t first) const {
    const auto met = block_taps == 1 ? met_by(padded, first) : met_by_all(padded, false);
    return met.reshape({padded.size(0), form.x[1] * block_taps, positions});
  }

  // [G, Cg * block of taps, n * O].
  at::Tensor by_group(const at::Tensor& padded, int64_t first) const {
    const auto met = block_taps == 1 ? met_by(padded, first).transpose(0, 1) : met_by_all(padded, true);
    return met.reshape({groups, per_group * block_taps, padded.size(0) * positions});
  }

  // [G, Kg, Cg * block of taps] of w [K, Cg, T].
  at::Tensor weight(const at::Tensor& w, int64_t first) const {
    return slice(w, 2, first, first + block_taps).reshape({groups, outputs, per_group * block_taps});
  }

  // visit(first) for each block of taps, visit(first, last) for each block of samples.
  template <class Visit>
  void for_taps(Visit visit) const {
    for (int64_t first = 0; first < taps; first += block_taps) {
      visit(first);
    }
  }
  template <class Visit>
  void for_samples(Visit visit) const {
    for (int64_t first = 0; first < form.x[0]; first += block_samples) {
      visit(first, std::min(first + block_samples, form.x[0]));
    }
  }
};

void accumulate(at::Tensor& sum, at::Tensor term) {
  sum = sum.defined() ? sum + term : std::move(term);
}

// F of stride 1 by the turned weight: x[j] is the sum over taps of g[j + padding - t * dilation] * w[t].
at::Tensor unit_input_grad(
    const Composed& of, const Form& form, const at::Tensor& g, const at::Tensor& w) {
  Form turned = form;
  const int64_t groups = form.groups, outputs = form.g[1] / groups, inputs = form.x[1] / groups;
  turned.x = form.g;
  turned.g = form.x;
  turned.w = {form.x[1], outputs};
  turned.w.append(form.w.begin() + 2, form.w.end());
  at::DimVector split{groups, outputs, inputs}, spatial(form.dim());
  split.append(form.w.begin() + 2, form.w.end());
  std::iota(spatial.begin(), spatial.end(), 2);
  for (int64_t i = 0; i < form.dim(); ++i) {
    turned.padding[i] = form.dilation[i] * (form.w[i + 2] - 1) - form.padding[i];
  }
  const auto weight = at::flip(w, spatial).reshape(split).transpose(1, 2).reshape(turned.w);
  return of.forward(turned, g, weight);
}

}  // namespace

at::Tensor Composed::forward(const Form& form, const at::Tensor& x, const at::Tensor& w) const {
  if (form.x[0] == 0) {
    return at::zeros(form.g, x.options());
  }
  if (form.depthwise()) {  // a matrix product of one row a channel is slower than multiply-adds
    return in_format_of(x, lowering::taps::forward(form, x, w));
  }
  const auto padded = pad_by(widen(x), form.padding);
  const auto weights = widen(w).reshape({form.w[0], form.w[1], product(form.w)});
  const Columns columns(form, padded, block_bytes_);
  std::vector<at::Tensor> results;
  columns.for_samples([&](int64_t first, int64_t last) {
    const auto part = slice(padded, 0, first, last);
    const int64_t n = last - first;
    at::Tensor sum;
    columns.for_taps([&](int64_t tap) {
      const auto weight = columns.weight(weights, tap);
      if (form.groups == 1) {
        const auto each = weight.expand({n, weight.size(1), weight.size(2)});
        accumulate(sum, at::bmm(each, columns.by_sample(part, tap)));
      } else {  // one product a group: a weight for each sample and group would be copied
        accumulate(sum, at::bmm(weight, columns.by_group(part, tap)));
      }
    });
    if (form.groups != 1) {
      sum = sum.reshape({form.g[1], n, columns.positions}).transpose(0, 1);
    }
    at::DimVector sizes(form.g);
    sizes[0] = n;
    results.push_back(sum.reshape(sizes));
  });
  return in_format_of(x, results.size() == 1 ? results[0] : at::cat(results));
}

at::Tensor Composed::input_grad(const Form& form, const at::Tensor& g, const at::Tensor& w) const {
  if (form.x[0] == 0) {
    return at::zeros(form.x, g.options());
  }
  if (form.depthwise() || g.is_xla()) {  // without a write to a slice, which a lazy tensor has not
    const auto unit = [this](const Form& form, const at::Tensor& g, const at::Tensor& w) {
      return form.depthwise() ? lowering::taps::input_grad(form, g, w)
                              : unit_input_grad(*this, form, g, w);
    };
    return in_format_of(g, lowering::phased::input_grad(form, g, w, unit));
  }
  const auto grad = widen(g).reshape({form.g[0], form.g[1], product(form.g)});
  const auto weights = widen(w).reshape({form.w[0], form.w[1], product(form.w)});
  const Columns columns(form, grad, block_bytes_);
  at::DimVector sizes(form.x);
  for (int64_t i = 0; i < form.dim(); ++i) {
    sizes[i + 2] += 2 * form.padding[i];
  }
  auto padded = at::zeros(sizes, grad.options());
  columns.for_samples([&](int64_t first, int64_t last) {
    const auto part = slice(padded, 0, first, last);
    const int64_t n = last - first;
    const auto rows = slice(grad, 0, first, last);
    at::DimVector met_sizes{n, form.x[1], columns.block_taps};
    met_sizes.append(form.g.begin() + 2, form.g.end());
    columns.for_taps([&](int64_t tap) {
      const auto weight = columns.weight(weights, tap).transpose(1, 2);
      at::Tensor met;
      if (form.groups == 1) {
        met = at::bmm(weight.expand({n, weight.size(1), weight.size(2)}), rows);
      } else {
        met = at::bmm(
            weight, rows.transpose(0, 1).reshape({form.groups, columns.outputs, n * columns.positions}));
        met = met.reshape({form.x[1] * columns.block_taps, n, columns.positions}).transpose(0, 1);
      }
      met = met.reshape(met_sizes);
      for (int64_t i = 0; i < columns.block_taps; ++i) {
        columns.met_by(part, tap + i).add_(met.select(2, i));
      }
    });
  });
  for (int64_t i = 0; i < form.dim(); ++i) {
    padded = slice(padded, i + 2, form.padding[i], form.padding[i] + form.x[i + 2]);
  }
  return in_format_of(g, padded);
}

at::Tensor Composed::weight_grad(const Form& form, const at::Tensor& x, const at::Tensor& g) const {
  if (form.x[0] == 0) {
    return at::zeros(form.w, x.options());
  }
  if (form.depthwise()) {
    return lowering::taps::weight_grad(form, x, g);
  }
  const auto padded = pad_by(widen(x), form.padding);
  const auto grad = widen(g).reshape({form.g[0], form.g[1], product(form.g)});
  const Columns columns(form, padded, block_bytes_);
  at::Tensor sum;
  columns.for_samples([&](int64_t first, int64_t last) {
    const auto part = slice(padded, 0, first, last);
    // [G, Kg, n * O]: one long sum for each number.
    const auto rows =
        slice(grad, 0, first, last)
            .transpose(0, 1)
            .reshape({columns.groups, columns.outputs, (last - first) * columns.positions});
    std::vector<at::Tensor> taps;
    columns.for_taps([&](int64_t tap) {
      const auto met = columns.by_group(part, tap).transpose(1, 2);
      taps.push_back(at::bmm(rows, met).reshape({form.w[0], form.w[1], columns.block_taps}));
    });
    accumulate(sum, taps.size() == 1 ? taps[0] : at::cat(taps, 2));
  });
  return sum.reshape(form.w).to(x.scalar_type());
}

std::vector<std::string> needed_operators() {
  return {
      "aten::_reshape_alias",
      "aten::add.Tensor",
      "aten::add_.Tensor",
      "aten::as_strided",
      "aten::bmm",
      "aten::cat",
      "aten::empty.memory_format",
      "aten::empty_strided",
      "aten::fill_.Scalar",
      "aten::mul.Tensor",
      "aten::permute_copy",
      "aten::slice_copy.Tensor",
      "aten::sum.dim_IntList",
      "aten::unsqueeze_copy",
      "aten::view",
      "aten::view_copy",
      "aten::zero_"};
}

namespace {

Form known_form(const Geometry& geometry, const at::Tensor& input, const at::Tensor& weight) {
  auto form = make_form(geometry, input.sym_sizes(), weight.sym_sizes());
  TORCH_CHECK(
      form, "convolution: composed convolutions need sizes that are known, got input ",
      input.sym_sizes(), " and weight ", weight.sym_sizes());
  return *std::move(form);
}

}  // namespace

at::Tensor Composed::convolution(
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
  const auto form = known_form(geometry, input, weight);
  return torch_convfix::convolution(*this, form, transposed, input, weight, bias);
}

Gradients Composed::convolution_backward_overrideable(
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
  const auto form = known_form(geometry, input, weight);
  return torch_convfix::convolution_backward(
      *this, form, transposed, grad_output, input, weight, output_mask);
}

Gradients Composed::convolution_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::OptionalSymIntArrayRef /*bias_sizes*/,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> output_mask) const {
  return convolution_backward_overrideable(
      grad_output, input, weight, stride, padding, dilation, transposed, output_padding,
      std::move(groups), output_mask);
}

}  // namespace torch_convfix
