#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/permute_copy.h>
#include <ATen/ops/transpose_copy.h>
#include <ATen/ops/view_copy.h>

#include "convolution/lowering/lowering.h"

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
  // Exactly the positions that g meets: where the stride left some over, there would be more taps.
  std::vector<int64_t> pads(2 * form.dim());
  for (int64_t i = 0; i < form.dim(); ++i) {
    const int64_t met =
        (form.g[i + 2] - 1) * form.stride[i] + (form.w[i + 2] - 1) * form.dilation[i] + 1;
    const int64_t last = 2 * (form.dim() - 1 - i);
    pads[last] = form.padding[i];
    pads[last + 1] = met - form.padding[i] - form.x[i + 2];
  }
  const auto images =
      at::constant_pad_nd(at::view_copy(at::permute_copy(at::view_copy(x, split), order), joined), pads);

  Form swapped = form;
  swapped.stride = form.dilation;
  swapped.dilation = form.stride;
  swapped.padding.assign(form.dim(), 0);
  return at::transpose_copy(stock.forward(swapped, images, at::transpose_copy(g, 0, 1)), 0, 1);
}

}  // namespace torch_convfix::lowering::feature_grouped
