#pragma once

#include <c10/core/DispatchKey.h>
#include <torch/library.h>

#include <vector>

namespace torch_convfix {

// One operator whose derivative a backend gets wrong or PyTorch lacks, and the composition of
// differentiable operators that takes its place at the backend's autograd key: right at every order.
struct DerivativeFix {
  const char* op;
  const char* fault;
  torch::CppFunction (*make)();
  c10::DispatchKey key = c10::DispatchKey::Undefined;  // the device's autograd key, or another
};

// The operators that PyTorch itself cannot differentiate, or gets wrong, on any device. A backend that
// has its own kernel at its autograd key keeps it.
const std::vector<DerivativeFix>& lacking_derivatives();

// The fixes for a device, by its name in PyTorch ("xla", "tpu"); none for one that needs none.
const std::vector<DerivativeFix>& derivative_fixes(const std::string& device);

}  // namespace torch_convfix
