#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/expand_copy.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/result_type.h>

#include "dynamic/dynamic.h"

namespace torch_convfix {
namespace {

// torch_xla's addition refuses two operands of bounded-dynamic size; its addcmul takes them.
at::Tensor add(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  const auto dtype = at::result_type(self, other);
  const auto one = at::ones({}, self.options().dtype(dtype));
  return at::addcmul(self.to(dtype), other.to(dtype), one, alpha);
}

at::Tensor sub(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  return (add)(self, other, -alpha);  // not at::add, by its arguments
}

// The sizes of a broadcast result. A symbolic size is taken to fit what it meets: asking whether it is
// 1 would run the graph.
c10::SymDimVector broadcast(at::TensorList tensors) {
  int64_t dim = 0;
  for (const auto& t : tensors) {
    dim = std::max(dim, t.dim());
  }
  c10::SymDimVector sizes(dim, 1);
  for (const auto& t : tensors) {
    for (int64_t i = 0; i < t.dim(); ++i) {
      auto& size = sizes[dim - t.dim() + i];
      const auto& own = t.sym_size(i);
      if (own.is_heap_allocated() || (!size.is_heap_allocated() && own != 1)) {
        size = own;
      }
    }
  }
  return sizes;
}

// A selection without a product, so that a NaN not chosen stays away.
at::Tensor where(const at::Tensor& condition, const at::Tensor& self, const at::Tensor& other) {
  const auto sizes = broadcast({condition, self, other});
  const auto dtype = at::result_type(self, other);
  const auto chosen = at::expand_copy_symint(condition, sizes).to(at::kBool);
  const auto part = [&](const at::Tensor& t, const at::Tensor& away) {
    return at::masked_fill(at::expand_copy_symint(t.to(dtype), sizes), away, 0);
  };
  return part(self, chosen.logical_not()) + part(other, chosen);
}

// The derivative of sgn asks for concrete sizes; that of sign does not.
at::Tensor sgn(const at::Tensor& self) {
  TORCH_CHECK(!self.is_complex(), "sgn: complex tensors may not have bounded-dynamic sizes");
  return self.sign();
}

}  // namespace

std::vector<DynamicFix> dynamic_elementwise() {
  return {
      {"add.Tensor", kXLA, kBoth, compose<&add>},
      {"sub.Tensor", kXLA, kBoth, compose<&sub>},
      {"where.self", kXLA, kRefused, compose<&where>},
      {"sgn", kAutograd, kRefused, compose<&sgn>},
  };
}

}  // namespace torch_convfix
