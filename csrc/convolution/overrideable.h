#pragma once

#include "convolution/planner.h"
#include "convolution/stock_kernels.h"

namespace torch_convfix {

// Who enlarges a transposed convolution's input for its output padding.
enum class OutputPadding {
  kNative,  // the backend's transposed kernels take output_padding
  kPad,     // the backend never sees output_padding: zeros are appended and cut off here
};

// The two operators that ATen leaves to backends, on top of a backend's stock kernels.
class Overrideable {
 public:
  Overrideable(c10::DispatchKey key, OutputPadding output_padding, const PlannerOptions& planner)
      : stock_(key), output_padding_(output_padding), planner_(planner) {
  }

  at::Tensor convolution(
      const at::Tensor& input,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias,
      c10::SymIntArrayRef stride,
      c10::SymIntArrayRef padding,
      c10::SymIntArrayRef dilation,
      bool transposed,
      c10::SymIntArrayRef output_padding,
      c10::SymInt groups) const;

  Gradients convolution_backward(
      const at::Tensor& grad_output,
      const at::Tensor& input,
      const at::Tensor& weight,
      c10::SymIntArrayRef stride,
      c10::SymIntArrayRef padding,
      c10::SymIntArrayRef dilation,
      bool transposed,
      c10::SymIntArrayRef output_padding,
      c10::SymInt groups,
      std::array<bool, 3> output_mask) const;

 private:
  bool stock_pads(const Geometry& geometry) const;

  StockKernels stock_;
  OutputPadding output_padding_;
  PlannerOptions planner_;
};

}  // namespace torch_convfix
