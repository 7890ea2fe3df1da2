#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>
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

template <class T>
T primal(const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return has_tangent(argument) ? argument._fw_primal(/*level=*/0) : argument;
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    return argument ? std::make_optional(primal(*argument)) : argument;
  } else {
    return argument;
  }
}

inline at::Tensor with_tangent(at::Tensor result, const at::Tensor& tangent) {
  result._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  return result;
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

// Core's kernel stands at every autograd key; ours only at the device's.
inline c10::DispatchKeySet core_autograd(c10::DispatchKeySet keys) {
  return keys.remove(c10::DispatchKey::AutogradFunctionality).add(c10::DispatchKey::AutogradOther);
}

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
    return Op::redispatch(core_autograd(keys), args...);
  }
};

// The same, where core's result is kept: `forward` gives it a tangent, and takes it first.
template <class Op, auto forward, class Schema = typename Op::schema>
struct ForwardRule;

template <class Op, auto forward, class Result, class... Args>
struct ForwardRule<Op, forward, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    keys = core_autograd(keys);
    if (!(has_tangent(args) || ...)) {
      return Op::redispatch(keys, args...);
    }
    if (!(requires_grad(args) || ...)) {
      return forward(Op::redispatch(keys, primal(args)...), args...);
    }
    // The graph must keep the tangents of what it saves.
    return forward(
        [&] {
          const c10::AutoFwGradMode guard(false);
          return Op::redispatch(keys, args...);
        }(),
        args...);
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

template <class Op, auto forward>
torch::CppFunction make_forward_rule() {
  return torch::CppFunction(TORCH_FN((ForwardRule<Op, forward>::call)));
}

}  // namespace torch_convfix
