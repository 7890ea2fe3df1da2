#include <ATen/TensorOperators.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool3d.h>

#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

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

// TorchTPU drops every derivative.
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

}  // namespace

torch::CppFunction make_avg_pool1d() {
  return make_fix<&avg_pool1d>();
}

torch::CppFunction make_avg_pool2d() {
  return make_avg_pool<2>();
}

torch::CppFunction make_avg_pool3d() {
  return make_avg_pool<3>();
}

}  // namespace torch_convfix
