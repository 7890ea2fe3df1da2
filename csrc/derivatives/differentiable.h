#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace torch_convfix {

template <class T>
bool has_tangent(const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return argument.defined() && argument._fw_grad(/*level=*/0).defined();
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    return argument && has_tangent(*argument);
  } else {
    return false;
  }
}

template <class T>
bool requires_grad(const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return argument.defined() && argument.requires_grad();
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    return argument && requires_grad(*argument);
  } else {
    return false;
  }
}

// For an operator that PyTorch cannot differentiate: `composition`, of differentiable operators, where
// its result is differentiated (a graph is built, or an argument has a tangent), and otherwise the
// device's kernel.
template <class Op, auto composition, class Schema = typename Op::schema>
struct Differentiable;

template <class Op, auto composition, class Result, class... Args>
struct Differentiable<Op, composition, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    if ((has_tangent(args) || ...) || (at::GradMode::is_enabled() && (requires_grad(args) || ...))) {
      return composition(args...);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Op::redispatch(keys & c10::after_autograd_keyset, args...);
  }
};

// For an operator with a derivative in reverse mode alone: `composition` where an argument has a
// tangent, and otherwise core's kernel.
template <class Op, auto composition, class Schema = typename Op::schema>
struct ForwardDifferentiable;

template <class Op, auto composition, class Result, class... Args>
struct ForwardDifferentiable<Op, composition, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    if ((has_tangent(args) || ...)) {
      return composition(args...);
    }
    // Core's kernel stands at every autograd key; ours only at the device's.
    keys = keys.remove(c10::DispatchKey::AutogradFunctionality).add(c10::DispatchKey::AutogradOther);
    return Op::redispatch(keys, args...);
  }
};

template <class Op, auto composition>
torch::CppFunction make_differentiable() {
  return torch::CppFunction(TORCH_FN((Differentiable<Op, composition>::call)));
}

template <class Op, auto composition>
torch::CppFunction make_forward_differentiable() {
  return torch::CppFunction(TORCH_FN((ForwardDifferentiable<Op, composition>::call)));
}

}  // namespace torch_convfix
