#include "convolution/checked.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "convolution/geometry.h"

namespace torch_convfix {

torch::CppFunction make_checked_convolution(c10::DispatchKey key) {
  const auto stock =
      std::make_shared<c10::SafeKernelFunction>(c10::Dispatcher::singleton()
                                                    .findSchemaOrThrow("aten::convolution", "")
                                                    .getComputedKernelForDispatchKey(key));
  return torch::CppFunction([stock](
                                c10::DispatchKeySet keys, const at::Tensor& input,
                                const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                c10::SymIntArrayRef dilation, bool transposed,
                                c10::SymIntArrayRef output_padding, c10::SymInt groups) {
    const Geometry geometry(weight, stride, padding, dilation, transposed, output_padding, groups);
    check_forward(geometry, input, weight, bias);
    torch::jit::Stack stack{input,    weight,     bias,           stride, padding,
                            dilation, transposed, output_padding, groups};
    stock->callBoxed(stock->opHandle(), keys, &stack);
    return stack[0].toTensor();
  });
}

}  // namespace torch_convfix
