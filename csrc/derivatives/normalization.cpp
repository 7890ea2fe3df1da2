#include <ATen/TensorOperators.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/native_batch_norm_backward_ops.h>
#include <ATen/ops/native_batch_norm_ops.h>
#include <ATen/ops/native_group_norm_backward_ops.h>
#include <ATen/ops/native_group_norm_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "derivatives/differentiable.h"
#include "derivatives/fixes.h"
#include "derivatives/normalization.h"

namespace torch_convfix {
namespace {

// Core takes the saved mean and rstd for constants, in forward mode and in the double backward, so that
// what is differentiated after these (reverse over forward, order 3) lacks their derivatives. Here they
// are functions of the input: where an argument has a tangent, by composition, and else in the double
// backward.

using torch::autograd::SavedVariable, torch::autograd::variable_list;

// The derivative of the gradients by grad_output, input and weight. With y the normalized input,
// h = grad_output * weight, J the Jacobian, and u, v, w the cotangents of J h = input's gradient, of
// sum(grad_output * y) and of sum(grad_output): by grad_output weight * J u + y * v + w, by weight
// sum(grad_output * J u), and by the input, from J t = rstd * (t - mean(t) - y * mean(y * t)),
// J (grad_output * v) - rstd * (y * mean(u * J h) + mean(y * h) * J u + mean(y * u) * J h).
// An autograd node like those of core's own kernels: functorch refuses torch::autograd::Function.
class DoubleBackward final : public torch::autograd::Node {
 public:
  // Later versions of torch count a node's references in itself.
  template <class Self = DoubleBackward>
  static auto make_node() {
    using Handle = decltype(torch::autograd::Edge::function);
    if constexpr (std::is_same_v<Handle, std::shared_ptr<torch::autograd::Node>>) {
      return std::make_shared<Self>();
    } else {
      return c10::make_intrusive<Self>();
    }
  }

  static void set(
      Results& gradients,
      const at::Tensor& grad_output,
      const at::Tensor& input,
      const Optional& weight,
      Layout layout,
      const at::Tensor& mean,
      const at::Tensor& rstd) {
    const auto node = make_node();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_output, input, weight));
    const auto saved = [](const at::Tensor& t) { return SavedVariable(t, /*is_output=*/false); };
    node->layout_ = std::move(layout);
    node->grad_output_ = saved(grad_output);
    node->input_ = saved(input);
    node->weight_ = saved(defined(weight) ? *weight : at::Tensor());
    node->mean_ = saved(mean);
    node->rstd_ = saved(rstd);
    for (auto* gradient : {&std::get<0>(gradients), &std::get<1>(gradients), &std::get<2>(gradients)}) {
      if (gradient->defined()) {
        torch::autograd::set_history(*gradient, node);
      } else {
        node->add_input_metadata(torch::autograd::Node::undefined_input());
      }
    }
  }

  variable_list apply(variable_list&& cotangents) override {
    const auto grad_output = grad_output_.unpack(), input = input_.unpack(), weight = weight_.unpack();
    const auto mean = mean_.unpack(), rstd = rstd_.unpack();
    auto by = Normalization::by(layout_, mean, rstd);
    if (at::GradMode::is_enabled()) {
      by = by.of_saved(input);
    }
    const auto shape = input.sym_sizes();
    const auto g = in_opmath(grad_output);
    const auto normalized = by.normalized(input);
    const auto y = by.in_shape(normalized);
    const auto against_input = [&](const at::Tensor& t) { return t.reshape_symint(shape); };
    at::Tensor by_grad_output, by_input, by_weight;
    const auto add = [](at::Tensor& sum, const at::Tensor& t) { sum = sum.defined() ? sum + t : t; };
    if (const auto& given = cotangents[0]; given.defined()) {
      const auto u = by.in_shape(given), h = by.in_shape(by.weighted(g, weight));
      const auto ju = by.jacobian(u, y);
      add(by_grad_output, by.weighted(against_input(ju), weight));
      if (weight.defined() && task_should_compute_output(2)) {
        by_weight = by.parameter_grad(g * against_input(ju)).to(weight.scalar_type());
      }
      if (task_should_compute_output(1)) {
        const auto jh = by.jacobian(h, y);
        const auto varied = y * by.mean_of(u * jh) + by.mean_of(y * h) * ju + by.mean_of(y * u) * jh;
        add(by_input, -by.rstd * varied);
      }
    }
    if (const auto& v = cotangents[1]; v.defined()) {
      add(by_grad_output, normalized * by.affine(v));
      if (task_should_compute_output(1)) {
        add(by_input, by.jacobian(by.in_shape(g * by.affine(v)), y));
      }
    }
    if (const auto& w = cotangents[2]; w.defined()) {
      add(by_grad_output, by.affine(w).expand_symint(shape));
    }
    const auto like = [&](const at::Tensor& t, const at::Tensor& of) {
      return t.defined() ? against_input(t).to(of.scalar_type()) : t;
    };
    return {like(by_grad_output, grad_output), like(by_input, input), by_weight};
  }

