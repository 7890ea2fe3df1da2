#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/permute_copy.h>
#include <ATen/ops/slice_copy.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_copy.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "convolution/index.h"
#include "convolution/lowering/lowering.h"

namespace torch_convfix::lowering::phased {
namespace {

// The taps t of one dimension with t * dilation = residue (mod stride): first, first + step, ...
struct Progression {
  int64_t first, step, count, dilation, shift;

  Progression(int64_t kernel, int64_t stride, int64_t dilation_, int64_t residue) {
    const int64_t common = std::gcd(stride, dilation_);
    step = stride / common;
    dilation = dilation_ / common;
    for (first = 0; first < step && first * dilation_ % stride != residue; ++first) {
    }
    count = first == step || first >= kernel ? 0 : (kernel - first + step - 1) / step;
    shift = (first * dilation_ - residue) / stride;
  }
};

}  // namespace

// x[j] receives g[o] * w[t] where o * stride + t * dilation - padding = j. So the padded positions
// j + padding = q * stride + residue of one residue have taps of their own, and are the input gradient
// of a convolution of stride 1 by those; the residues' results are then interleaved. No product with a
// zero of an upsampled g is made, and a NaN stays where it belongs.
at::Tensor input_grad(
    const Form& form, const at::Tensor& g, const at::Tensor& w, const InputGrad& input_grad) {
  const int64_t dim = form.dim();
  at::DimVector length;  // of each phase
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t positions = form.x[i + 2] + 2 * form.padding[i];
    length.push_back((positions + form.stride[i] - 1) / form.stride[i]);
  }
  at::DimVector phase_sizes{form.x[0], form.x[1]};
  phase_sizes.append(length.begin(), length.end());

  std::vector<at::Tensor> phases;
  for_each_index(form.stride, [&](at::IntArrayRef residue) {
    Form unit = form;
    auto weight = w;
    std::vector<int64_t> pads(2 * dim);
    for (int64_t i = 0; i < dim; ++i) {
      const Progression taps(form.w[i + 2], form.stride[i], form.dilation[i], residue[i]);
      if (taps.count == 0) {
        phases.push_back(at::zeros(phase_sizes, g.options()));
        return;
      }
      unit.stride[i] = 1;
      unit.padding[i] = 0;
      unit.dilation[i] = taps.dilation;
      unit.w[i + 2] = taps.count;
      unit.x[i + 2] = form.g[i + 2] + taps.dilation * (taps.count - 1);
      weight = at::slice_copy(weight, i + 2, taps.first, std::nullopt, taps.step);
      pads[2 * (dim - 1 - i)] = taps.shift;
      pads[2 * (dim - 1 - i) + 1] = length[i] - taps.shift - unit.x[i + 2];
    }
    phases.push_back(at::constant_pad_nd(input_grad(unit, g, weight), pads));
  });

  // [*residues, N, C, *length] -> [N, C, length, residue, length, residue, ...]
  at::DimVector sizes(form.stride.begin(), form.stride.end());
  sizes.append(phase_sizes.begin(), phase_sizes.end());
  at::DimVector order{dim, dim + 1}, joined{form.x[0], form.x[1]};
  for (int64_t i = 0; i < dim; ++i) {
    order.push_back(dim + 2 + i);
    order.push_back(i);
    joined.push_back(length[i] * form.stride[i]);
  }
  auto x = at::view_copy(at::permute_copy(at::view_copy(at::stack(phases), sizes), order), joined);
  for (int64_t i = 0; i < dim; ++i) {
    x = at::slice_copy(x, i + 2, form.padding[i], form.padding[i] + form.x[i + 2]);
  }
  return x;
}

}  // namespace torch_convfix::lowering::phased
