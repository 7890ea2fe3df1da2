#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/expand_copy.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/view_copy.h>
#include <ATen/ops/zeros.h>

#include <c10/core/WrapDimMinimal.h>

#include "dynamic/dynamic.h"

namespace torch_convfix {
namespace {

bool same_size(const c10::SymInt& a, const c10::SymInt& b) {
  return a.toSymNodeImplUnowned() == b.toSymNodeImplUnowned();
}

at::TensorOptions options_of(
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return at::TensorOptions().dtype(dtype).layout(layout).device(device).pinned_memory(pin_memory);
}

at::TensorOptions options_like(
    const at::Tensor& self,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return self.options().merge_in(options_of(dtype, layout, device, pin_memory));
}

// Core would divide the sizes to find that of a -1, and the quotient of two bounded-dynamic sizes is
// one again. Here they cancel where they are the same one.
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  c10::SymDimVector sizes(size.begin(), size.end()),
      own(self.sym_sizes().begin(), self.sym_sizes().end());
  const auto is_inferred = [](const c10::SymInt& s) { return !s.is_heap_allocated() && s == -1; };
  const auto inferred = std::find_if(sizes.begin(), sizes.end(), is_inferred);
  if (inferred != sizes.end()) {
    c10::SymInt known = 1;
    for (const auto& s : sizes) {
      const auto same = std::find_if(own.begin(), own.end(), [&](const c10::SymInt& o) {
        return s.is_heap_allocated() && o.is_heap_allocated() && same_size(s, o);
      });
      if (same != own.end()) {
        own.erase(same);
      } else if (!is_inferred(s)) {
        known = known * s;
      }
    }
    c10::SymInt all = 1;
    for (const auto& o : own) {
      all = all * o;
    }
    *inferred = all / known;
  }
  return at::view_copy_symint(self, sizes);
}

// The gradient of a slice of a concrete dimension.
at::Tensor slice_backward(
    const at::Tensor& grad_output,
    c10::SymIntArrayRef input_sizes,
    int64_t dim,
    c10::SymInt start,
    c10::SymInt,  // end
    c10::SymInt step) {
  const int64_t own = c10::maybe_wrap_dim(dim, grad_output.dim());
  const int64_t size = input_sizes[own].expect_int(), first = start.expect_int();
  const int64_t from = std::clamp<int64_t>(first < 0 ? first + size : first, 0, size);
  TORCH_CHECK(
      step == 1, "slice: with a bounded-dynamic size only a step of 1 has a gradient, got ", step);
  std::vector<int64_t> pads(2 * (grad_output.dim() - own));
  pads[pads.size() - 2] = from;
  pads.back() = size - from - grad_output.sym_size(own).expect_int();
  return at::constant_pad_nd(grad_output, pads);
}

at::Tensor full(
    c10::SymIntArrayRef size,
    const at::Scalar& value,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return at::expand_copy_symint(
      at::full({}, value, options_of(dtype, layout, device, pin_memory)), size);
}

at::Tensor zeros(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return at::expand_copy_symint(at::zeros({}, options_of(dtype, layout, device, pin_memory)), size);
}

at::Tensor zeros_like(
    const at::Tensor& self,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  return at::full_like(self, 0, options_of(dtype, layout, device, pin_memory), memory_format);
}

at::Tensor new_full(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    const at::Scalar& value,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return at::full_symint(size, value, options_like(self, dtype, layout, device, pin_memory));
}

at::Tensor new_zeros(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return at::zeros_symint(size, options_like(self, dtype, layout, device, pin_memory));
}

}  // namespace

std::vector<DynamicFix> dynamic_sizes() {
  return {
      {"view", kAutograd, kView, compose<&view>},
      {"reshape", kAutograd, kView, compose<&view>},
      {"expand", kAutograd, kView, copy},
      {"permute", kAutograd, kView, copy},
      {"transpose.int", kAutograd, kView, copy},
      {"t", kAutograd, kView, copy},
      {"unsqueeze", kAutograd, kView, copy},
      {"squeeze", kAutograd, kView, copy},
      {"squeeze.dim", kAutograd, kView, copy},
      {"squeeze.dims", kAutograd, kView, copy},
      {"slice.Tensor", kAutograd, kView, copy},
      {"select.int", kAutograd, kView, copy},
      {"split.Tensor", kAutograd, kView, copy},
      {"split_with_sizes", kAutograd, kView, copy},
      {"unbind.int", kAutograd, kView, copy},
      {"slice_backward", kAutograd, kRefused, compose<&slice_backward>},
      {"zeros_like", kXLA, kBound, compose<&zeros_like>},
      {"zeros", kXLA, kBound, compose<&zeros>},
      {"full", kXLA, kRefused, compose<&full>},
      {"new_zeros", kXLA, kRefused, compose<&new_zeros>},
      {"new_full", kXLA, kRefused, compose<&new_full>},
  };
}

}  // namespace torch_convfix
