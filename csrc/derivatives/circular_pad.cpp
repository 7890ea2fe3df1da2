#include <ATen/ops/_pad_circular.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

// Core writes slices of the result into an empty tensor, and refers to sizes that die with the view.
at::Tensor circular_pad(const at::Tensor& self, c10::SymIntArrayRef padding) {
  const c10::SymDimVector sizes(self.sym_sizes());
  // Refuses what core refuses.
  at::_pad_circular_symint(at::empty_symint(sizes, self.options().device(at::kMeta)), padding);
  auto result = self;
  for (size_t i = 0; 2 * i < padding.size(); ++i) {
    const auto dim = static_cast<int64_t>(sizes.size() - i) - 1;
    const auto &before = padding[2 * i], &after = padding[2 * i + 1];
    // What is cropped does not wrap around.
    result =
        result.slice_symint(dim, before < 0 ? -before : 0, after < 0 ? sizes[dim] + after : sizes[dim]);
    const auto size = result.sym_size(dim);
    TORCH_CHECK(
        before <= size && after <= size, "pad must not exceed what it leaves of a dimension, ", size,
        ", got (", before, ", ", after, ")");
    std::vector<at::Tensor> parts{result};
    if (before > 0) {
      parts.insert(parts.begin(), result.slice_symint(dim, size - before, size));
    }
    if (after > 0) {
      parts.push_back(result.slice_symint(dim, 0, after));
    }
    result = at::cat(parts, dim);
  }
  return result;
}

}  // namespace

torch::CppFunction make_circular_pad() {
  return make_fix<&circular_pad>();
}

}  // namespace torch_convfix
