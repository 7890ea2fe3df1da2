#pragma once

#include <c10/core/DispatchKey.h>
#include <torch/library.h>

#include <vector>

namespace torch_convfix {

// One operator that torch_xla refuses, or gets wrong, on tensors with a bounded-dynamic size. In its
// place: a composition of operators that can do it; where every size is concrete, the stock kernel.
struct DynamicFix {
  const char* op;
  c10::DispatchKey key;
  const char* fault;
  torch::CppFunction (*make)(const DynamicFix&);
};

// The convolutions, which take symbolic sizes always.
const std::vector<DynamicFix>& dynamic_convolutions();

// What else stands in a conv net's way, where torch_xla makes bounded-dynamic sizes.
const std::vector<DynamicFix>& dynamic_operators();

}  // namespace torch_convfix