  void release_variables() override {
    for (auto* saved : {&grad_output_, &input_, &weight_, &mean_, &rstd_}) {
      saved->reset_data();
    }
  }

  std::string name() const override {
    return "NormalizationDoubleBackward";
  }

 private:
  Layout layout_;
  SavedVariable grad_output_, input_, weight_, mean_, rstd_;
};

Results three(const torch::jit::Stack& results) {
  return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
}

at::Tensor rstd_of(const at::Tensor& variance, double eps) {
  return (in_opmath(variance) + eps).rsqrt();
}

Results layer_norm(
    const at::Tensor& input,
    c10::SymIntArrayRef normalized_shape,
    const Optional& weight,
    const Optional& bias,
    double eps) {
  const auto by = Normalization::of(input, over_layer(input, normalized_shape), eps);
  return {by.output(input, weight, bias), by.mean, by.rstd};
}

// functorch's rules for vmap compose the weight's gradient of the saved mean and rstd, so that what is
// differentiated from outside of vmap lacks their derivatives: there these are functions of the input.
template <bool of_input>
Normalization by_saved(
    const at::Tensor& input, Layout layout, const at::Tensor& mean, const at::Tensor& rstd) {
  const auto by = Normalization::by(std::move(layout), mean, rstd);
  return of_input ? by.of_saved(input) : by;
}

template <bool of_input = false>
Results layer_norm_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    c10::SymIntArrayRef normalized_shape,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const Optional& weight,
    const Optional& /*bias*/,
    std::array<bool, 3> output_mask) {
  return by_saved<of_input>(input, over_layer(input, normalized_shape), mean, rstd)
      .gradients(grad_output, input, weight, output_mask);
}

Results group_norm(
    const at::Tensor& input,
    const Optional& weight,
    const Optional& bias,
    c10::SymInt /*N*/,
    c10::SymInt /*C*/,
    c10::SymInt /*HxW*/,
    int64_t group,
    double eps) {
  const auto by = Normalization::of(input, over_groups(input, group), eps);
  return {by.output(input, weight, bias), by.mean.squeeze(-1), by.rstd.squeeze(-1)};
}

Results group_norm_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const Optional& weight,
    c10::SymInt /*N*/,
    c10::SymInt /*C*/,
    c10::SymInt /*HxW*/,
    int64_t group,
    std::array<bool, 3> output_mask) {
  return Normalization::by(over_groups(input, group), mean, rstd)
      .gradients(grad_output, input, weight, output_mask);
}

Results batch_norm(
    const at::Tensor& input,
    const Optional& weight,
    const Optional& bias,
    const Optional& running_mean,
    const Optional& running_var,
    bool training,
    double momentum,
    double eps) {
  const auto layout = over_batch(input);
  if (!training) {
    const auto by = Normalization::by(layout, *running_mean, rstd_of(*running_var, eps));
    const auto none = by.mean.new_empty({0});
    return {by.output(input, weight, bias), none, none};
  }
  if (defined(running_mean)) {  // they are updated by core's kernel, which the tangents do not reach
    at::_ops::native_batch_norm::call(
        primal(input), primal(weight), primal(bias), running_mean, running_var, training, momentum, eps);
  }
  const auto by = Normalization::of(input, layout, eps);
  return {by.output(input, weight, bias), by.mean.flatten(), by.rstd.flatten()};
}

