#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/GridSamplerUtils.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/grid_sampler_2d_backward_ops.h>
#include <ATen/ops/grid_sampler_2d_ops.h>
#include <ATen/ops/grid_sampler_3d_backward_ops.h>
#include <ATen/ops/grid_sampler_3d_ops.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scatter_add.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "derivatives/differentiable.h"
#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

using Interpolation = at::native::GridSamplerInterpolation;
using Padding = at::native::GridSamplerPadding;

// Where a dimension of `size` pixels is sampled, in pixels, and the derivative of that by the grid,
// which is a constant between kinks. At a kink both are as in core: a border counts as outside.
struct Position {
  at::Tensor value, rate;
};

Position reflect(const Position& from, double low, double span) {
  if (span == 0) {
    return {at::zeros_like(from.value), at::zeros_like(from.value)};
  }
  const auto distance = from.value - low;
  const auto sign = 1 - 2 * (distance < 0).to(distance.scalar_type());
  const auto folds = (distance * sign / span).floor();
  const auto rest = distance * sign - folds * span;
  const auto odd = folds - 2 * (folds / 2).floor();
  return {at::where(odd != 0, span - rest, rest) + low, from.rate * sign * (1 - 2 * odd)};
}

Position clip(const Position& from, int64_t size) {
  const auto inside = (from.value > 0).logical_and(from.value < size - 1);
  const auto end = (from.value >= size - 1).to(from.value.scalar_type()) * (size - 1);  // NaN: 0
  return {at::where(inside, from.value, end), at::where(inside, from.rate, 0)};
}

Position pad(const Position& from, int64_t size, Padding padding, bool align_corners) {
  switch (padding) {
    case Padding::Reflection:
      return clip(
          reflect(from, align_corners ? 0 : -0.5, static_cast<double>(align_corners ? size - 1 : size)),
          size);
    case Padding::Border:
      return clip(from, size);
    default:
      // Far away, or NaN: as near as no pixel is met from, for an index that fits.
      return {
          at::where((from.value > -3).logical_and(from.value < size + 2), from.value, -3), from.rate};
  }
}

// The pixels of one dimension that an output is a sum of, which may lie outside; their weights; and the
// derivatives of the weights by the grid. Each [N, taps, outputs].
struct Taps {
  at::Tensor pixel, weight, slope;
};

// The two pieces of the cubic convolution of Keys (1981) with a = -3/4, by the distance of the pixel: up
// to 1, and from 1 to 2.
constexpr double kA = -0.75;
at::Tensor near(const at::Tensor& x) {
  return ((kA + 2) * x - (kA + 3)) * x * x + 1;
}
at::Tensor near_slope(const at::Tensor& x) {
  return (3 * (kA + 2) * x - 2 * (kA + 3)) * x;
}
at::Tensor far(const at::Tensor& x) {
  return ((kA * x - 5 * kA) * x + 8 * kA) * x - 4 * kA;
}
at::Tensor far_slope(const at::Tensor& x) {
  return (3 * kA * x - 10 * kA) * x + 8 * kA;
}

// `coordinate` [N, outputs]: -1 and 1 are the image's edges, or with align_corners its outer pixels.
Taps taps(
    const at::Tensor& coordinate,
    int64_t size,
    Interpolation interpolation,
    Padding padding,
    bool align_corners) {
  const double rate = (align_corners ? size - 1 : size) / 2.0;
  const Position unpadded{
      (coordinate + 1) * rate - (align_corners ? 0 : 0.5), at::full({}, rate, coordinate.options())};
  if (interpolation == Interpolation::Bicubic) {
    // Here the pixels are padded, and the position is not.
    const auto from = padding == Padding::Zeros ? pad(unpadded, size, padding, align_corners) : unpadded;
    const auto first = from.value.floor();
    const auto t = from.value - first;
    const auto pixel = at::stack({first - 1, first, first + 1, first + 2}, 1);
    return {
        padding == Padding::Zeros ? pixel
                                  : pad({pixel, unpadded.rate}, size, padding, align_corners).value,
        at::stack({far(t + 1), near(t), near(1 - t), far(2 - t)}, 1),
        at::stack({far_slope(t + 1), near_slope(t), -near_slope(1 - t), -far_slope(2 - t)}, 1) * rate};
  }
  const auto from = pad(unpadded, size, padding, align_corners);
  if (interpolation == Interpolation::Nearest) {
    const auto pixel = from.value.round().unsqueeze(1);
    return {pixel, at::ones_like(pixel), at::zeros_like(pixel)};
  }
  const auto first = from.value.floor();
  const auto t = from.value - first;
  const auto slope = from.rate.expand_as(t);
  return {at::stack({first, first + 1}, 1), at::stack({1 - t, t}, 1), at::stack({-slope, slope}, 1)};
}

