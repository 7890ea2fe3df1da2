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
#include <ATen/ops/threshold_backward_ops.h>

#include <cstring>

#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

// torch_xla's kernels of these take tensors of one shape alone, and vmap relies on broadcasting: what it
// does not map has no batch.
class Broadcasting final : public c10::OperatorKernel {
 public:
  explicit Broadcasting(const char* op) : stock_(op, "", c10::DispatchKey::XLA) {
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

template <class Op>
torch::CppFunction make() {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Broadcasting>(Op::name));
}

template <class Op>
DerivativeFix fix() {
  const char* name = Op::name;
  return {name + std::strlen("aten::"), "vmap of it is refused", make<Op>, c10::DispatchKey::XLA};
}

}  // namespace

const std::vector<DerivativeFix>& broadcasting_activations() {
  static const std::vector<DerivativeFix> fixes{
      fix<at::_ops::gelu_backward>(),        fix<at::_ops::hardshrink_backward>(),
      fix<at::_ops::hardsigmoid_backward>(), fix<at::_ops::hardswish_backward>(),
      fix<at::_ops::hardtanh_backward>(),    fix<at::_ops::leaky_relu_backward>(),
      fix<at::_ops::log_sigmoid_backward>(), fix<at::_ops::sigmoid_backward>(),
      fix<at::_ops::softplus_backward>(),    fix<at::_ops::softshrink_backward>(),
      fix<at::_ops::threshold_backward>(),
  };
  return fixes;
}

}  // namespace torch_convfix
