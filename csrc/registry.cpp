#include "registry.h"

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>

#include "convolution/checked.h"
#include "convolution/composed.h"
#include "convolution/double_backward.h"
#include "convolution/meta.h"
#include "derivatives/derivative_fixes.h"
#include "dynamic/dynamic_shapes.h"
#include "graph_hash/graph_hash.h"

namespace torch_convfix {
namespace {

// Drops the dispatcher's warning that a kernel is overridden, and lets every other one through.
class OverrideWarningFilter final : public c10::WarningHandler {
 public:
  OverrideWarningFilter() : outer_(c10::WarningUtils::get_warning_handler()), guard_(this) {
  }

  void process(const c10::Warning& warning) override {
    if (warning.msg().find("Overriding a previously registered kernel") == std::string::npos) {
      outer_->process(warning);
    }
  }

 private:
  c10::WarningHandler* outer_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

// The kernels of one device, registered for as long as this lives.
class Kernels {
 public:
  Kernels(std::string device, const Options& options) : device_(std::move(device)), options_(options) {
  }

  template <class Function>
  void add(c10::DispatchKey key, const char* op, const char* purpose, Function&& function) {
    const OverrideWarningFilter filter;
    libraries_.push_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
    libraries_.back()->impl(op, torch::CppFunction(std::forward<Function>(function)));
    registrations_.push_back({device_, op, c10::toString(key), purpose});
  }

  void mend_graph_hash() {
    if (graph_hash_.emplace()) {
      registrations_.push_back(
          {device_, "LazyGraphExecutor::RunPostOrder", "none",
           "graphs that differ in what they share get hashes of their own"});
    }
  }

  const Options& options() const {
    return options_;
  }
  const std::vector<Registration>& registrations() const {
    return registrations_;
  }