// Every output as a sum over pixels, in every dimension together: [N, taps, outputs] each. `index`
// counts the image's pixels, and after them one more, which is zero: there are the pixels outside.
class Sampling {
 public:
  Sampling(
      const at::Tensor& input,
      const at::Tensor& grid,
      Interpolation interpolation,
      Padding padding,
      bool align_corners)
      : dtype_(at::toOpMathType(grid.scalar_type())) {
    const int64_t dim = input.dim() - 2;
    TORCH_CHECK(
        dim == 2 || interpolation != Interpolation::Bicubic,
        "grid_sample: mode 'bicubic' is for 4-dimensional input, got ", input.dim(), " dimensions");
    batch_ = grid.sym_size(0);
    channels_ = input.sym_size(1);
    for (int64_t i = 0; i < dim; ++i) {
      outputs_ = outputs_ * grid.sym_size(i + 1);
      pixels_ *= input.sym_size(i + 2).guard_int(__FILE__, __LINE__);
    }
    at::Tensor inside;
    std::vector<at::Tensor> weights, slopes;
    for (int64_t i = 0; i < dim; ++i) {
      const auto size = input.sym_size(i + 2).guard_int(__FILE__, __LINE__);
      // The grid names the last dimension first.
      const auto coordinate = grid.select(-1, dim - 1 - i).to(dtype_);
      const auto one = taps(
          coordinate.reshape_symint({batch_, outputs_}), size, interpolation, padding, align_corners);
      const auto spread = [&](const at::Tensor& t) {
        c10::SymDimVector sizes(dim + 2, 1);
        sizes[0] = batch_;
        sizes[i + 1] = t.sym_size(1);
        sizes[dim + 1] = outputs_;
        return t.reshape_symint(sizes);
      };
      const auto pixel = spread(one.pixel);
      const auto within = (pixel >= 0).logical_and(pixel < size);
      const auto number = at::where(within, pixel, 0).to(at::kLong);
      inside = i == 0 ? within : inside.logical_and(within);
      index_ = i == 0 ? number : index_ * size + number;
      weights.push_back(spread(one.weight));
      slopes.push_back(spread(one.slope));
    }
    index_ = at::where(inside, index_, pixels_).flatten(1, dim);
    taps_ = index_.sym_size(1);
    // One product more for each coordinate, with its slope in the place of its weight.
    const auto product = [&](int64_t sloped) {
      at::Tensor result;
      for (int64_t i = 0; i < dim; ++i) {
        const auto& factor = i == sloped ? slopes[i] : weights[i];
        result = i == 0 ? factor : result * factor;
      }
      return result.flatten(1, dim);
    };
    weight_ = product(-1);
    for (int64_t i = dim - 1; i >= 0; --i) {
      slopes_.push_back(product(i));
    }
  }

  at::Tensor sample(const at::Tensor& input, const at::Tensor& grid) const {
    c10::SymDimVector sizes(grid.sym_sizes().begin(), grid.sym_sizes().end() - 1);
    sizes.insert(sizes.begin() + 1, channels_);
    return (met(input) * weight_.unsqueeze(1)).sum(2).reshape_symint(sizes).to(input.scalar_type());
  }

  at::Tensor grad_input(const at::Tensor& grad_output, const at::Tensor& input) const {
    const auto parts = spread(grad_output) * weight_.unsqueeze(1);
    const auto pixels =
        at::zeros_symint({batch_, channels_, pixels_ + 1}, parts.options())
            .scatter_add(2, index(), parts.reshape_symint({batch_, channels_, taps_ * outputs_}));
    return pixels.narrow(2, 0, pixels_).reshape_symint(input.sym_sizes()).to(input.scalar_type());
  }

  at::Tensor grad_grid(
      const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& grid) const {
    const auto by_weight = (spread(grad_output) * met(input)).sum(1);
    std::vector<at::Tensor> by_coordinate;
    for (const auto& slope : slopes_) {
      by_coordinate.push_back((by_weight * slope).sum(1));
    }
    return at::stack(by_coordinate, -1).reshape_symint(grid.sym_sizes()).to(grid.scalar_type());
  }

