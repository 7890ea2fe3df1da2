#include "derivative_fixes.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/diag_native.h>
#include <ATen/ops/einsum_native.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/kl_div_native.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/nll_loss_nd_native.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/selu_native.h>
#include <ATen/ops/slice_copy.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/std_native.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "index.h"

namespace torch_convfix {
namespace {

// torch_xla's own autograd function has a backward that is not differentiable; the operators that
// return the indices too keep core's formula, and the indices are computed only where they are used.
at::Tensor max_pool2d(
    const at::Tensor& self,
    at::IntArrayRef kernel_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool ceil_mode) {
  return std::get<0>(
      at::max_pool2d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
}

at::Tensor max_pool3d(
    const at::Tensor& self,
    at::IntArrayRef kernel_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool ceil_mode) {
  return std::get<0>(
      at::max_pool3d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
}

// The kernel that the backend or core has at the autograd key, fetched before ours takes its place.
class Stock {
 public:
  explicit Stock(
      const char* op, const char* overload = "", c10::DispatchKey key = c10::DispatchKey::AutogradXLA)
      : kernel_(
            c10::Dispatcher::singleton()
                .findSchemaOrThrow(op, overload)
                .getComputedKernelForDispatchKey(key)) {
  }

  at::Tensor operator()(c10::DispatchKeySet keys, torch::jit::Stack stack) const {
    kernel_.callBoxed(kernel_.opHandle(), keys, &stack);
    return std::move(stack[0]).toTensor();
  }

 private:
  c10::SafeKernelFunction kernel_;
};

// One entry a dimension, where the operators take one for all.
at::DimVector spread(at::IntArrayRef values, int64_t dim) {
  return values.size() == 1 ? at::DimVector(dim, values[0])
                            : at::DimVector(values.begin(), values.end());
}

at::Tensor pad_last(
    const at::Tensor& t, at::IntArrayRef before, at::IntArrayRef after, const at::Scalar& value) {
  std::vector<int64_t> pads;
  for (auto i = static_cast<int64_t>(before.size()) - 1; i >= 0; --i) {
    pads.insert(pads.end(), {before[i], after[i]});
  }
  return at::constant_pad_nd(t, pads, value);
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
  const auto size = self.sizes().slice(self.dim() - dim),
             out = grad_output.sizes().slice(self.dim() - dim);
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
      t = at::slice_copy(t, i - dim, start, start + (out[i] - 1) * stride[i] + 1, stride[i]);
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
      winner = at::zeros(part.sizes(), part.options().dtype(at::kInt));
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
  at::DimVector sizes(self.sizes().begin(), self.sizes().end() - dim);
  const auto batch = static_cast<int64_t>(sizes.size());
  at::DimVector joined = sizes, order, full(stride.begin(), stride.end());
  full.append(sizes.begin(), sizes.end());
  full.append(length.begin(), length.end());
  sizes.append(length.begin(), length.end());
  for (auto& phase : phases) {
    phase = phase.defined() ? phase : at::zeros(sizes, grad_output.options());
  }
  for (int64_t i = 0; i < batch; ++i) {
    order.push_back(dim + i);
  }
  for (int64_t i = 0; i < dim; ++i) {
    order.insert(order.end(), {dim + batch + i, i});
    joined.push_back(length[i] * stride[i]);
  }
  auto result = at::stack(phases).reshape(full).permute(order).reshape(joined);
  for (int64_t i = 0; i < dim; ++i) {
    result = at::slice_copy(result, i - dim, padding[i], padding[i] + size[i]);
  }
  return result;
}

// Where the gradient will not be differentiated, the stock kernel; forward mode is right there too.
template <int64_t dim>
torch::CppFunction make_max_pool_backward() {
  const auto stock = std::make_shared<Stock>(
      dim == 2 ? "aten::max_pool2d_with_indices_backward" : "aten::max_pool3d_with_indices_backward");
  return torch::CppFunction([stock](
                                c10::DispatchKeySet keys, const at::Tensor& grad_output,
                                const at::Tensor& self, at::IntArrayRef kernel_size,
                                at::IntArrayRef stride, at::IntArrayRef padding,
                                at::IntArrayRef dilation, bool ceil_mode, const at::Tensor& indices) {
    if (!at::GradMode::is_enabled() || !grad_output.requires_grad() || grad_output.numel() == 0) {
      return (*stock)(
          keys, {grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices});
    }
    return select_maxima(
        grad_output, self.detach(), spread(kernel_size, dim),
        spread(stride.empty() ? kernel_size : stride, dim), spread(padding, dim), spread(dilation, dim));
  });
}

// torch_xla takes self for elu's result whatever is_result says. Serves elu, selu, celu and the forms in
// place. From elu(x) = scale * x for x > 0, else alpha * scale * (exp(input_scale * x) - 1).
at::Tensor elu_backward(
    const at::Tensor& grad_output,
    const at::Scalar& alpha,
    const at::Scalar& scale,
    const at::Scalar& input_scale,
    bool is_result,
    const at::Tensor& self_or_result) {
  const double negative_scale = alpha.toDouble() * scale.toDouble();
  // Clamped, so that an overflow where the other branch is taken does not become zero times infinity.
  const auto slope = is_result ? self_or_result + negative_scale
                               : (self_or_result.clamp_max(0) * input_scale).exp() * negative_scale;
  return at::where(
      self_or_result > 0, grad_output * scale, grad_output * (slope * input_scale.toDouble()));
}

// torch_xla divides windows that reach over the border by something else, and leaves the divisor out of
// the graph's hash: a pool without one then runs the program of a pool with one. A window's sum is its
// mean times its size, once the zeros that it reaches are there: those of the padding, and those past it
// that ceil_mode admits.
class AvgPool {
 public:
  using Pool = at::Tensor(
      const at::Tensor&,
      at::IntArrayRef,
      at::IntArrayRef,
      at::IntArrayRef,
      bool,
      bool,
      std::optional<int64_t>);

  AvgPool(const char* op, Pool* pool) : pool_(pool), stock_(op) {
  }

  at::Tensor operator()(
      int64_t dim,
      c10::DispatchKeySet keys,
      const at::Tensor& self,
      at::IntArrayRef kernel_size,
      at::IntArrayRef stride,
      at::IntArrayRef padding,
      bool ceil_mode,
      bool count_include_pad,
      std::optional<int64_t> divisor_override) const {
    if (!divisor_override) {
      return stock_(
          keys, {self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override});
    }
    TORCH_CHECK(*divisor_override != 0, "avg_pool: divisor_override must not be 0, got 0");
    const auto kernel = spread(kernel_size, dim), before = spread(padding, dim);
    const auto step = stride.empty() ? kernel : spread(stride, dim);
    at::DimVector after(dim);
    for (int64_t i = 0; i < dim; ++i) {
      const int64_t k = kernel[i], s = step[i], p = before[i], size = self.size(i - dim);
      int64_t windows = (size + 2 * p - k + (ceil_mode ? s - 1 : 0)) / s + 1;
      if (ceil_mode && (windows - 1) * s >= size + p) {
        --windows;  // one that would start past the input
      }
      after[i] = std::max<int64_t>(p, (windows - 1) * s + k - size - p);
    }
    const auto padded = pad_last(self, before, after, 0);
    const auto mean = pool_(padded, kernel_size, stride, {0}, false, true, std::nullopt);
    const auto window = static_cast<double>(c10::multiply_integers(kernel));
    return mean * (window / static_cast<double>(*divisor_override));
  }

 private:
  Pool* pool_;
  Stock stock_;
};

template <int64_t dim>
torch::CppFunction make_avg_pool() {
  const auto pool = dim == 2 ? std::make_shared<AvgPool>("aten::avg_pool2d", &at::avg_pool2d)
                             : std::make_shared<AvgPool>("aten::avg_pool3d", &at::avg_pool3d);
  return torch::CppFunction([pool](
                                c10::DispatchKeySet keys, const at::Tensor& self,
                                at::IntArrayRef kernel_size, at::IntArrayRef stride,
                                at::IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                                std::optional<int64_t> divisor_override) {
    return (*pool)(
        dim, keys, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override);
  });
}

// The losses below follow the formulas in the documentation of torch.nn.NLLLoss and CrossEntropyLoss.

int64_t class_dim(const at::Tensor& self) {
  return self.dim() == 1 ? 0 : 1;
}

// Class indices, the weight of each one's loss, and which are not ignored.
struct Targets {
  at::Tensor kept, index, weight;

  Targets(
      const at::Tensor& self,
      const at::Tensor& target,
      const std::optional<at::Tensor>& class_weight,
      int64_t ignore_index) {
    c10::SymDimVector expected(self.sym_sizes().begin(), self.sym_sizes().end());
    TORCH_CHECK(!expected.empty(), "nll_loss: input must have at least 1 dimension, got 0");
    expected.erase(expected.begin() + class_dim(self));
    TORCH_CHECK(
        target.sym_sizes() == c10::SymIntArrayRef(expected), "nll_loss: target must have shape ",
        c10::SymIntArrayRef(expected), " for input ", self.sym_sizes(), ", got ", target.sym_sizes());
    kept = target != ignore_index;
    index = at::where(kept, target, at::zeros_like(target)).to(at::kLong);
    weight = kept.to(self.scalar_type());
    if (class_weight && class_weight->defined()) {
      weight =
          weight * class_weight->index_select(0, index.reshape(-1)).reshape_symint(index.sym_sizes());
    }
  }
};

at::Tensor reduce(const at::Tensor& loss, const at::Tensor& weight, int64_t reduction) {
  switch (reduction) {
    case at::Reduction::None:
      return loss;
    case at::Reduction::Sum:
      return loss.sum();
    default:
      return loss.sum() / weight.sum();
  }
}

at::Tensor keep(const Targets& targets, const at::Tensor& loss) {
  return at::where(targets.kept, loss, at::zeros_like(loss));
}

at::Tensor nll_loss(const at::Tensor& self, const Targets& targets, int64_t reduction) {
  const int64_t dim = class_dim(self);
  const auto picked = at::gather(self, dim, targets.index.unsqueeze(dim)).squeeze(dim);
  return reduce(keep(targets, -picked * targets.weight), targets.weight, reduction);
}

at::Tensor nll_loss_nd(
    const at::Tensor& self,
    const at::Tensor& target,
    const std::optional<at::Tensor>& weight,
    int64_t reduction,
    c10::SymInt ignore_index) {
  return nll_loss(self, Targets(self, target, weight, ignore_index.expect_int()), reduction);
}

at::Tensor cross_entropy_loss(
    const at::Tensor& self,
    const at::Tensor& target,
    const std::optional<at::Tensor>& weight,
    int64_t reduction,
    c10::SymInt ignore_index,
    double label_smoothing) {
  TORCH_CHECK(
      0 <= label_smoothing && label_smoothing <= 1,
      "cross_entropy: label_smoothing must be between 0 and 1, got ", label_smoothing);
  TORCH_CHECK(self.dim() >= 1, "cross_entropy: input must have at least 1 dimension, got 0");
  const int64_t dim = class_dim(self);
  const auto classes = self.sym_size(dim);
  const auto log_probability = at::log_softmax(self, dim);
  auto weighted = log_probability;
  if (weight && weight->defined()) {
    c10::SymDimVector sizes(self.dim(), 1);
    sizes[dim] = classes;
    weighted = weighted * weight->reshape_symint(sizes);
  }
  const double uniform = label_smoothing / classes.guard_int(__FILE__, __LINE__);

  if (target.sym_sizes() == self.sym_sizes()) {
    TORCH_CHECK(
        target.is_floating_point(),
        "cross_entropy: target of input's shape holds probabilities and must be floating point, got ",
        target.scalar_type());
    TORCH_CHECK(
        ignore_index < 0, "cross_entropy: ignore_index is for class indices, got ", ignore_index,
        " with a target of probabilities");
    const auto loss = -(weighted * (target * (1 - label_smoothing) + uniform)).sum(dim);
    return reduction == at::Reduction::Mean ? loss.mean() : reduce(loss, loss, reduction);
  }

  const Targets targets(self, target, weight, ignore_index.expect_int());
  const auto loss = nll_loss(log_probability, targets, reduction);
  if (label_smoothing == 0) {
    return loss;
  }
  const auto spread = reduce(keep(targets, -weighted.sum(dim)), targets.weight, reduction);
  return loss * (1 - label_smoothing) + spread * uniform;
}

// torch_xla reads unbatched log-probabilities past their end.
at::Tensor unbatched_nll_loss_nd(
    const at::Tensor& self,
    const at::Tensor& target,
    const std::optional<at::Tensor>& weight,
    int64_t reduction,
    c10::SymInt ignore_index) {
  return self.dim() == 1
             ? nll_loss_nd(self, target, weight, reduction, std::move(ignore_index))
             : at::native::nll_loss_nd_symint(self, target, weight, reduction, std::move(ignore_index));
}

// torch_xla takes no dimensions for none in place of all.
template <bool largest>
torch::CppFunction make_extremum() {
  const auto stock = std::make_shared<Stock>(largest ? "aten::amax" : "aten::amin");
  return torch::CppFunction(
      [stock](c10::DispatchKeySet keys, const at::Tensor& self, at::IntArrayRef dim, bool keepdim) {
        std::vector<int64_t> all(dim.empty() ? self.dim() : 0);
        std::iota(all.begin(), all.end(), 0);
        return (*stock)(keys, {self, dim.empty() ? at::IntArrayRef(all) : dim, keepdim});
      });
}

// torch_xla computes the power of an infinite order; linalg_vector_norm is right there.
torch::CppFunction make_norm() {
  const auto stock = std::make_shared<Stock>("aten::norm", "ScalarOpt_dim");
  return torch::CppFunction([stock](
                                c10::DispatchKeySet keys, const at::Tensor& self,
                                const std::optional<at::Scalar>& p, at::IntArrayRef dim, bool keepdim) {
    if (p && std::isinf(p->toDouble())) {
      return at::linalg_vector_norm(self, *p, dim, keepdim);
    }
    return (*stock)(keys, {self, p, dim, keepdim});
  });
}

// torch_xla divides by the size of an empty dimension.
torch::CppFunction make_roll() {
  const auto stock = std::make_shared<Stock>("aten::roll");
  return torch::CppFunction([stock](
                                c10::DispatchKeySet keys, const at::Tensor& self,
                                c10::SymIntArrayRef shifts, at::IntArrayRef dims) {
    return self.sym_numel() == 0 ? self.clone() : (*stock)(keys, {self, shifts, dims});
  });
}

at::Tensor avg_pool1d(
    const at::Tensor& self,
    at::IntArrayRef kernel_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    bool ceil_mode,
    bool count_include_pad) {
  const auto step = (stride.empty() ? kernel_size : stride)[0];
  return at::avg_pool2d(
             self.unsqueeze(-2), {1, kernel_size[0]}, {1, step}, {0, padding[0]}, ceil_mode,
             count_include_pad)
      .squeeze(-2);
}

// celu(x) = x for x > 0, else alpha * (exp(x / alpha) - 1).
at::Tensor celu(const at::Tensor& self, const at::Scalar& alpha) {
  TORCH_CHECK(alpha.toDouble() != 0, "celu: alpha must not be 0, got 0");
  const auto negative = (self.clamp_max(0) / alpha).expm1() * alpha;
  return at::where(self > 0, self, negative);
}

at::Tensor& celu_(at::Tensor& self, const at::Scalar& alpha) {
  return self.copy_((celu)(self.clone(), alpha));  // not at::celu, by its argument
}

// The rows of padding_idx get no gradient.
torch::CppFunction make_embedding() {
  const auto stock =
      std::make_shared<Stock>("aten::embedding", "", c10::DispatchKey::AutogradPrivateUse1);
  return torch::CppFunction([stock](
                                c10::DispatchKeySet keys, const at::Tensor& weight,
                                const at::Tensor& indices, c10::SymInt padding_idx,
                                bool scale_grad_by_freq, bool sparse) {
    // Core's forward mode lets the tangents of padding_idx through, and stock is right there.
    const bool forward_mode = weight._fw_grad(0).defined();
    if (scale_grad_by_freq || sparse || weight.dim() != 2 || forward_mode) {
      return (*stock)(keys, {weight, indices, padding_idx, scale_grad_by_freq, sparse});
    }
    c10::SymDimVector sizes(indices.sym_sizes().begin(), indices.sym_sizes().end());
    sizes.push_back(weight.sym_size(1));
    const auto rows = weight.index_select(0, indices.reshape(-1)).reshape_symint(sizes);
    if (padding_idx < 0) {
      return rows;
    }
    return at::where((indices == padding_idx.expect_int()).unsqueeze(-1), rows.detach(), rows);
  });
}

template <class Function, Function* function>
torch::CppFunction make() {
  return torch::CppFunction::makeFromUnboxedFunction(
      c10::CompileTimeFunctionPointer<Function, function>());
}

#define MAKE(function) (make<decltype(function), &(function)>)
#define FIX(op, fault)   \
  DerivativeFix {        \
    #op, fault, MAKE(op) \
  }

}  // namespace

const std::vector<DerivativeFix>& derivative_fixes(const std::string& device) {
  using Std = at::Tensor(const at::Tensor&, bool);
  using StdDim = at::Tensor(const at::Tensor&, at::OptionalIntArrayRef, bool, bool);
  constexpr auto kHidden = "forward mode and vmap of the gradient are wrong";
  static const std::vector<DerivativeFix> none;
  static const std::vector<DerivativeFix> xla{
      FIX(max_pool2d, "the second derivative through the pooled tensor is dropped"),
      FIX(max_pool3d, "the second derivative through the pooled tensor is dropped"),
      {"max_pool2d_with_indices_backward", "its derivative loops over every output",
       make_max_pool_backward<2>},
      {"max_pool3d_with_indices_backward", "its derivative loops over every output",
       make_max_pool_backward<3>},
      FIX(elu_backward, "the derivatives of elu, selu and celu are those at their result"),
      // torch_xla's kernels of these hide the composition that functorch differentiates.
      {"selu", kHidden, MAKE(at::native::selu)},
      {"selu_", kHidden, MAKE(at::native::selu_)},
      {"diag", kHidden, MAKE(at::native::diag)},
      {"kl_div", kHidden, MAKE(at::native::kl_div)},
      {"std", kHidden, make<Std, static_cast<Std*>(&at::native::std)>},
      {"std.dim", kHidden, make<StdDim, static_cast<StdDim*>(&at::native::std)>},
      {"amax", "an empty list of dimensions reduces nothing", make_extremum<true>},
      {"amin", "an empty list of dimensions reduces nothing", make_extremum<false>},
      {"norm.ScalarOpt_dim", "the order -inf is wrong", make_norm},
      {"roll", "an empty tensor ends the process", make_roll},
      {"nll_loss_nd", "unbatched input ends the process", MAKE(unbatched_nll_loss_nd)},
      {"einsum", "the second derivative is dropped", MAKE(at::native::einsum)},
      {"avg_pool2d", "divisor_override is wrong at the border, and not in the hash", make_avg_pool<2>},
      {"avg_pool3d", "divisor_override is wrong at the border, and not in the hash", make_avg_pool<3>},
  };
  static const std::vector<DerivativeFix> tpu{
      FIX(cross_entropy_loss, "the second derivative is dropped"),
      FIX(nll_loss_nd, "the second derivative through grad_output is dropped"),
      FIX(avg_pool1d, "every derivative is dropped"),
      FIX(celu, "alpha scales the result alone"),
      FIX(celu_, "alpha scales the result alone"),
      {"embedding", "the second derivative is dropped", make_embedding},
  };
  return device == "xla" ? xla : device == "tpu" ? tpu : none;
}

#undef FIX
#undef MAKE

}  // namespace torch_convfix
