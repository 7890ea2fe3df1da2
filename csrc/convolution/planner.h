#pragma once

#include <c10/core/ScalarType.h>

#include "convolution/geometry.h"
#include "convolution/merge_model.h"

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

struct PlannerOptions {
  Hardware hardware = Hardware::kOther;
  Grouped grouped = Grouped::kDirect;
  int64_t merge = 0;  // merge this many groups wherever it divides them; 0: as estimated

  bool operator==(const PlannerOptions&) const = default;
};

// One strategy for each of F, I and W.
struct Plan {
  Strategy forward = Strategy::kDirect;
  Strategy input_grad = Strategy::kDirect;
  Strategy weight_grad = Strategy::kDirect;
  bool phased = false;  // I by the strategy, for each residue of the stride alone
  MergeFactors merge;   // kMerged: how many groups become one
};

Plan make_plan(const Form& form, c10::ScalarType dtype, const PlannerOptions& options);

}  // namespace torch_convfix
