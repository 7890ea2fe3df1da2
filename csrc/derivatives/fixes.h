#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "derivatives/derivative_fixes.h"

namespace torch_convfix {

// What derivative_fixes.cpp registers, by the file that defines it.
using MakeFix = torch::CppFunction();

// max_pool.cpp
MakeFix make_max_pool2d, make_max_pool3d, make_max_pool2d_backward, make_max_pool3d_backward;
MakeFix make_adaptive_max_pool2d_backward;
// avg_pool.cpp
MakeFix make_avg_pool1d, make_avg_pool2d, make_avg_pool3d;
// activations.cpp
MakeFix make_prelu, make_prelu_backward;
MakeFix make_elu_backward, make_celu, make_celu_, make_hardsigmoid_backward, make_log_sigmoid_backward;
// losses.cpp
MakeFix make_cross_entropy, make_nll_loss, make_unbatched_nll_loss, make_nll_loss_forward,
    make_nll_loss2d_forward;
// arguments.cpp
MakeFix make_amax, make_amin, make_norm, make_roll;
// normalization.cpp
MakeFix make_layer_norm, make_layer_norm_backward, make_group_norm, make_group_norm_backward;
MakeFix make_batch_norm_with_unbiased_variance;
MakeFix make_batch_norm_that_updates;
MakeFix make_layer_norm_backward_under_vmap, make_batch_norm_backward_under_vmap;
MakeFix make_batch_norm, make_batch_norm_backward, make_batch_norm_backward_by_running_statistics;
// grid_sample.cpp
MakeFix make_grid_sampler_2d, make_grid_sampler_2d_backward;
MakeFix make_grid_sampler_3d, make_grid_sampler_3d_backward;
MakeFix make_right_for_the_grid_2d, make_right_for_the_grid_3d;
// attention.cpp
MakeFix make_flash_attention_for_cpu, make_flash_attention_for_cpu_backward;
MakeFix make_overrideable_attention, make_overrideable_attention_backward;
MakeFix make_cudnn_attention, make_cudnn_attention_backward;
// distances.cpp
MakeFix make_cdist_forward, make_cdist_backward, make_cdist_backward_under_vmap;
MakeFix make_euclidean_dist;
MakeFix make_pdist_forward, make_infinite_pdist, make_pdist_backward;
// margin_losses.cpp
MakeFix make_multi_margin_loss, make_multi_margin_loss_backward;
MakeFix make_multilabel_margin_loss, make_multilabel_margin_loss_backward;
// embedding_bag.cpp
MakeFix make_embedding_bag, make_embedding_bag_forward_only, make_embedding_bag_backward;
MakeFix make_embedding_bag_per_sample_weights_backward;
// segment_reduce.cpp
MakeFix make_segment_reduce, make_segment_reduce_backward;
// circular_pad.cpp
MakeFix make_circular_pad;
// embedding.cpp
MakeFix make_embedding;

// broadcast.cpp: a stack's kernels, at XLA or PrivateUse1, that take tensors of one shape alone
template <c10::DispatchKey key>
std::vector<DerivativeFix> broadcasting_activations();

template <auto function>
torch::CppFunction make_fix() {
  using Function = std::remove_pointer_t<decltype(function)>;
  return torch::CppFunction::makeFromUnboxedFunction(
      c10::CompileTimeFunctionPointer<Function, function>());
}

// The kernel that the backend or core has at the autograd key, fetched before ours takes its place.
class Stock {
 public:
  explicit Stock(
      const char* op, const char* overload = "", c10::DispatchKey key = c10::DispatchKey::AutogradXLA)
      : kernel_(
            c10::Dispatcher::singleton()
                .findSchemaOrThrow(op, overload)
                .getComputedKernelForDispatchKey(key)) {
  }

  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    kernel_.callBoxed(op, keys, stack);
  }

  torch::jit::Stack results(c10::DispatchKeySet keys, torch::jit::Stack stack) const {
    kernel_.callBoxed(kernel_.opHandle(), keys, &stack);
    return stack;
  }

  at::Tensor operator()(c10::DispatchKeySet keys, torch::jit::Stack stack) const {
    return results(keys, std::move(stack))[0].toTensor();
  }

 private:
  c10::SafeKernelFunction kernel_;
};

// One entry a dimension, where the operators take one for all.
at::DimVector spread(at::IntArrayRef values, int64_t dim);

// The last `dim` sizes, kept by value: the first use of a view of a tensor written in place makes
// functionalization build it anew, and the sizes referred to die with the old one.
at::DimVector last_sizes(const at::Tensor& t, int64_t dim);

// Pads the last dimensions, as many as `before` has entries.
at::Tensor pad_last(
    const at::Tensor& t, at::IntArrayRef before, at::IntArrayRef after, const at::Scalar& value);

// By at::Reduction: each entry, their mean, or their sum.
at::Tensor reduce_loss(const at::Tensor& loss, int64_t reduction);

}  // namespace torch_convfix
