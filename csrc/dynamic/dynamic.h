#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>

#include "../dynamic_shapes.h"

namespace torch_convfix {

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

using MakeDynamicFix = torch::CppFunction(const DynamicFix&);

// convolution.cpp
MakeDynamicFix make_dynamic_convolution, make_dynamic_convolution_backward;
// sizes.cpp
MakeDynamicFix make_dynamic_view, make_dynamic_slice_backward, make_dynamic_zeros_like,
    make_dynamic_full, make_dynamic_zeros, make_dynamic_new_zeros, make_dynamic_new_full;
// elementwise.cpp
MakeDynamicFix make_dynamic_add, make_dynamic_sub, make_dynamic_where, make_dynamic_sgn;
// reductions.cpp
MakeDynamicFix make_dynamic_mean, make_dynamic_mean_dim, make_dynamic_var, make_dynamic_std,
    make_dynamic_var_mean, make_dynamic_log_softmax;
// layers.cpp
MakeDynamicFix make_dynamic_linear, make_dynamic_batch_norm, make_dynamic_layer_norm,
    make_dynamic_group_norm, make_dynamic_adaptive_avg_pool2d, make_dynamic_prelu,
    make_dynamic_upsample_nearest2d, make_dynamic_mse_loss, make_dynamic_bce_with_logits;

}  // namespace torch_convfix
