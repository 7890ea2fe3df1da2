#include "dynamic/dynamic.h"

namespace torch_convfix {
namespace {

c10::OperatorHandle find(const std::string& op, const std::string& suffix = "") {
  const auto dot = op.find('.');
  const auto overload = dot == std::string::npos ? "" : op.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      ("aten::" + op.substr(0, dot) + suffix).c_str(), overload.c_str());
}

class WhereSymbolic final : public c10::OperatorKernel {
 public:
  WhereSymbolic(const DynamicFix& fix, c10::KernelFunction composed)
      : stock_(find(fix.op).getComputedKernelForDispatchKey(fix.key)), composed_(std::move(composed)) {
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const bool any = std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
      return argument.isSymIntList() || (argument.isTensor() && symbolic(argument.toTensor()));
    });
    if (any) {
      composed_.callBoxed(op, keys, stack);
    } else {
      stock_.callBoxed(op, keys, stack);
    }
  }

 private:
  c10::SafeKernelFunction stock_;
  c10::KernelFunction composed_;
};

class Call final : public c10::OperatorKernel {
 public:
  explicit Call(c10::OperatorHandle op) : op_(std::move(op)) {
  }

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    op_.callBoxed(stack);
  }

 private:
  c10::OperatorHandle op_;
};

}  // namespace

torch::CppFunction where_symbolic(const DynamicFix& fix, c10::KernelFunction composed) {
  return torch::CppFunction::makeFromBoxedFunctor(
      std::make_unique<WhereSymbolic>(fix, std::move(composed)));
}

torch::CppFunction copy(const DynamicFix& fix) {
  return where_symbolic(
      fix, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Call>(find(fix.op, "_copy"))));
}

}  // namespace torch_convfix