template <bool of_input = false>
Results batch_norm_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const Optional& weight,
    const Optional& running_mean,
    const Optional& running_var,
    const Optional& save_mean,
    const Optional& save_invstd,
    bool train,
    double eps,
    std::array<bool, 3> output_mask) {
  const auto by = train
                      ? by_saved<of_input>(input, over_batch(input), *save_mean, *save_invstd)
                      : Normalization::by(over_batch(input), *running_mean, rstd_of(*running_var, eps));
  return by.gradients(grad_output, input, weight, output_mask, /*given=*/!train);
}

// A gradient whose arguments are grad_output, input, ..., and at `mean_at` the saved mean and rstd: the
// device's kernel with our derivative. `layout` takes the arguments as a tuple, and gives none where
// there are no saved statistics.
template <
    class Op,
    auto composition,
    auto layout,
    size_t weight_at,
    size_t mean_at,
    class Schema = typename Op::schema>
struct Gradient;

template <class Op, auto composition, auto layout, size_t weight_at, size_t mean_at, class... Args>
struct Gradient<Op, composition, layout, weight_at, mean_at, Results(Args...)> {
  static Results call(c10::DispatchKeySet keys, Args... args) {
    if ((has_tangent(args) || ...)) {
      return composition(args...);
    }
    const std::tuple<const Args&...> given(args...);
    const bool graph = at::GradMode::is_enabled() && (requires_grad(args) || ...);
    std::optional<Layout> saved = graph ? layout(given) : std::nullopt;
    if (!saved) {
      return Op::redispatch(core_autograd(keys), args...);
    }
    auto gradients = [&] {
      const at::AutoDispatchBelowADInplaceOrView guard;
      return Op::redispatch(keys & c10::after_autograd_keyset, args...);
    }();
    const Optional mean = std::get<mean_at>(given), rstd = std::get<mean_at + 1>(given);
    DoubleBackward::set(
        gradients, std::get<0>(given), std::get<1>(given), std::get<weight_at>(given), std::move(*saved),
        *mean, *rstd);
    return gradients;
  }
};

template <class Op, auto composition, auto layout, size_t weight_at, size_t mean_at>
torch::CppFunction make_gradient() {
  return torch::CppFunction(TORCH_FN((Gradient<Op, composition, layout, weight_at, mean_at>::call)));
}

}  // namespace

torch::CppFunction make_layer_norm() {
  return make_forward_differentiable<at::_ops::native_layer_norm, &layer_norm>();
}

torch::CppFunction make_layer_norm_backward() {
  constexpr auto layout = [](const auto& given) -> std::optional<Layout> {
    return over_layer(std::get<1>(given), std::get<2>(given));
  };
  return make_gradient<at::_ops::native_layer_norm_backward, &layer_norm_backward<>, layout, 5, 3>();
}

torch::CppFunction make_group_norm() {
  return make_forward_differentiable<at::_ops::native_group_norm, &group_norm>();
}

torch::CppFunction make_group_norm_backward() {
  constexpr auto layout = [](const auto& given) -> std::optional<Layout> {
    return over_groups(std::get<1>(given), std::get<8>(given));
  };
  return make_gradient<at::_ops::native_group_norm_backward, &group_norm_backward, layout, 4, 2>();
}

torch::CppFunction make_batch_norm() {
  return make_forward_differentiable<at::_ops::native_batch_norm, &batch_norm>();
}

