#pragma once

#include <functional>

#include "convolution/stock_kernels.h"

// Each strategy computes F, I or W of a plain convolution exactly (in exact arithmetic), from
// operators below autograd. Views are copies here: below functionalization, a view of an XLA tensor
// costs milliseconds to trace, and a copy microseconds.
namespace torch_convfix::lowering {

namespace feature_grouped {
at::Tensor weight_grad(
    const StockKernels& stock, const Form& form, const at::Tensor& x, const at::Tensor& g);
}  // namespace feature_grouped

// For a batch not known yet: torch_xla's W of several groups then sums what lies beyond it too.
namespace ungrouped {
at::Tensor weight_grad(
    const StockKernels& stock,
    const Geometry& geometry,
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight);
}  // namespace ungrouped

// I of a stride beyond 1, from input gradients of stride 1.
namespace phased {
using InputGrad = std::function<at::Tensor(const Form&, const at::Tensor& g, const at::Tensor& w)>;
at::Tensor input_grad(
    const Form& form, const at::Tensor& g, const at::Tensor& w, const InputGrad& input_grad);
}  // namespace phased

// Depthwise alone, and the input gradient for stride 1 alone.
namespace taps {
at::Tensor forward(const Form& form, const at::Tensor& x, const at::Tensor& w);
at::Tensor input_grad(const Form& form, const at::Tensor& g, const at::Tensor& w);
at::Tensor weight_grad(const Form& form, const at::Tensor& x, const at::Tensor& g);
}  // namespace taps

namespace merged {
at::Tensor forward(
    const StockKernels& stock,
    const Form& form,
    int64_t merge,
    const at::Tensor& x,
    const at::Tensor& w);
at::Tensor input_grad(
    const StockKernels& stock,
    const Form& form,
    int64_t merge,
    const at::Tensor& g,
    const at::Tensor& w);
at::Tensor weight_grad(
    const StockKernels& stock,
    const Form& form,
    int64_t merge,
    const at::Tensor& x,
    const at::Tensor& g);
}  // namespace merged

}  // namespace torch_convfix::lowering
