#include <ATen/ops/linalg_vector_norm.h>

#include <cmath>
#include <numeric>

#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

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

}  // namespace

torch::CppFunction make_amax() {
  return make_extremum<true>();
}

torch::CppFunction make_amin() {
  return make_extremum<false>();
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

}  // namespace torch_convfix
