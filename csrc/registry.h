#pragma once

#include <string>
#include <vector>

#include "convolution/overrideable.h"

namespace torch_convfix {

// Whose convolutions a device has.
enum class Convolutions {
  kNative,    // its own; on xla with ours before them
  kComposed,  // ours, of operators that any backend has
};

struct Options {
  OutputPadding output_padding = OutputPadding::kNative;
  PlannerOptions planner;
  bool derivatives = true;
  bool dynamic = false;  // xla: bounded-dynamic sizes are used
  Convolutions convolutions = Convolutions::kNative;
  int64_t block_bytes = int64_t{1} << 26;  // of a composed convolution's columns at a time

  bool operator==(const Options&) const = default;
};

// One kernel of ours, as the dispatcher has it.
struct Registration {
  std::string device, op, dispatch_key, purpose;
};

// Each is idempotent and thread-safe. `device` is a device type's name: xla, cpu, cuda, tpu, or that of
// the PrivateUse1 backend. Enabling an enabled device puts the new options in place of the old. The
// shape functions of the overrideable operators serve every device, for as long as any is enabled.
void enable(const std::string& device, const Options& options);
void disable(const std::string& device);
std::optional<Options> enabled_options(const std::string& device);
std::vector<Registration> registrations();

}  // namespace torch_convfix
