#include "planner.h"

#include <c10/util/accumulate.h>

namespace torch_convfix {
namespace {

// Below this many outputs a convolution is so cheap that tracing one slice and product per tap costs
// more than it saves (a step is traced every time, compiled once).
constexpr int64_t kFewestOutputsForTaps = int64_t{1} << 15;
// One reduction per tap: past 5 x 5 the convolution wins.
constexpr int64_t kMostTapsForWeightGrad = 25;
constexpr int64_t kMostTaps = 81;

Plan make_cpu_plan(const Form& form) {
  Plan plan;
  if (form.groups == 1) {
    return plan;
  }
  // XLA:CPU runs batch_group_count, which the stock W is lowered to, as a naive loop.
  plan.weight_grad = Strategy::kFeatureGrouped;
  const int64_t taps = c10::multiply_integers(form.w.begin() + 2, form.w.end());
  if (form.depthwise() && taps <= kMostTaps && c10::multiply_integers(form.g) >= kFewestOutputsForTaps) {
    plan.forward = Strategy::kTaps;
    plan.input_grad = Strategy::kTaps;
    if (taps <= kMostTapsForWeightGrad) {
      plan.weight_grad = Strategy::kTaps;
    }
  }
  return plan;
}

Plan make_merged_plan(const Form& form, int64_t forced) {
  Plan plan;
  if (forced > 1 && form.groups % forced == 0) {
    const Choice merged(Strategy::kMerged, forced);
    plan = {merged, merged, merged};
  }
  return plan;
}

}  // namespace

Plan make_plan(const Form& form, const PlannerOptions& options) {
  if (options.grouped == Grouped::kMerge && options.hardware == Hardware::kTPU) {
    return make_merged_plan(form, options.merge);
  }
  return options.hardware == Hardware::kCPU ? make_cpu_plan(form) : Plan{};
}

}  // namespace torch_convfix
