#include <ATen/TensorOperators.h>
#include <ATen/ops/adaptive_max_pool2d_backward_ops.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/slice.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "convolution/index.h"
#include "derivatives/differentiable.h"
#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

// torch_xla's own autograd function has a backward that is not differentiable; the operators that
// return the indices too keep core's formula, and the indices are computed only where they are used.
template <auto pool>
at::Tensor values(
    const at::Tensor& self,
    at::IntArrayRef kernel_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool ceil_mode) {
  return std::get<0>(pool(self, kernel_size, stride, padding, dilation, ceil_mode));
}

// A max pool's gradient as selections, a linear function of grad_output that differentiates into
// selections again. Core's derivative of the gradient asks for the indices of the maxima, which
// torch_xla computes in a loop that visits one output at a time.
at::Tensor select_maxima(
    const at::Tensor& grad_output,
    const at::Tensor& self,
    at::IntArrayRef kernel_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation) {
  const auto dim = static_cast<int64_t>(kernel_size.size());
  const auto size = last_sizes(self, dim), out = last_sizes(grad_output, dim);
  // Padded position o * stride + t * dilation is position o + t * dilation / stride of the phase
  // t * dilation % stride; a phase has `length` positions.
  at::DimVector length(dim), after(dim), none(dim, 0);
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t reached = (out[i] - 1) * stride[i] + (kernel_size[i] - 1) * dilation[i] + 1;
    length[i] = (std::max(reached, size[i] + padding[i]) + stride[i] - 1) / stride[i];
    after[i] = length[i] * stride[i] - size[i] - padding[i];
  }
  const auto padded = pad_last(self, padding, after, -std::numeric_limits<double>::infinity());
  const auto inside = pad_last(at::ones(size, self.options().dtype(at::kBool)), padding, after, false);
  const auto met_by = [&](at::Tensor t, at::IntArrayRef tap) {
    for (int64_t i = 0; i < dim; ++i) {
      const int64_t start = tap[i] * dilation[i];
      t = at::slice(t, i - dim, start, start + (out[i] - 1) * stride[i] + 1, stride[i]);
    }
    return t;
  };

  // Which tap is the maximum: by comparing, never by looking for the pooled value again, which XLA may
  // have computed with other roundings in another fusion. As on the CPU, the first maximum, or the last
  // NaN.
  at::Tensor best, winner, found;
  int64_t number = 0;
  for_each_index(kernel_size, [&](at::IntArrayRef tap) {
    const auto part = met_by(padded, tap);
    const auto valid = met_by(inside, tap);
    if (number == 0) {
      best = part;
      winner = at::zeros_like(part, part.options().dtype(at::kInt));
      found = valid;
    } else {
      const auto better = ((part > best) | part.isnan() | found.logical_not()) & valid;
      best = at::where(better, part, best);
      winner = winner.masked_fill(better, number);
      found = found | valid;
    }
    ++number;
  });

  std::vector<at::Tensor> phases(c10::multiply_integers(stride));
  number = 0;
  for_each_index(kernel_size, [&](at::IntArrayRef tap) {
    at::DimVector before(dim), behind(dim);
    int64_t phase = 0;
    for (int64_t i = 0; i < dim; ++i) {
      const int64_t offset = tap[i] * dilation[i];
      before[i] = offset / stride[i];
      behind[i] = length[i] - out[i] - before[i];
      phase = phase * stride[i] + offset % stride[i];
    }
    const auto chosen = grad_output.masked_fill(winner != number++, 0);
    const auto shifted = pad_last(chosen, before, behind, 0);
    phases[phase] = phases[phase].defined() ? phases[phase] + shifted : shifted;
  });

  // [*stride phases, *batch, *length] -> [*batch, length, phase, length, phase, ...]
  c10::SymDimVector sizes(self.sym_sizes().begin(), self.sym_sizes().end() - dim);
  const auto batch = static_cast<int64_t>(sizes.size());
  c10::SymDimVector joined = sizes, full(stride.begin(), stride.end());
  at::DimVector order;
  full.append(sizes.begin(), sizes.end());
  full.append(length.begin(), length.end());
  sizes.append(length.begin(), length.end());
  for (auto& phase : phases) {
    phase = phase.defined() ? phase : at::zeros_symint(sizes, grad_output.options());
  }
  for (int64_t i = 0; i < batch; ++i) {
    order.push_back(dim + i);
  }
  for (int64_t i = 0; i < dim; ++i) {
    order.insert(order.end(), {dim + batch + i, i});
    joined.push_back(length[i] * stride[i]);
  }
  auto result = at::stack(phases).reshape_symint(full).permute(order).reshape_symint(joined);
  for (int64_t i = 0; i < dim; ++i) {
    result = at::slice(result, i - dim, padding[i], padding[i] + size[i]);
  }
  return result.clone();  // a gradient is no view
}

bool is_empty(const at::Tensor& t) {
  const auto numel = t.sym_numel().maybe_as_int();
  return numel && *numel == 0;
}

// Where the gradient will not be differentiated, the stock kernel.
template <int64_t dim>
torch::CppFunction make_backward() {
  const auto stock = std::make_shared<Stock>(
      dim == 2 ? "aten::max_pool2d_with_indices_backward" : "aten::max_pool3d_with_indices_backward");
  return torch::CppFunction([stock](
                                c10::DispatchKeySet keys, const at::Tensor& grad_output,
                                const at::Tensor& self, at::IntArrayRef kernel_size,
                                at::IntArrayRef stride, at::IntArrayRef padding,
                                at::IntArrayRef dilation, bool ceil_mode, const at::Tensor& indices) {
    // torch_xla looks for the maxima again, in what core's forward mode hands it for self: the tangent.
    const bool tangents = has_tangent(grad_output) || has_tangent(self);
    const bool graph = at::GradMode::is_enabled() && grad_output.requires_grad();
    if (!(tangents || graph) || is_empty(grad_output)) {
      return (*stock)(
          keys, {grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices});
    }
    return select_maxima(
        grad_output, self.detach(), spread(kernel_size, dim),
        spread(stride.empty() ? kernel_size : stride, dim), spread(padding, dim), spread(dilation, dim));
  });
}

// Stock fails in forward mode as the others do.
at::Tensor adaptive_max_pool2d_backward(
    const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& indices) {
  return at::zeros_like(self)
      .flatten(-2)
      .scatter_add(-1, indices.flatten(-2), grad_output.flatten(-2))
      .view_as(self);
}

}  // namespace

torch::CppFunction make_adaptive_max_pool2d_backward() {
  return make_forward_differentiable<
      at::_ops::adaptive_max_pool2d_backward, &adaptive_max_pool2d_backward>();
}

torch::CppFunction make_max_pool2d() {
  return make_fix<&values<&at::max_pool2d_with_indices>>();
}

torch::CppFunction make_max_pool3d() {
  return make_fix<&values<&at::max_pool3d_with_indices>>();
}

torch::CppFunction make_max_pool2d_backward() {
  return make_backward<2>();
}

torch::CppFunction make_max_pool3d_backward() {
  return make_backward<3>();
}

}  // namespace torch_convfix
