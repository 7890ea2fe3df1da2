#pragma once

#include <c10/core/ScalarType.h>

#include "geometry.h"

namespace torch_convfix {

// What the graph will run on, which need not be what it is traced on.
enum class Hardware { kCPU, kTPU, kOther };

enum class Strategy {
  kDirect,          // the backend's own kernel
  kFeatureGrouped,  // W as one convolution with feature_group_count = groups
  kTaps,            // depthwise: a sum over kernel taps of shifted slice times weight
  kMerged,          // several groups as one, with zeros between them
};

// Whether groups may be merged where that is estimated cheaper. A NaN or Inf of one group then reaches
// the others of its merge.
enum class Grouped { kDirect, kMerge };

struct Choice {
  Strategy strategy = Strategy::kDirect;
  int64_t merge = 1;  // kMerged: how many groups become one

  Choice(Strategy strategy_ = Strategy::kDirect, int64_t merge_ = 1)
      : strategy(strategy_), merge(merge_) {
  }
};

// One choice for each of F, I and W.
struct Plan {
  Choice forward, input_grad, weight_grad;
};

struct PlannerOptions {
  Hardware hardware = Hardware::kOther;
  Grouped grouped = Grouped::kDirect;
  int64_t merge = 0;  // merge this many groups wherever it divides them; 0: as estimated

  bool operator==(const PlannerOptions&) const = default;
};

Plan make_plan(const Form& form, const PlannerOptions& options);

}  // namespace torch_convfix
