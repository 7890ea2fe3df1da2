#include "dynamic_shapes.h"

#include "dynamic/dynamic.h"

namespace torch_convfix {
namespace {

constexpr auto kXLA = c10::DispatchKey::XLA;
constexpr auto kAutograd = c10::DispatchKey::AutogradXLA;

}  // namespace

const std::vector<DynamicFix>& dynamic_convolutions() {
  constexpr auto kRefused = "refuses symbolic sizes";
  static const std::vector<DynamicFix> fixes{
      {"convolution", kXLA, kRefused, make_dynamic_convolution},
      {"convolution_backward", kXLA, kRefused, make_dynamic_convolution_backward},
  };
  return fixes;
}

const std::vector<DynamicFix>& dynamic_operators() {
  constexpr auto kView = "views refuse bounded-dynamic sizes: a copy instead";
  constexpr auto kBoth = "refuses two bounded-dynamic operands";
  constexpr auto kRefused = "refuses bounded-dynamic sizes";
  constexpr auto kBound = "takes the bound for the size";
  static const std::vector<DynamicFix> fixes{
      {"view", kAutograd, kView, make_dynamic_view},
      {"reshape", kAutograd, kView, make_dynamic_view},
      {"expand", kAutograd, kView, copy},
      {"permute", kAutograd, kView, copy},
      {"transpose.int", kAutograd, kView, copy},
      {"t", kAutograd, kView, copy},
      {"unsqueeze", kAutograd, kView, copy},
      {"squeeze", kAutograd, kView, copy},
      {"squeeze.dim", kAutograd, kView, copy},
      {"squeeze.dims", kAutograd, kView, copy},
      {"slice.Tensor", kAutograd, kView, copy},
      {"select.int", kAutograd, kView, copy},
      {"split.Tensor", kAutograd, kView, copy},
      {"split_with_sizes", kAutograd, kView, copy},
      {"unbind.int", kAutograd, kView, copy},
      {"slice_backward", kAutograd, kRefused, make_dynamic_slice_backward},
      {"zeros_like", kXLA, kBound, make_dynamic_zeros_like},
      {"zeros", kXLA, kBound, make_dynamic_zeros},
      {"full", kXLA, kRefused, make_dynamic_full},
      {"new_zeros", kXLA, kRefused, make_dynamic_new_zeros},
      {"new_full", kXLA, kRefused, make_dynamic_new_full},
      {"add.Tensor", kXLA, kBoth, make_dynamic_add},
      {"sub.Tensor", kXLA, kBoth, make_dynamic_sub},
      {"where.self", kXLA, kRefused, make_dynamic_where},
      {"sgn", kAutograd, kRefused, make_dynamic_sgn},
      {"mean", kAutograd, kBound, make_dynamic_mean},
      {"mean.dim", kAutograd, kBound, make_dynamic_mean_dim},
      {"var.correction", kAutograd, kBound, make_dynamic_var},
      {"std.correction", kAutograd, kBound, make_dynamic_std},
      {"var_mean.correction", kAutograd, kBound, make_dynamic_var_mean},
      {"log_softmax.int", kAutograd, kRefused, make_dynamic_log_softmax},
      {"linear", kAutograd, kRefused, make_dynamic_linear},
      {"batch_norm", kAutograd, kBound, make_dynamic_batch_norm},
      {"layer_norm", kAutograd, kRefused, make_dynamic_layer_norm},
      {"group_norm", kAutograd, kRefused, make_dynamic_group_norm},
      {"adaptive_avg_pool2d", kAutograd, kRefused, make_dynamic_adaptive_avg_pool2d},
      {"prelu", kAutograd, kRefused, make_dynamic_prelu},
      {"upsample_nearest2d.vec", kAutograd, kRefused, make_dynamic_upsample_nearest2d},
      {"mse_loss", kAutograd, kBound, make_dynamic_mse_loss},
      {"binary_cross_entropy_with_logits", kAutograd, kBoth, make_dynamic_bce_with_logits},
  };
  return fixes;
}

}  // namespace torch_convfix
