#include "planner.h"

#include <c10/util/accumulate.h>

namespace torch_convfix {
namespace {

// Below this many outputs a convolution is so cheap that tracing one slice and product per tap costs
// more than it saves (a step is traced every time, compiled once).
constexpr int64_t kFewestOutputsForTaps = int64_t{1} << 15;
constexpr int64_t kMostTaps = 81;
// One reduction per tap: past 5 x 5 the convolution wins.
constexpr int64_t kMostTapsForWeightGrad = 25;
constexpr int64_t kMostPhases = 16;

Plan make_cpu_plan(const Form& form, c10::ScalarType dtype) {
  Plan plan;
  if (form.groups == 1) {
    return plan;
  }
  // XLA:CPU runs batch_group_count, which the stock W is lowered to, as a naive loop.
  plan.weight_grad = Strategy::kFeatureGrouped;
  // Its grouped kernel multiplies the zeros between the rows of an upsampled g: slow, and a NaN spreads.
  const int64_t phases = c10::multiply_integers(form.stride);
  plan.phased = 1 < phases && phases <= kMostPhases;
  const int64_t taps = c10::multiply_integers(form.w.begin() + 2, form.w.end());
  if (!form.depthwise() || taps > kMostTaps) {
    return plan;
  }
  // Its depthwise kernel of float64 mixes the channels: a NaN in one reaches all.
  const bool large = c10::multiply_integers(form.g) >= kFewestOutputsForTaps;
  if (large || dtype == c10::ScalarType::Double) {
    plan.forward = Strategy::kTaps;
    plan.input_grad = phases <= kMostPhases ? Strategy::kTaps : Strategy::kDirect;
  }
  if (large && taps <= kMostTapsForWeightGrad) {
    plan.weight_grad = Strategy::kTaps;
  }
  return plan;
}

}  // namespace

Plan make_plan(const Form& form, c10::ScalarType dtype, Hardware hardware) {
  return hardware == Hardware::kCPU ? make_cpu_plan(form, dtype) : Plan{};
}

}  // namespace torch_convfix
