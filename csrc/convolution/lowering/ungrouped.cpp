#include <ATen/ops/diagonal_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/permute_copy.h>
#include <ATen/ops/view_copy.h>

#include <numeric>

#include "convolution/lowering/lowering.h"

namespace torch_convfix::lowering::ungrouped {

// The gradient of a weight without groups holds that of the grouped weight in its diagonal blocks.
at::Tensor weight_grad(
    const StockKernels& stock,
    const Geometry& geometry,
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight) {
  Geometry one = geometry;
  one.groups = 1;
  const int64_t groups = geometry.groups.expect_int();
  const at::DimVector own(weight.sizes());
  at::DimVector full(own);
  full[1] *= groups;
  const auto like = at::empty(full, weight.options());  // only its sizes are used
  const auto all =
      std::get<1>(stock.convolution_backward(one, grad_output, input, like, {false, true, false}));

  // [groups, K / groups, groups, C / groups, *k] -> [K / groups, C / groups, *k, groups]
  at::DimVector blocks{groups, full[0] / groups, groups, full[1] / groups};
  blocks.append(full.begin() + 2, full.end());
  const auto diagonal = at::diagonal_copy(at::view_copy(all, blocks), 0, 0, 2);
  at::DimVector order(diagonal.dim());
  order[0] = diagonal.dim() - 1;
  std::iota(order.begin() + 1, order.end(), 0);
  return at::view_copy(at::permute_copy(diagonal, order), own);
}

}  // namespace torch_convfix::lowering::ungrouped
