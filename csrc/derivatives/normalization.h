#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>

#include <numeric>
#include <utility>

namespace torch_convfix {

// Of normalization.cpp alone.
using Optional = std::optional<at::Tensor>;
using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

inline bool defined(const Optional& t) {
  return t && t->defined();
}

inline at::Tensor in_opmath(const at::Tensor& t) {
  return t.to(at::toOpMathType(t.scalar_type()));
}

// In what shape an input is normalized, and over which of its dimensions; the shape of weight and bias,
// and that against the input.
struct Layout {
  c10::SymDimVector shape;
  at::DimVector reduced;
  c10::SymDimVector parameter, affine;
};

inline Layout over_channels(const at::Tensor& input, c10::SymDimVector shape, at::DimVector reduced) {
  c10::SymDimVector affine(input.dim(), 1);
  affine[1] = input.sym_size(1);
  return {std::move(shape), std::move(reduced), {input.sym_size(1)}, std::move(affine)};
}

inline Layout over_layer(const at::Tensor& input, c10::SymIntArrayRef normalized_shape) {
  at::DimVector reduced(normalized_shape.size());
  std::iota(reduced.begin(), reduced.end(), input.dim() - static_cast<int64_t>(reduced.size()));
  const c10::SymDimVector parameter(normalized_shape);
  return {c10::SymDimVector(input.sym_sizes()), reduced, parameter, parameter};
}

inline Layout over_batch(const at::Tensor& input) {
  at::DimVector reduced(input.dim() - 1);
  std::iota(reduced.begin() + 1, reduced.end(), 2);
  return over_channels(input, c10::SymDimVector(input.sym_sizes()), reduced);
}

inline Layout over_groups(const at::Tensor& input, int64_t group) {
  return over_channels(input, {input.sym_size(0), group, -1}, {2});
}

inline at::Tensor in_shape(const at::Tensor& t, const Layout& layout) {
  return in_opmath(t).reshape_symint(layout.shape);
}

inline at::Tensor mean_of(const at::Tensor& t, const Layout& layout) {
  return t.mean(layout.reduced, /*keepdim=*/true);
}

// The mean and the biased variance.
inline std::pair<at::Tensor, at::Tensor> moments(const at::Tensor& input, const Layout& layout) {
  const auto x = in_shape(input, layout), mean = mean_of(x, layout);
  return {mean, mean_of((x - mean).square(), layout)};
}

struct Normalization {
  Layout layout;
  at::Tensor mean, rstd;  // against an input in the layout's shape

  static Normalization of(const at::Tensor& input, const Layout& layout, double eps) {
    const auto [mean, variance] = moments(input, layout);
    return {layout, mean, (variance + eps).rsqrt()};
  }

  static Normalization by(Layout layout, const at::Tensor& mean, const at::Tensor& rstd) {
    auto sizes = layout.shape;
    for (const auto dim : layout.reduced) {
      sizes[dim] = 1;
    }
    return {
        std::move(layout), in_opmath(mean).reshape_symint(sizes), in_opmath(rstd).reshape_symint(sizes)};
  }

  // The same numbers as functions of the input, since rstd^-2 = variance + eps.
  Normalization of_saved(const at::Tensor& input) const {
    const auto [own_mean, variance] = moments(input, layout);
    return {
        layout, mean.detach() + (own_mean - own_mean.detach()),
        (rstd.detach().square().reciprocal() + (variance - variance.detach())).rsqrt()};
  }

  at::Tensor affine(const at::Tensor& parameter) const {
    return in_opmath(parameter).reshape_symint(layout.affine);
  }

  at::Tensor weighted(const at::Tensor& t, const Optional& weight) const {
    return defined(weight) ? t * affine(*weight) : t;
  }

  at::Tensor normalized(const at::Tensor& input) const {
    return ((in_shape(input) - mean) * rstd).reshape_symint(input.sym_sizes());
  }

  at::Tensor output(const at::Tensor& input, const Optional& weight, const Optional& bias) const {
    const auto result = weighted(normalized(input), weight);
    return (defined(bias) ? result + affine(*bias) : result).to(input.scalar_type());
  }

  // The sum over all that a weight or bias is broadcast over.
  at::Tensor parameter_grad(const at::Tensor& t) const {
    return at::sum_to(t, c10::SymIntArrayRef(layout.affine)).reshape_symint(layout.parameter);
  }

  at::Tensor mean_of(const at::Tensor& t) const {
    return torch_convfix::mean_of(t, layout);
  }

  // The Jacobian of y = (x - mean(x)) * rstd(x), which is symmetric, times t, in the layout's shape.
  at::Tensor jacobian(const at::Tensor& t, const at::Tensor& y) const {
    return rstd * (t - mean_of(t) - y * mean_of(y * t));
  }

  at::Tensor in_shape(const at::Tensor& t) const {
    return torch_convfix::in_shape(t, layout);
  }

  // By given statistics the Jacobian is rstd.
  at::Tensor input_grad(const at::Tensor& grad, const at::Tensor& input, bool given) const {
    const auto own = in_shape(grad);
    const auto result = given ? own * rstd : jacobian(own, in_shape(normalized(input)));
    return result.reshape_symint(input.sym_sizes()).to(input.scalar_type());
  }

  Results gradients(
      const at::Tensor& grad_output,
      const at::Tensor& input,
      const Optional& weight,
      std::array<bool, 3> output_mask,
      bool given = false) const {
    const auto grad = in_opmath(grad_output);
    const auto dtype = defined(weight) ? weight->scalar_type() : input.scalar_type();
    const auto summed = [&](const at::Tensor& t) { return parameter_grad(t).to(dtype); };
    return {
        output_mask[0] ? input_grad(weighted(grad, weight), input, given) : at::Tensor(),
        output_mask[1] ? summed(grad * normalized(input)) : at::Tensor(),
        output_mask[2] ? summed(grad) : at::Tensor()};
  }
};

}  // namespace torch_convfix