torch::CppFunction make_batch_norm_backward() {
  constexpr auto layout = [](const auto& given) {
    const bool train = std::get<7>(given) && defined(std::get<5>(given));
    return train ? std::make_optional(over_batch(std::get<1>(given))) : std::nullopt;
  };
  return make_gradient<at::_ops::native_batch_norm_backward, &batch_norm_backward<>, layout, 2, 5>();
}

torch::CppFunction make_layer_norm_backward_under_vmap() {
  return make_fix<&layer_norm_backward</*of_input=*/true>>();
}

torch::CppFunction make_batch_norm_backward_under_vmap() {
  return make_fix<&batch_norm_backward</*of_input=*/true>>();
}

// torch_xla asks for the saved statistics, of which there are none.
torch::CppFunction make_batch_norm_backward_by_running_statistics() {
  const auto stock =
      std::make_shared<Stock>("aten::native_batch_norm_backward", "", c10::DispatchKey::XLA);
  return torch::CppFunction(
      [stock](
          c10::DispatchKeySet keys, const at::Tensor& grad_output, const at::Tensor& input,
          const Optional& weight, const Optional& running_mean, const Optional& running_var,
          const Optional& save_mean, const Optional& save_invstd, bool train, double eps,
          std::array<bool, 3> output_mask) -> Results {
        if (!train) {
          return batch_norm_backward<>(
              grad_output, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps,
              output_mask);
        }
        return three(stock->results(
            keys, {grad_output, input, weight, running_mean, running_var, save_mean, save_invstd, train,
                   eps, output_mask}));
      });
}

// torch_xla moves running_var towards the biased variance, where PyTorch documents the unbiased one.
torch::CppFunction make_batch_norm_with_unbiased_variance() {
  const auto stock = std::make_shared<Stock>("aten::native_batch_norm", "", c10::DispatchKey::XLA);
  return torch::CppFunction(
      [stock](
          c10::DispatchKeySet keys, const at::Tensor& input, const Optional& weight,
          const Optional& bias, const Optional& running_mean, const Optional& running_var, bool training,
          double momentum, double eps) -> Results {
        const auto numel = input.sym_numel().maybe_as_int();
        const bool moves = training && defined(running_var) && numel && *numel > running_var->numel();
        // With b the biased variance of n values: (1 - m) * old + m * b * n / (n - 1), of which stock's
        // is (1 - m) * old + m * b.
        const auto n = moves ? static_cast<double>(*numel / running_var->numel()) : 0;
        const auto old_part = moves ? at::mul(*running_var, (momentum - 1) / (n - 1)) : at::Tensor();
        const auto results = three(stock->results(
            keys, {input, weight, bias, running_mean, running_var, training, momentum, eps}));
        if (moves) {
          at::_copy_from(at::add(old_part, *running_var, n / (n - 1)), *running_var);
        }
        return results;
      });
}

// Traced, TorchTPU leaves the running statistics as they were.
torch::CppFunction make_batch_norm_that_updates() {
  const auto stock =
      std::make_shared<Stock>("aten::native_batch_norm", "", c10::DispatchKey::PrivateUse1);
  return torch::CppFunction(
      [stock](
          c10::DispatchKeySet keys, const at::Tensor& input, const Optional& weight,
          const Optional& bias, const Optional& running_mean, const Optional& running_var, bool training,
          double momentum, double eps) -> Results {
        if (!training || !defined(running_mean)) {
          return three(stock->results(
              keys, {input, weight, bias, running_mean, running_var, training, momentum, eps}));
        }
        const Optional none;
        const auto results =
            three(stock->results(keys, {input, weight, bias, none, none, training, momentum, eps}));
        const auto count = static_cast<double>(input.numel() / running_mean->numel());
        const auto variance = std::get<2>(results).square().reciprocal() - eps;
        // They are saved for backward, by a version that the update of a batch norm does not count.
        const auto mean = running_mean->variable_data(), var = running_var->variable_data();
        mean.mul_(1 - momentum).add_(std::get<1>(results), momentum);
        var.mul_(1 - momentum).add_(variance, momentum * count / (count - 1));
        return results;
      });
}

}  // namespace torch_convfix
