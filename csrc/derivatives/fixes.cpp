#include "derivatives/fixes.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/constant_pad_nd.h>

namespace torch_convfix {

at::DimVector spread(at::IntArrayRef values, int64_t dim) {
  return values.size() == 1 ? at::DimVector(dim, values[0])
                            : at::DimVector(values.begin(), values.end());
}

at::DimVector last_sizes(const at::Tensor& t, int64_t dim) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(t.sym_sizes().slice(t.dim() - dim));
  return at::DimVector(sizes.begin(), sizes.end());
}

at::Tensor pad_last(
    const at::Tensor& t, at::IntArrayRef before, at::IntArrayRef after, const at::Scalar& value) {
  std::vector<int64_t> pads;
  for (auto i = static_cast<int64_t>(before.size()) - 1; i >= 0; --i) {
    pads.insert(pads.end(), {before[i], after[i]});
  }
  return at::constant_pad_nd(t, pads, value);
}

at::Tensor reduce_loss(const at::Tensor& loss, int64_t reduction) {
  switch (reduction) {
    case at::Reduction::None:
      return loss;
    case at::Reduction::Sum:
      return loss.sum();
    default:
      return loss.mean();
  }
}

}  // namespace torch_convfix
