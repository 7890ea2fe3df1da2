#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>

#include "dynamic/dynamic_shapes.h"

namespace torch_convfix {

constexpr auto kXLA = c10::DispatchKey::XLA;
constexpr auto kAutograd = c10::DispatchKey::AutogradXLA;

constexpr auto kView = "views refuse bounded-dynamic sizes: a copy instead";
constexpr auto kBoth = "refuses two bounded-dynamic operands";
constexpr auto kRefused = "refuses bounded-dynamic sizes";
constexpr auto kBound = "takes the bound for the size";

inline bool symbolic(c10::SymIntArrayRef sizes) {
  return std::any_of(
      sizes.begin(), sizes.end(), [](const c10::SymInt& size) { return size.is_heap_allocated(); });
}

inline bool symbolic(const at::Tensor& t) {
  return t.defined() && symbolic(t.sym_sizes());
}

// A kernel for the operator of `fix` that calls `composed` where a tensor or a list of sizes among the
// arguments is symbolic, and what was there before where none is.
torch::CppFunction where_symbolic(const DynamicFix& fix, c10::KernelFunction composed);

template <auto function>
torch::CppFunction compose(const DynamicFix& fix) {
  using Function = std::remove_pointer_t<decltype(function)>;
  return where_symbolic(
      fix, c10::KernelFunction::makeFromUnboxedFunction(
               c10::CompileTimeFunctionPointer<Function, function>()));
}

// Calls the operator whose name ends in _copy: the same arguments, but the result is no view.
torch::CppFunction copy(const DynamicFix& fix);

// Which operators each file mends.
std::vector<DynamicFix> dynamic_sizes();
std::vector<DynamicFix> dynamic_elementwise();
std::vector<DynamicFix> dynamic_reductions();
std::vector<DynamicFix> dynamic_layers();

}  // namespace torch_convfix
