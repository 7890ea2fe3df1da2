#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss_nd_native.h>
#include <ATen/ops/view_copy.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

// The losses below follow the formulas in the documentation of torch.nn.NLLLoss and CrossEntropyLoss.

int64_t class_dim(const at::Tensor& self) {
  return self.dim() == 1 ? 0 : 1;
}

// Class indices, the weight of each one's loss, and which are not ignored.
struct Targets {
  at::Tensor kept, index, weight;

  Targets(
      const at::Tensor& self,
      const at::Tensor& target,
      const std::optional<at::Tensor>& class_weight,
      int64_t ignore_index) {
    c10::SymDimVector expected(self.sym_sizes().begin(), self.sym_sizes().end());
    TORCH_CHECK(!expected.empty(), "nll_loss: input must have at least 1 dimension, got 0");
    expected.erase(expected.begin() + class_dim(self));
    TORCH_CHECK(
        target.sym_sizes() == c10::SymIntArrayRef(expected), "nll_loss: target must have shape ",
        c10::SymIntArrayRef(expected), " for input ", self.sym_sizes(), ", got ", target.sym_sizes());
    kept = target != ignore_index;
    index = at::where(kept, target, at::zeros_like(target)).to(at::kLong);
    weight = kept.to(self.scalar_type());
    if (class_weight && class_weight->defined()) {
      weight =
          weight * class_weight->index_select(0, index.reshape(-1)).reshape_symint(index.sym_sizes());
    }
  }
};

at::Tensor reduce(const at::Tensor& loss, const at::Tensor& weight, int64_t reduction) {
  return reduction == at::Reduction::Mean ? loss.sum() / weight.sum() : reduce_loss(loss, reduction);
}

at::Tensor keep(const Targets& targets, const at::Tensor& loss) {
  return at::where(targets.kept, loss, at::zeros_like(loss));
}

at::Tensor nll_loss(const at::Tensor& self, const Targets& targets, int64_t reduction) {
  const int64_t dim = class_dim(self);
  const auto picked = at::gather(self, dim, targets.index.unsqueeze(dim)).squeeze(dim);
  return reduce(keep(targets, -picked * targets.weight), targets.weight, reduction);
}

at::Tensor nll_loss_nd(
    const at::Tensor& self,
    const at::Tensor& target,
    const std::optional<at::Tensor>& weight,
    int64_t reduction,
    c10::SymInt ignore_index) {
  return nll_loss(self, Targets(self, target, weight, ignore_index.expect_int()), reduction);
}

at::Tensor cross_entropy_loss(
    const at::Tensor& self,
    const at::Tensor& target,
    const std::optional<at::Tensor>& weight,
    int64_t reduction,
    c10::SymInt ignore_index,
    double label_smoothing) {
  TORCH_CHECK(
      0 <= label_smoothing && label_smoothing <= 1,
      "cross_entropy: label_smoothing must be between 0 and 1, got ", label_smoothing);
  TORCH_CHECK(self.dim() >= 1, "cross_entropy: input must have at least 1 dimension, got 0");
  const int64_t dim = class_dim(self);
  const auto classes = self.sym_size(dim);
  const auto log_probability = at::log_softmax(self, dim);
  auto weighted = log_probability;
  if (weight && weight->defined()) {
    c10::SymDimVector sizes(self.dim(), 1);
    sizes[dim] = classes;
    weighted = weighted * weight->reshape_symint(sizes);
  }
  const double uniform = label_smoothing / classes.guard_int(__FILE__, __LINE__);

  if (target.sym_sizes() == self.sym_sizes()) {
    TORCH_CHECK(
        target.is_floating_point(),
        "cross_entropy: target of input's shape holds probabilities and must be floating point, got ",
        target.scalar_type());
    TORCH_CHECK(
        ignore_index < 0, "cross_entropy: ignore_index is for class indices, got ", ignore_index,
        " with a target of probabilities");
    const auto loss = -(weighted * (target * (1 - label_smoothing) + uniform)).sum(dim);
    return reduce_loss(loss, reduction);
  }

  const Targets targets(self, target, weight, ignore_index.expect_int());
  const auto loss = nll_loss(log_probability, targets, reduction);
  if (label_smoothing == 0) {
    return loss;
  }
  const auto spread = reduce(keep(targets, -weighted.sum(dim)), targets.weight, reduction);
  return loss * (1 - label_smoothing) + spread * uniform;
}

// torch_xla reads unbatched log-probabilities past their end.
at::Tensor unbatched_nll_loss_nd(
    const at::Tensor& self,
    const at::Tensor& target,
    const std::optional<at::Tensor>& weight,
    int64_t reduction,
    c10::SymInt ignore_index) {
  return self.dim() == 1
             ? nll_loss_nd(self, target, weight, reduction, std::move(ignore_index))
             : at::native::nll_loss_nd_symint(self, target, weight, reduction, std::move(ignore_index));
}

// The sum of the weights of the targets that are not ignored, from operators below autograd.
at::Tensor total_weight(
    const at::Tensor& self,
    const at::Tensor& target,
    const std::optional<at::Tensor>& weight,
    int64_t ignore_index) {
  const auto kept = target != ignore_index;
  if (!weight || !weight->defined()) {
    return kept.sum().to(self.scalar_type());
  }
  const auto index = at::where(kept, target, at::zeros_like(target)).to(at::kLong);
  // A view of a batch of unknown size is refused by torch_xla, and labels are mostly 1-d.
  const auto flat = [](const at::Tensor& t) { return t.dim() == 1 ? t : at::view_copy(t, {-1}); };
  return weight->index_select(0, flat(index)).masked_fill(flat(kept).logical_not(), 0).sum();
}

// torch_xla returns a total_weight of 1. Its gradient does not read it; core's forward mode of the
// gradient divides by it.
torch::CppFunction make_with_total_weight(const char* op) {
  const auto stock = std::make_shared<Stock>(op, "", c10::DispatchKey::XLA);
  return torch::CppFunction([stock](
                                c10::DispatchKeySet keys, const at::Tensor& self,
                                const at::Tensor& target, const std::optional<at::Tensor>& weight,
                                int64_t reduction, c10::SymInt ignore_index) {
    auto results = stock->results(keys, {self, target, weight, reduction, ignore_index});
    return std::make_tuple(
        results[0].toTensor(), reduction == at::Reduction::None
                                   ? results[1].toTensor()
                                   : total_weight(self, target, weight, ignore_index.expect_int()));
  });
}

}  // namespace

torch::CppFunction make_nll_loss_forward() {
  return make_with_total_weight("aten::nll_loss_forward");
}

torch::CppFunction make_nll_loss2d_forward() {
  return make_with_total_weight("aten::nll_loss2d_forward");
}

torch::CppFunction make_cross_entropy() {
  return make_fix<&cross_entropy_loss>();
}

torch::CppFunction make_nll_loss() {
  return make_fix<&nll_loss_nd>();
}

torch::CppFunction make_unbatched_nll_loss() {
  return make_fix<&unbatched_nll_loss_nd>();
}

}  // namespace torch_convfix
