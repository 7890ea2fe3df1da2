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
};

// One strategy for each of F, I and W.
struct Plan {
  Strategy forward = Strategy::kDirect;
  Strategy input_grad = Strategy::kDirect;
  Strategy weight_grad = Strategy::kDirect;
  bool phased = false;  // I by the strategy, for each residue of the stride alone
};

Plan make_plan(const Form& form, c10::ScalarType dtype, Hardware hardware);

}  // namespace torch_convfix