 private:
  at::Tensor index() const {
    return index_.reshape_symint({batch_, 1, taps_ * outputs_})
        .expand_symint({batch_, channels_, taps_ * outputs_});
  }

  // [N, C, taps, outputs]
  at::Tensor met(const at::Tensor& input) const {
    const auto pixels = input.to(dtype_).reshape_symint({batch_, channels_, pixels_});
    return at::gather(at::constant_pad_nd(pixels, {0, 1}), 2, index())
        .reshape_symint({batch_, channels_, taps_, outputs_});
  }

  // [N, C, 1, outputs]
  at::Tensor spread(const at::Tensor& grad_output) const {
    return grad_output.to(dtype_).reshape_symint({batch_, channels_, 1, outputs_});
  }

  at::ScalarType dtype_;
  c10::SymInt batch_, channels_, outputs_ = 1, taps_;
  int64_t pixels_ = 1;
  at::Tensor index_, weight_;
  std::vector<at::Tensor> slopes_;  // by the coordinates of the grid, in their order
};

at::Tensor grid_sampler(
    const at::Tensor& input,
    const at::Tensor& grid,
    int64_t interpolation_mode,
    int64_t padding_mode,
    bool align_corners) {
  TORCH_CHECK(
      input.scalar_type() == grid.scalar_type(), "grid_sample: grid must have input's dtype, ",
      input.scalar_type(), ", got ", grid.scalar_type());
  return Sampling(
             input, grid, static_cast<Interpolation>(interpolation_mode),
             static_cast<Padding>(padding_mode), align_corners)
      .sample(input, grid);
}

std::tuple<at::Tensor, at::Tensor> grid_sampler_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& grid,
    int64_t interpolation_mode,
    int64_t padding_mode,
    bool align_corners,
    std::array<bool, 2> output_mask) {
  const Sampling sampling(
      input, grid, static_cast<Interpolation>(interpolation_mode), static_cast<Padding>(padding_mode),
      align_corners);
  // functorch's batching rule for the operator takes no undefined result.
  const auto none = [](const at::Tensor& t) {
    return at::zeros({}, t.options()).expand_symint(t.sym_sizes());
  };
  return {
      output_mask[0] ? sampling.grad_input(grad_output, input) : none(input),
      output_mask[1] ? sampling.grad_grid(grad_output, input, grid) : none(grid)};
}

// TorchTPU's gradient of the grid is wrong where points are reflected, and zero where input's is not
// asked for with it.
template <class Op>
torch::CppFunction make_right_for_the_grid() {
  return torch::CppFunction([](c10::DispatchKeySet keys, const at::Tensor& grad_output,
                               const at::Tensor& input, const at::Tensor& grid,
                               int64_t interpolation_mode, int64_t padding_mode, bool align_corners,
                               std::array<bool, 2> output_mask) {
    return static_cast<Padding>(padding_mode) == Padding::Reflection
               ? grid_sampler_backward(
                     grad_output, input, grid, interpolation_mode, padding_mode, align_corners,
                     output_mask)
               : Differentiable<Op, &grid_sampler_backward>::call(
                     keys, grad_output, input, grid, interpolation_mode, padding_mode, align_corners,
                     {output_mask[0] || output_mask[1], output_mask[1]});
  });
}

}  // namespace

torch::CppFunction make_right_for_the_grid_2d() {
  return make_right_for_the_grid<at::_ops::grid_sampler_2d_backward>();
}

torch::CppFunction make_right_for_the_grid_3d() {
  return make_right_for_the_grid<at::_ops::grid_sampler_3d_backward>();
}

torch::CppFunction make_grid_sampler_2d() {
  return make_forward_differentiable<at::_ops::grid_sampler_2d, &grid_sampler>();
}

torch::CppFunction make_grid_sampler_3d() {
  return make_forward_differentiable<at::_ops::grid_sampler_3d, &grid_sampler>();
}

torch::CppFunction make_grid_sampler_2d_backward() {
  return make_differentiable<at::_ops::grid_sampler_2d_backward, &grid_sampler_backward>();
}

torch::CppFunction make_grid_sampler_3d_backward() {
  return make_differentiable<at::_ops::grid_sampler_3d_backward, &grid_sampler_backward>();
}

}  // namespace torch_convfix
