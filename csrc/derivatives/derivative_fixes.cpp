#include "derivatives/derivative_fixes.h"

#include <ATen/ops/cross_native.h>
#include <ATen/ops/diag_native.h>
#include <ATen/ops/einsum_native.h>
#include <ATen/ops/inverse_native.h>
#include <ATen/ops/kl_div_native.h>
#include <ATen/ops/logdet_native.h>
#include <ATen/ops/selu_native.h>
#include <ATen/ops/std_native.h>
#include <ATen/ops/svd_native.h>
// Later versions of torch have no torch.qr.
#if __has_include(<ATen/ops/qr_native.h>)
#include <ATen/ops/qr_native.h>
#define TORCH_CONVFIX_HAS_QR
#endif

#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

std::vector<DerivativeFix> joined(
    std::vector<DerivativeFix> all, const std::vector<DerivativeFix>& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

const std::vector<DerivativeFix>& derivative_fixes(const std::string& device) {
  using Std = at::Tensor(const at::Tensor&, bool);
  using StdDim = at::Tensor(const at::Tensor&, at::OptionalIntArrayRef, bool, bool);
  constexpr auto kDropped = "the second derivative through the pooled tensor is dropped";
  constexpr auto kSlow = "its derivative loops over every output";
  constexpr auto kDivisor = "divisor_override is wrong at the border, and not in the hash";
  constexpr auto kHidden = "forward mode and vmap of the gradient are wrong";
  constexpr auto kGrid = "the second derivative; the grid's gradient, reflected or without input's";
  constexpr auto kEmpty = "an empty list of dimensions reduces nothing";
  constexpr auto kWeight = "vmap over the weight is refused";
  constexpr auto kStatistics = "running statistics stay as they were where it is traced";
  constexpr auto kTotal = "total_weight, by which forward mode divides, is 1";
  static const std::vector<DerivativeFix> none;
  static const auto xla = joined(
      {
          {"max_pool2d", kDropped, make_max_pool2d},
          {"max_pool3d", kDropped, make_max_pool3d},
          {"max_pool2d_with_indices_backward", kSlow, make_max_pool2d_backward},
          {"max_pool3d_with_indices_backward", kSlow, make_max_pool3d_backward},
          {"elu_backward", "the derivatives of elu, selu and celu are those at their result",
           make_elu_backward},
          // torch_xla's kernels of these hide the composition that functorch differentiates.
          {"selu", kHidden, make_fix<&at::native::selu>},
          {"selu_", kHidden, make_fix<&at::native::selu_>},
          {"diag", kHidden, make_fix<&at::native::diag>},
          {"cross", kHidden, make_fix<&at::native::cross>},
          {"inverse", kHidden, make_fix<&at::native::inverse>},
          {"logdet", kHidden, make_fix<&at::native::logdet>},
#ifdef TORCH_CONVFIX_HAS_QR
          {"qr", kHidden, make_fix<&at::native::qr>},
#endif
          {"svd", kHidden, make_fix<&at::native::svd>},
          {"kl_div", kHidden, make_fix<&at::native::kl_div>},
          {"std", kHidden, make_fix<static_cast<Std*>(&at::native::std)>},
          {"std.dim", kHidden, make_fix<static_cast<StdDim*>(&at::native::std)>},
          {"einsum", "the second derivative is dropped", make_fix<&at::native::einsum>},
          {"amax", kEmpty, make_amax},
          {"amin", kEmpty, make_amin},
          {"norm.ScalarOpt_dim", "the order -inf is wrong", make_norm},
          {"_pdist_forward", "the order inf is wrong", make_infinite_pdist, c10::DispatchKey::XLA},
          {"roll", "an empty tensor ends the process", make_roll},
          {"adaptive_max_pool2d_backward", "forward mode of the gradient is wrong",
           make_adaptive_max_pool2d_backward},
          {"nll_loss_forward", kTotal, make_nll_loss_forward, c10::DispatchKey::XLA},
          {"nll_loss2d_forward", kTotal, make_nll_loss2d_forward, c10::DispatchKey::XLA},
          {"nll_loss_nd", "unbatched input ends the process", make_unbatched_nll_loss},
          {"native_batch_norm", "running_var takes the biased variance",
           make_batch_norm_with_unbiased_variance, c10::DispatchKey::XLA},
          {"_pad_circular", "forward mode, and what was written in place, are refused",
           make_circular_pad},
          {"native_batch_norm_backward", "by running statistics it is refused",
           make_batch_norm_backward_by_running_statistics, c10::DispatchKey::XLA},
          {"_prelu_kernel", kWeight, make_prelu, c10::DispatchKey::XLA},
          {"_prelu_kernel_backward", kWeight, make_prelu_backward, c10::DispatchKey::XLA},
          {"avg_pool2d", kDivisor, make_avg_pool2d},
          {"avg_pool3d", kDivisor, make_avg_pool3d},
      },
      broadcasting_activations<c10::DispatchKey::XLA>());
  static const auto tpu = joined(
      {
          {"cross_entropy_loss", "the second derivative is dropped", make_cross_entropy},
          {"nll_loss_nd", "the second derivative through grad_output is dropped", make_nll_loss},
          {"avg_pool1d", "every derivative is dropped", make_avg_pool1d},
          {"celu", "alpha scales the result alone", make_celu},
          {"celu_", "alpha scales the result alone", make_celu_},
          {"embedding", "the second derivative is dropped", make_embedding},
          {"native_batch_norm", kStatistics, make_batch_norm_that_updates,
           c10::DispatchKey::PrivateUse1},
          {"_prelu_kernel", kWeight, make_prelu, c10::DispatchKey::PrivateUse1},
          {"_prelu_kernel_backward", kWeight, make_prelu_backward, c10::DispatchKey::PrivateUse1},
          {"grid_sampler_2d_backward", kGrid, make_right_for_the_grid_2d},
          {"grid_sampler_3d_backward", kGrid, make_right_for_the_grid_3d},
      },
      broadcasting_activations<c10::DispatchKey::PrivateUse1>());
  return device == "xla" ? xla : device == "tpu" ? tpu : none;
}

const std::vector<DerivativeFix>& lacking_derivatives() {
  constexpr auto kLacks = "PyTorch has no derivative of it";
  constexpr auto kNoForwardMode = "PyTorch has no forward mode of it";
  constexpr auto kConstants =
      "what is differentiated after forward mode lacks the statistics' derivative";
  constexpr auto kBatched = "differentiated from outside of vmap it lacks the statistics' derivative";
  static const std::vector<DerivativeFix> fixes{
      {"native_layer_norm", kConstants, make_layer_norm},
      {"native_layer_norm_backward", kConstants, make_layer_norm_backward},
      {"native_group_norm", kConstants, make_group_norm},
      {"native_group_norm_backward", kConstants, make_group_norm_backward},
      {"native_batch_norm", kConstants, make_batch_norm},
      {"native_batch_norm_backward", kConstants, make_batch_norm_backward},
      {"native_layer_norm_backward", kBatched, make_layer_norm_backward_under_vmap,
       c10::DispatchKey::FuncTorchBatched},
      {"native_batch_norm_backward", kBatched, make_batch_norm_backward_under_vmap,
       c10::DispatchKey::FuncTorchBatched},
      {"hardsigmoid_backward", kLacks, make_hardsigmoid_backward},
      {"grid_sampler_2d", kNoForwardMode, make_grid_sampler_2d},
      {"grid_sampler_2d_backward", kLacks, make_grid_sampler_2d_backward},
      {"grid_sampler_3d", kNoForwardMode, make_grid_sampler_3d},
      {"grid_sampler_3d_backward", kLacks, make_grid_sampler_3d_backward},
      {"_scaled_dot_product_flash_attention_for_cpu", kNoForwardMode, make_flash_attention_for_cpu},
      {"_scaled_dot_product_flash_attention_for_cpu_backward", kLacks,
       make_flash_attention_for_cpu_backward},
      {"_scaled_dot_product_fused_attention_overrideable", kNoForwardMode, make_overrideable_attention},
      {"_scaled_dot_product_fused_attention_overrideable_backward", kLacks,
       make_overrideable_attention_backward},
      {"_scaled_dot_product_cudnn_attention", kNoForwardMode, make_cudnn_attention},
      {"_scaled_dot_product_cudnn_attention_backward", kLacks, make_cudnn_attention_backward},
      {"_cdist_forward", kNoForwardMode, make_cdist_forward},
      {"_cdist_backward", kLacks, make_cdist_backward},
      {"_cdist_backward", "vmap of it is wrong", make_cdist_backward_under_vmap,
       c10::DispatchKey::FuncTorchBatched},
      {"_euclidean_dist", kNoForwardMode, make_euclidean_dist},
      {"_pdist_forward", kNoForwardMode, make_pdist_forward},
      {"_pdist_backward", kLacks, make_pdist_backward},
      {"multi_margin_loss", kNoForwardMode, make_multi_margin_loss},
      {"multi_margin_loss_backward", kLacks, make_multi_margin_loss_backward},
      {"multilabel_margin_loss_forward", kNoForwardMode, make_multilabel_margin_loss},
      {"multilabel_margin_loss_backward", kLacks, make_multilabel_margin_loss_backward},
      {"_embedding_bag", kNoForwardMode, make_embedding_bag},
      {"_embedding_bag_forward_only", kNoForwardMode, make_embedding_bag_forward_only},
      {"_embedding_bag_backward", kLacks, make_embedding_bag_backward},
      {"_embedding_bag_per_sample_weights_backward", kLacks,
       make_embedding_bag_per_sample_weights_backward},
      {"segment_reduce", kNoForwardMode, make_segment_reduce},
      {"_segment_reduce_backward", kLacks, make_segment_reduce_backward},
  };
  return fixes;
}

}  // namespace torch_convfix
