// Lets the autograd of a PrivateUse1 backend run on a machine that has none of its devices, to trace
// its kernels on placeholders. The autograd engine starts one thread per device that the backend
// reports, and asks the backend's hooks whether a device is in use: here both answers are "one".
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct OneDeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return getDevice();
  }
  c10::Device getDevice() const override {
    return {kType, 0};
  }
  void setDevice(c10::Device) const override {
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {
  }
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
  }
  void block(void*, const c10::Stream&) const override {
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {
  }
};

struct OneDeviceHooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
};

}  // namespace

PYBIND11_MODULE(_one_device, m) {
  m.def("install", [] {
    static OneDeviceGuard guard;
    static OneDeviceHooks hooks;
    c10::impl::device_guard_impl_registry[static_cast<size_t>(kType)].store(&guard);
    if (!at::isPrivateUse1HooksRegistered()) {
      at::RegisterPrivateUse1HooksInterface(&hooks);
    }
  });
}