 private:
  std::string device_;
  Options options_;
  std::vector<std::unique_ptr<torch::Library>> libraries_;
  std::vector<Registration> registrations_;
  std::optional<GraphHashMend> graph_hash_;
};

std::mutex mutex;

constexpr auto kMeta = "meta";

std::map<std::string, std::unique_ptr<Kernels>>& enabled() {
  // Never destroyed: at exit the dispatcher may be gone first.
  static auto* const kernels = new std::map<std::string, std::unique_ptr<Kernels>>;
  return *kernels;
}

// The key of a device's kernels below autograd.
c10::DispatchKey backend_key(const std::string& device) {
  if (device == "xla") {
    return c10::DispatchKey::XLA;
  }
  if (device == "cpu") {
    return c10::DispatchKey::CPU;
  }
  return device == "cuda" ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
}

c10::DispatchKey autograd_key(const std::string& device) {
  if (device == "xla") {
    return c10::DispatchKey::AutogradXLA;
  }
  if (device == "cpu") {
    return c10::DispatchKey::AutogradCPU;
  }
  if (device == "cuda") {
    return c10::DispatchKey::AutogradCUDA;
  }
  const auto privateuse1 = c10::get_privateuse1_backend();
  TORCH_CHECK_VALUE(
      device == "tpu" || device == privateuse1,
      "device must be xla, cpu, cuda, tpu or the name of the PrivateUse1 backend (", privateuse1,
      "), got ", device);
  return c10::DispatchKey::AutogradPrivateUse1;
}

template <class Ours, class Return, class... Args>
auto bind(std::shared_ptr<const Ours> ours, Return (Ours::*kernel)(Args...) const) {
  return [ours = std::move(ours), kernel](Args... args) -> Return {
    return ((*ours).*kernel)(std::forward<Args>(args)...);
  };
}

bool has_kernel(const char* op, c10::DispatchKey key) {
  const auto name = torch::jit::parseName(std::string("aten::") + op);
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str())
      .hasKernelForDispatchKey(key);
}

void add_overrideable(Kernels& kernels) {
  constexpr auto kPurpose = "validation, output padding, lean lowerings";
  const auto& options = kernels.options();
  const auto ours = std::make_shared<const Overrideable>(
      c10::DispatchKey::XLA, options.output_padding, options.planner);
  kernels.add(
      c10::DispatchKey::XLA, "convolution_overrideable", kPurpose,
      bind(ours, &Overrideable::convolution));
  kernels.add(
      c10::DispatchKey::XLA, "convolution_backward_overrideable", kPurpose,
      bind(ours, &Overrideable::convolution_backward));
}

void add_composed(Kernels& kernels, const std::string& device) {
  constexpr auto kPurpose = "composed of matrix products";
  const auto key = backend_key(device);
  const auto ours = std::make_shared<const Composed>(kernels.options().block_bytes);
  if (device == "cpu" || device == "cuda") {  // core sends these elsewhere than to the overrideable ones
    kernels.add(key, "convolution", kPurpose, bind(ours, &Composed::convolution));
    kernels.add(key, "convolution_backward", kPurpose, bind(ours, &Composed::convolution_backward));
  } else {
    kernels.add(key, "convolution_overrideable", kPurpose, bind(ours, &Composed::convolution));
    kernels.add(
        key, "convolution_backward_overrideable", kPurpose,
        bind(ours, &Composed::convolution_backward_overrideable));
  }
}

void add_dynamic(Kernels& kernels, const std::vector<DynamicFix>& fixes) {
  for (const auto& fix : fixes) {
    kernels.add(fix.key, fix.op, fix.fault, fix.make(fix));
  }
}

std::unique_ptr<Kernels> make_kernels(const std::string& device, const Options& options) {
  const auto autograd = autograd_key(device);
  auto kernels = std::make_unique<Kernels>(device, options);
  kernels->add(
      autograd, "_convolution_double_backward", "no loop over groups",
      TORCH_FN(convolution_double_backward));
  if (device == "xla") {
    kernels->mend_graph_hash();
    if (options.convolutions == Convolutions::kNative) {
      add_overrideable(*kernels);
    }
    add_dynamic(*kernels, dynamic_convolutions());
    if (options.dynamic) {
      add_dynamic(*kernels, dynamic_operators());
    }
  }
  if (options.convolutions == Convolutions::kComposed) {
    add_composed(*kernels, device);
  }
  if (device == "tpu") {
    constexpr auto key = c10::DispatchKey::PrivateUse1;
    kernels->add(key, "convolution", "validation", make_checked_convolution(key));
  }
  if (options.derivatives) {
    const auto add = [&](const DerivativeFix& fix) {
      const bool at_autograd = fix.key == c10::DispatchKey::Undefined;
      kernels->add(at_autograd ? autograd : fix.key, fix.op, fix.fault, fix.make());
    };
    for (const auto& fix : derivative_fixes(device)) {
      add(fix);
    }
    for (const auto& fix : lacking_derivatives()) {
      if (fix.key != c10::DispatchKey::Undefined || !has_kernel(fix.op, autograd)) {
        add(fix);
      }
    }
  }
  return kernels;
}

std::unique_ptr<Kernels> make_meta_kernels() {
  auto kernels = std::make_unique<Kernels>(kMeta, Options{});
  kernels->add(
      c10::DispatchKey::Meta, "convolution_overrideable", "shape function",
      TORCH_FN(meta::convolution_overrideable));
  kernels->add(
      c10::DispatchKey::Meta, "convolution_backward_overrideable", "shape function",
      TORCH_FN(meta::convolution_backward_overrideable));
  return kernels;
}

}  // namespace

void enable(const std::string& device, const Options& options) {
  const std::lock_guard<std::mutex> lock(mutex);
  autograd_key(device);  // refuses an unknown device
  const auto old = enabled().find(device);
  if (old != enabled().end()) {
    if (old->second->options() == options) {
      return;
    }
    enabled().erase(old);  // first, so that the kernels fetched as stock are the stock ones
  }
  enabled()[device] = make_kernels(device, options);
  if (enabled().count(kMeta) == 0) {
    enabled()[kMeta] = make_meta_kernels();
  }
}

void disable(const std::string& device) {
  const std::lock_guard<std::mutex> lock(mutex);
  autograd_key(device);  // refuses an unknown device
  enabled().erase(device);
  if (enabled().size() == 1) {
    enabled().erase(kMeta);
  }
}

std::optional<Options> enabled_options(const std::string& device) {
  const std::lock_guard<std::mutex> lock(mutex);
  autograd_key(device);
  const auto kernels = enabled().find(device);
  return kernels == enabled().end() ? std::nullopt : std::make_optional(kernels->second->options());
}

std::vector<Registration> registrations() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<Registration> all;
  for (const auto& [device, kernels] : enabled()) {
    const auto& own = kernels->registrations();
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

}  // namespace torch_convfix
