#pragma once

#include <torch/library.h>

namespace torch_convfix {

// The `convolution` that a backend has at `key`, behind PyTorch's own checks of its arguments.
torch::CppFunction make_checked_convolution(c10::DispatchKey key);

}  // namespace torch_convfix
