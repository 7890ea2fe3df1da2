#include "dynamic/dynamic_shapes.h"

#include "dynamic/dynamic.h"

namespace torch_convfix {

const std::vector<DynamicFix>& dynamic_operators() {
  static const auto fixes = [] {
    std::vector<DynamicFix> all;
    for (const auto of : {dynamic_sizes, dynamic_elementwise, dynamic_reductions, dynamic_layers}) {
      const auto some = of();
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }();
  return fixes;
}

}  // namespace torch_convfix
