#pragma once

#include <c10/core/SymIntArrayRef.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace torch_convfix {

// The input shapes of the convolutions traced so far, each with how often. Every new one is a new graph
// to compile. A size not known at tracing is -1. The first thousand shapes are kept.
void count_traced(c10::SymIntArrayRef input);
std::vector<std::pair<std::vector<int64_t>, int64_t>> traced_shapes();

}  // namespace torch_convfix
