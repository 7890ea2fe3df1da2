#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/expand_copy.h>
#include <ATen/ops/unsqueeze_copy.h>
#include <ATen/ops/view_copy.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "convolution/lowering/lowering.h"

// `merge` neighbouring groups become one, whose weight is block-diagonal: a matrix unit is filled that
// narrow groups leave empty. F and I multiply the zeros between the blocks with x or g, so there a NaN
// or Inf reaches the other groups of its merge; W only leaves out what it has computed too much.
namespace torch_convfix::lowering::merged {
namespace {

Form merge_groups(Form form, int64_t merge) {
  form.groups /= merge;
  form.w[1] *= merge;
  return form;
}

// The block-diagonal part of [K, merge, C / groups, *k]; zero elsewhere.
at::Tensor keep_diagonal(const Form& form, int64_t merge, const at::Tensor& blocks) {
  const auto ints = blocks.options().dtype(at::kInt);
  const auto row = at::arange(form.w[0], ints).floor_divide(form.w[0] / form.groups).remainder(merge);
  const auto same = at::unsqueeze_copy(row, 1) == at::arange(merge, ints);
  at::DimVector sizes(blocks.dim(), 1);
  sizes[0] = form.w[0];
  sizes[1] = merge;
  return at::where(at::view_copy(same, sizes), blocks, at::zeros({}, blocks.options()));
}

at::Tensor block_diagonal(const Form& form, int64_t merge, const at::Tensor& w) {
  at::DimVector sizes(form.w.begin(), form.w.end());
  sizes.insert(sizes.begin() + 1, merge);
  const auto blocks = at::expand_copy(at::unsqueeze_copy(w, 1), sizes);
  return at::view_copy(keep_diagonal(form, merge, blocks), merge_groups(form, merge).w);
}

}  // namespace

at::Tensor forward(
    const StockKernels& stock,
    const Form& form,
    int64_t merge,
    const at::Tensor& x,
    const at::Tensor& w) {
  return stock.forward(merge_groups(form, merge), x, block_diagonal(form, merge, w));
}

at::Tensor input_grad(
    const StockKernels& stock,
    const Form& form,
    int64_t merge,
    const at::Tensor& g,
    const at::Tensor& w) {
  return stock.input_grad(merge_groups(form, merge), g, block_diagonal(form, merge, w));
}

at::Tensor weight_grad(
    const StockKernels& stock,
    const Form& form,
    int64_t merge,
    const at::Tensor& x,
    const at::Tensor& g) {
  at::DimVector sizes(form.w.begin(), form.w.end());
  sizes.insert(sizes.begin() + 1, merge);
  const auto all = at::view_copy(stock.weight_grad(merge_groups(form, merge), x, g), sizes);
  return keep_diagonal(form, merge, all).sum(1);
}

}  // namespace torch_convfix::lowering::merged
