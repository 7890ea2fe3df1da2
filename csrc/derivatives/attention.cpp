#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_scaled_dot_product_fused_attention_overrideable_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_fused_attention_overrideable_ops.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>

#include <cmath>
#include <limits>

#include "derivatives/differentiable.h"
#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

using at::Tensor;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// A head of keys or values serves as many neighbouring heads of queries as there are more of them.
Tensor for_each_query_head(const Tensor& t, const Tensor& query) {
  const auto heads = t.sym_size(1), wanted = query.sym_size(1);
  if (heads == wanted) {
    return t;
  }
  return t.unsqueeze(2)
      .expand_symint({t.sym_size(0), heads, wanted / heads, t.sym_size(2), t.sym_size(3)})
      .flatten(1, 2);
}

Tensor for_each_own_head(const Tensor& gradient, const Tensor& t) {
  const auto heads = t.sym_size(1), given = gradient.sym_size(1);
  return heads == given ? gradient : gradient.unflatten_symint(1, {heads, given / heads}).sum(2);
}

// softmax(scale * query @ key^T + mask) @ value, the formula in the documentation of
// torch.nn.functional.scaled_dot_product_attention, and its gradient. What the fused kernels saved of
// the forward is computed again, so that it is differentiated too.
struct Attention {
  Tensor query, key, value;  // in the dtype to compute in; key and value with the query's heads
  Tensor scores, probability;
  double scale;

  Attention(
      const Tensor& q,
      const Tensor& k,
      const Tensor& v,
      const std::optional<Tensor>& mask,
      double dropout_p,
      bool is_causal,
      std::optional<double> given_scale) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        dropout_p == 0, "scaled_dot_product_attention: a fused kernel's dropout, here of ", dropout_p,
        ", has no second derivative and no forward mode; use torch.nn.attention.sdpa_kernel("
        "SDPBackend.MATH)");
    const auto dtype = at::toOpMathType(q.scalar_type());
    query = q.to(dtype);
    key = for_each_query_head(k.to(dtype), q);
    value = for_each_query_head(v.to(dtype), q);
    scale = given_scale ? *given_scale : 1 / std::sqrt(q.sym_size(-1).guard_int(__FILE__, __LINE__));
    scores = at::matmul(query * scale, key.transpose(-2, -1));
    if (is_causal) {
      const auto later =
          at::ones_symint({q.sym_size(-2), k.sym_size(-2)}, q.options().dtype(at::kBool)).triu(1);
      scores = scores.masked_fill(later, kMinusInfinity);
    }
    if (!mask || !mask->defined()) {
      probability = at::softmax(scores, -1);
      return;
    }
    scores = mask->scalar_type() == at::kBool ? scores.masked_fill(mask->logical_not(), kMinusInfinity)
                                              : scores + mask->to(dtype);
    // A query that may attend to nothing gets zeros.
    const auto nothing = (scores == kMinusInfinity).all(-1, /*keepdim=*/true);
    scores = scores.masked_fill(nothing, 0);
    probability = at::softmax(scores, -1).masked_fill(nothing, 0);
  }

  Tensor output() const {
    // In memory as the fused kernels leave it: the heads of a query side by side.
    return at::matmul(probability, value).transpose(1, 2).contiguous().transpose(1, 2);
  }

  Tensor logsumexp() const {
    return at::logsumexp(scores, -1);
  }

  Tensor grad_scores(const Tensor& grad_output) const {
    const auto grad_probability =
        at::matmul(grad_output.to(value.scalar_type()), value.transpose(-2, -1));
    const auto part = probability * grad_probability;
    return part - probability * part.sum(-1, /*keepdim=*/true);
  }
};

struct Gradients {
  Tensor query, key, value, mask;
};

Gradients gradients(
    const Tensor& grad_output,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale) {
  const Attention forward(query, key, value, mask, dropout_p, is_causal, scale);
  const auto grad_scores = forward.grad_scores(grad_output);
  const auto scaled = grad_scores * forward.scale;
  const auto by_key = at::matmul(scaled.transpose(-2, -1), forward.query);
  const auto by_value =
      at::matmul(forward.probability.transpose(-2, -1), grad_output.to(forward.value.scalar_type()));
  Gradients result{
      at::matmul(scaled, forward.key).to(query.scalar_type()),
      for_each_own_head(by_key, key).to(key.scalar_type()),
      for_each_own_head(by_value, value).to(value.scalar_type()),
      {}};
  if (mask && mask->defined() && mask->is_floating_point()) {
    result.mask = grad_scores.sum_to_size_symint(mask->sym_sizes()).to(mask->scalar_type());
  }
  return result;
}

