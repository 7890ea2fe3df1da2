#pragma once

#include <c10/util/DimVector.h>
#include <c10/util/accumulate.h>

namespace torch_convfix {

// Calls visit(index) for every index of a box of `sizes`, the last dimension fastest.
template <class Visit>
void for_each_index(c10::IntArrayRef sizes, Visit visit) {
  c10::DimVector index(sizes.size(), 0);
  const int64_t count = c10::multiply_integers(sizes);
  for (int64_t n = 0; n < count; ++n) {
    visit(c10::IntArrayRef(index));
    for (auto i = static_cast<int64_t>(sizes.size()) - 1; i >= 0 && ++index[i] == sizes[i]; --i) {
      index[i] = 0;
    }
  }
}

}  // namespace torch_convfix
