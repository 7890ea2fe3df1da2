#include "convolution/stock_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

namespace torch_convfix {
namespace {

c10::SafeKernelFunction fetch(const char* op, c10::DispatchKey key) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").getComputedKernelForDispatchKey(key);
}

torch::jit::Stack stack_of(std::initializer_list<c10::IValue> tensors, const Geometry& geometry) {
  torch::jit::Stack stack(tensors);
  const auto push = [&](const SymSizes& values) { stack.emplace_back(c10::SymIntArrayRef(values)); };
  push(geometry.stride);
  push(geometry.padding);
  push(geometry.dilation);
  stack.emplace_back(geometry.transposed);
  push(geometry.output_padding);
  stack.emplace_back(geometry.groups);
  return stack;
}

SymSizes symbolic(const at::DimVector& sizes) {
  return SymSizes(sizes.begin(), sizes.end());
}

Geometry plain(const Form& form, const at::Tensor& weight) {
  const SymSizes none(form.dim(), c10::SymInt(0));
  return Geometry(
      weight, symbolic(form.stride), symbolic(form.padding), symbolic(form.dilation),
      /*transposed=*/false, none, form.groups);
}

}  // namespace

StockKernels::StockKernels(c10::DispatchKey key)
    : keys_(key),
      convolution_(fetch("aten::convolution_overrideable", key)),
      convolution_backward_(fetch("aten::convolution_backward_overrideable", key)) {
}

at::Tensor StockKernels::convolution(
    const Geometry& geometry,
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias) const {
  auto stack = stack_of({input, weight, bias}, geometry);
  convolution_.callBoxed(convolution_.opHandle(), keys_, &stack);
  return std::move(stack[0]).toTensor();
}

Gradients StockKernels::convolution_backward(
    const Geometry& geometry,
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    std::array<bool, 3> output_mask) const {
  auto stack = stack_of({grad_output, input, weight}, geometry);
  stack.emplace_back(output_mask);
  convolution_backward_.callBoxed(convolution_backward_.opHandle(), keys_, &stack);
  return {
      std::move(stack[0]).toTensor(), std::move(stack[1]).toTensor(), std::move(stack[2]).toTensor()};
}

at::Tensor StockKernels::forward(const Form& form, const at::Tensor& x, const at::Tensor& w) const {
  return convolution(plain(form, w), x, w, std::nullopt);
}

at::Tensor StockKernels::input_grad(const Form& form, const at::Tensor& g, const at::Tensor& w) const {
  const auto x = at::empty(form.x, g.options());  // only its sizes are used
  return std::get<0>(convolution_backward(plain(form, w), g, x, w, {true, false, false}));
}

at::Tensor StockKernels::weight_grad(const Form& form, const at::Tensor& x, const at::Tensor& g) const {
  const auto w = at::empty(form.w, g.options());  // only its sizes are used
  return std::get<1>(convolution_backward(plain(form, w), g, x, w, {false, true, false}));
}

}  // namespace torch_convfix
