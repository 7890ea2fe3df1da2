#include <ATen/ops/permute_copy.h>
#include <ATen/ops/slice_copy.h>
#include <ATen/ops/transpose_copy.h>
#include <ATen/ops/view_copy.h>

#include "lowering.h"

namespace torch_convfix::lowering::feature_grouped {

// W[k, c, t] = sum over n, o of x[n, c, o * stride + t * dilation - padding] * g[n, k, o] is a
// convolution over o of x by g, whose images are the channels of a group and whose features are
// (group, batch): stride and dilation change places.
at::Tensor weight_grad(
    const StockKernels& stock, const Form& form, const at::Tensor& x, const at::Tensor& g) {
  const int64_t batch = form.x[0];
  const int64_t channels = form.x[1] / form.groups;
  const at::IntArrayRef image = at::IntArrayRef(form.x).slice(2);

  at::DimVector split{batch, form.groups, channels};
  split.append(image.begin(), image.end());
  at::DimVector order{2, 1, 0};
  for (int64_t i = 3; i < form.dim() + 3; ++i) {
    order.push_back(i);
  }
  at::DimVector joined{channels, form.groups * batch};
  joined.append(image.begin(), image.end());
  const auto images = at::view_copy(at::permute_copy(at::view_copy(x, split), order), joined);

  Form swapped = form;
  swapped.stride = form.dilation;
  swapped.dilation = form.stride;
  auto result =
      stock.forward(swapped, images, at::transpose_copy(g, 0, 1));  // [channels, K, *k or more]
  for (int64_t i = 2; i < result.dim(); ++i) {
    result = at::slice_copy(
        result, i, 0, form.w[i]);  // the stride may leave room for more taps than there are
  }
  return at::transpose_copy(result, 0, 1);
}

}  // namespace torch_convfix::lowering::feature_grouped