// The fused operators, which differ in the order of their arguments.

std::tuple<Tensor, Tensor> flash_for_cpu(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    double dropout_p,
    bool is_causal,
    const std::optional<Tensor>& attn_mask,
    std::optional<double> scale) {
  const Attention forward(query, key, value, attn_mask, dropout_p, is_causal, scale);
  return {forward.output(), forward.logsumexp()};
}

std::tuple<Tensor, Tensor, Tensor> flash_for_cpu_backward(
    const Tensor& grad_out,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& /*out*/,
    const Tensor& /*logsumexp*/,
    double dropout_p,
    bool is_causal,
    const std::optional<Tensor>& attn_mask,
    std::optional<double> scale) {
  const auto grad = gradients(grad_out, query, key, value, attn_mask, dropout_p, is_causal, scale);
  return {grad.query, grad.key, grad.value};
}

// Output, logsumexp, and what a backward needs of dropout and nested tensors: nothing, here.
using Fused =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Fused fused(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& attn_bias,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale) {
  const Attention forward(query, key, value, attn_bias, dropout_p, is_causal, scale);
  return {forward.output(), forward.logsumexp(), {}, {}, query.sym_size(2), key.sym_size(2), {}, {}, {}};
}

Fused overrideable(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& attn_bias,
    double dropout_p,
    bool is_causal,
    bool /*return_debug_mask*/,
    std::optional<double> scale) {
  return fused(query, key, value, attn_bias, dropout_p, is_causal, scale);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> overrideable_backward(
    const Tensor& grad_out,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& attn_bias,
    std::array<bool, 4> /*grad_input_mask*/,
    const Tensor& /*out*/,
    const Tensor& /*logsumexp*/,
    const Tensor& /*cum_seq_q*/,
    const Tensor& /*cum_seq_k*/,
    c10::SymInt /*max_q*/,
    c10::SymInt /*max_k*/,
    double dropout_p,
    bool is_causal,
    const Tensor& /*philox_seed*/,
    const Tensor& /*philox_offset*/,
    std::optional<double> scale) {
  const auto grad = gradients(grad_out, query, key, value, attn_bias, dropout_p, is_causal, scale);
  return {grad.query, grad.key, grad.value, grad.mask};
}

Fused cudnn(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& attn_bias,
    bool /*compute_log_sumexp*/,
    double dropout_p,
    bool is_causal,
    bool /*return_debug_mask*/,
    std::optional<double> scale) {
  return fused(query, key, value, attn_bias, dropout_p, is_causal, scale);
}

std::tuple<Tensor, Tensor, Tensor> cudnn_backward(
    const Tensor& grad_out,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& /*out*/,
    const Tensor& /*logsumexp*/,
    const Tensor& /*philox_seed*/,
    const Tensor& /*philox_offset*/,
    const Tensor& attn_bias,
    const Tensor& /*cum_seq_q*/,
    const Tensor& /*cum_seq_k*/,
    c10::SymInt /*max_q*/,
    c10::SymInt /*max_k*/,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale) {
  const auto grad = gradients(grad_out, query, key, value, attn_bias, dropout_p, is_causal, scale);
  return {grad.query, grad.key, grad.value};
}

}  // namespace

torch::CppFunction make_flash_attention_for_cpu() {
  return make_forward_differentiable<
      at::_ops::_scaled_dot_product_flash_attention_for_cpu, &flash_for_cpu>();
}

torch::CppFunction make_flash_attention_for_cpu_backward() {
  return make_differentiable<
      at::_ops::_scaled_dot_product_flash_attention_for_cpu_backward, &flash_for_cpu_backward>();
}

torch::CppFunction make_overrideable_attention() {
  return make_forward_differentiable<
      at::_ops::_scaled_dot_product_fused_attention_overrideable, &overrideable>();
}

torch::CppFunction make_overrideable_attention_backward() {
  return make_differentiable<
      at::_ops::_scaled_dot_product_fused_attention_overrideable_backward, &overrideable_backward>();
}

torch::CppFunction make_cudnn_attention() {
  return make_forward_differentiable<at::_ops::_scaled_dot_product_cudnn_attention, &cudnn>();
}

torch::CppFunction make_cudnn_attention_backward() {
  return make_differentiable<at::_ops::_scaled_dot_product_cudnn_attention_backward, &cudnn_backward>();
}

}  // namespace torch_convfix
