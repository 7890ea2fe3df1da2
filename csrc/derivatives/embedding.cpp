#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

#include "derivatives/fixes.h"

namespace torch_convfix {

// TorchTPU drops the second derivative. The rows of padding_idx get no gradient.
torch::CppFunction make_embedding() {
  const auto stock =
      std::make_shared<Stock>("aten::embedding", "", c10::DispatchKey::AutogradPrivateUse1);
  return torch::CppFunction([stock](
                                c10::DispatchKeySet keys, const at::Tensor& weight,
                                const at::Tensor& indices, c10::SymInt padding_idx,
                                bool scale_grad_by_freq, bool sparse) {
    // Core's forward mode lets the tangents of padding_idx through, and stock is right there.
    const bool forward_mode = weight._fw_grad(0).defined();
    if (scale_grad_by_freq || sparse || weight.dim() != 2 || forward_mode) {
      return (*stock)(keys, {weight, indices, padding_idx, scale_grad_by_freq, sparse});
    }
    c10::SymDimVector sizes(indices.sym_sizes().begin(), indices.sym_sizes().end());
    sizes.push_back(weight.sym_size(1));
    const auto rows = weight.index_select(0, indices.reshape(-1)).reshape_symint(sizes);
    if (padding_idx < 0) {
      return rows;
    }
    return at::where((indices == padding_idx.expect_int()).unsqueeze(-1), rows.detach(), rows);
  });
}

}  // namespace torch_convfix
