#include <ATen/ExpandUtils.h>
#include <ATen/ops/expand_copy.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/hardshrink_backward_ops.h>
#include <ATen/ops/hardsigmoid_backward_ops.h>
#include <ATen/ops/hardswish_backward_ops.h>
#include <ATen/ops/hardtanh_backward_ops.h>
#include <ATen/ops/leaky_relu_backward_ops.h>
#include <ATen/ops/log_sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/softplus_backward_ops.h>
#include <ATen/ops/softshrink_backward_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/threshold_backward_ops.h>

#include <cstring>

#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

// The kernels that torch_xla and TorchTPU have of these take tensors of one shape alone, and vmap relies
// on broadcasting: what it does not map has no batch.
class Broadcasting final : public c10::OperatorKernel {
 public:
  Broadcasting(const char* op, c10::DispatchKey key) : stock_(op, "", key) {
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    c10::SymDimVector sizes;
    bool same = true, first = true;
    for (const auto& argument : arguments) {
      if (argument.isTensor()) {
        const auto own = argument.toTensor().sym_sizes();
        same = same && (first || own == c10::SymIntArrayRef(sizes));
        sizes = first ? c10::SymDimVector(own) : at::infer_size_symdimvector(sizes, own);
        first = false;
      }
    }
    for (size_t i = 0; !same && i < count; ++i) {
      auto& argument = torch::jit::peek(*stack, i, count);
      if (argument.isTensor()) {
        argument = at::expand_copy_symint(argument.toTensor(), sizes);
      }
    }
    stock_.call(op, keys, stack);
  }

 private:
  Stock stock_;
};

template <class Op, c10::DispatchKey key>
torch::CppFunction make() {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Broadcasting>(Op::name, key));
}

template <c10::DispatchKey key, class... Ops>
std::vector<DerivativeFix> fixes() {
  const auto skip = std::strlen("aten::");
  return {{Ops::name + skip, "vmap of it is refused", make<Ops, key>, key}...};
}

}  // namespace

template <c10::DispatchKey key>
std::vector<DerivativeFix> broadcasting_activations() {
  namespace ops = at::_ops;
  auto all = fixes<
      key, ops::gelu_backward, ops::hardshrink_backward, ops::hardsigmoid_backward,
      ops::hardswish_backward, ops::hardtanh_backward, ops::leaky_relu_backward,
      ops::log_sigmoid_backward, ops::sigmoid_backward, ops::softplus_backward, ops::softshrink_backward,
      ops::threshold_backward>();
  if constexpr (key == c10::DispatchKey::PrivateUse1) {  // torch_xla's broadcasts
    all.push_back(fixes<key, ops::tanh_backward>().front());
  }
  return all;
}

template std::vector<DerivativeFix> broadcasting_activations<c10::DispatchKey::XLA>();
template std::vector<DerivativeFix> broadcasting_activations<c10::DispatchKey::PrivateUse1>();

}  // namespace torch_convfix
