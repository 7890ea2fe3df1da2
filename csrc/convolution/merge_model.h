#pragma once

#include "convolution/geometry.h"

namespace torch_convfix {

// How many neighbouring groups of a convolution to compute as one on a TPU; 1 is none.
struct MergeFactors {
  int64_t forward = 1, input_grad = 1, weight_grad = 1;
};

// Where the TPU compiler's estimate is predicted to be lower: from estimates of other convolutions.
MergeFactors choose_merge(const Form& form);

}  // namespace torch_convfix
