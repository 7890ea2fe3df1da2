#include "convolution/geometry.h"

#include <c10/core/ScalarType.h>

namespace torch_convfix {
namespace {

SymSizes expand(const char* name, c10::SymIntArrayRef values, int64_t dim) {
  const auto size = static_cast<int64_t>(values.size());
  TORCH_CHECK(
      size == 1 || size == dim, "convolution: ", name, " must have 1 or ", dim, " entries for weight's ",
      dim, " spatial dimensions, got ", values);
  return size == dim ? SymSizes(values.begin(), values.end()) : SymSizes(dim, values[0]);
}

void check_at_least(const char* name, c10::SymIntArrayRef values, int64_t least) {
  for (const auto& value : values) {
    TORCH_CHECK(value >= least, "convolution: ", name, " must be at least ", least, ", got ", values);
  }
}

bool holds(const c10::SymBool& condition, Unknown unknown) {
  if (const auto known = condition.maybe_as_bool()) {
    return *known;
  }
  return unknown == Unknown::kDefer || condition.expect_true(__FILE__, __LINE__);
}

void check_same_kind(
    const char* name, const at::Tensor& tensor, const char* other_name, const at::Tensor& other) {
  TORCH_CHECK(
      tensor.device() == other.device(), "convolution: ", name, " and ", other_name,
      " must be on one device, got ", name, " on ", tensor.device(), " and ", other_name, " on ",
      other.device());
  TORCH_CHECK(
      tensor.scalar_type() == other.scalar_type(), "convolution: ", name, " and ", other_name,
      " must have one dtype, got ", name, " of ", c10::toString(tensor.scalar_type()), " and ",
      other_name, " of ", c10::toString(other.scalar_type()));
}

}  // namespace

Geometry::Geometry(
    const at::Tensor& weight,
    c10::SymIntArrayRef stride_,
    c10::SymIntArrayRef padding_,
    c10::SymIntArrayRef dilation_,
    bool transposed_,
    c10::SymIntArrayRef output_padding_,
    c10::SymInt groups_)
    : transposed(transposed_), groups(std::move(groups_)) {
  const int64_t dim = weight.dim() - 2;
  TORCH_CHECK(
      1 <= dim && dim <= 3,
      "convolution: weight must have 3 to 5 dimensions (channels, channels, 1 to 3 spatial), got ",
      weight.sym_sizes());
  stride = expand("stride", stride_, dim);
  padding = expand("padding", padding_, dim);
  dilation = expand("dilation", dilation_, dim);
  output_padding = expand("output_padding", output_padding_, dim);
  check_at_least("stride", stride, 1);
  check_at_least("padding", padding, 0);
  check_at_least("dilation", dilation, 1);
  check_at_least("output_padding", output_padding, 0);
  TORCH_CHECK(groups >= 1, "convolution: groups must be at least 1, got ", groups);
  if (!transposed) {
    return;
  }
  for (int64_t i = 0; i < dim; ++i) {
    TORCH_CHECK(
        output_padding[i] < stride[i] || output_padding[i] < dilation[i],
        "convolution: output_padding must be smaller than either stride or dilation, got "
        "output_padding ",
        c10::SymIntArrayRef(output_padding), ", stride ", c10::SymIntArrayRef(stride), ", dilation ",
        c10::SymIntArrayRef(dilation));
  }
}

SymSizes Geometry::output_sizes(c10::SymIntArrayRef input, c10::SymIntArrayRef weight) const {
  SymSizes sizes{input[0], transposed ? weight[1] * groups : weight[0]};
  for (int64_t i = 0; i < dim(); ++i) {
    const auto window = dilation[i] * (weight[i + 2] - 1) + 1;
    sizes.push_back(
        transposed ? (input[i + 2] - 1) * stride[i] - padding[i] * 2 + window + output_padding[i]
                   : (input[i + 2] + padding[i] * 2 - window) / stride[i] + 1);
  }
  return sizes;
}

SymSizes Geometry::trailing_zeros() const {
  SymSizes zeros;
  for (int64_t i = 0; i < dim(); ++i) {
    zeros.push_back(transposed ? output_padding[i] / stride[i] : c10::SymInt(0));
  }
  return zeros;
}

void check_forward(
    const Geometry& geometry,
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    Unknown unknown) {
  check_same_kind("input", input, "weight", weight);
  const auto x = input.sym_sizes();
  const auto w = weight.sym_sizes();
  TORCH_CHECK(
      input.dim() == weight.dim(), "convolution: input must have weight's number of dimensions, ",
      weight.dim(), ", got ", x);
  const auto& groups = geometry.groups;
  const auto zero = c10::SymInt(0);
  TORCH_CHECK(
      holds(w[0].sym_gt(zero), unknown) && holds(w[1].sym_gt(zero), unknown),
      "convolution: weight must have at least one channel in dimensions 0 and 1, got ", w);
  TORCH_CHECK(
      holds((w[0] % groups).sym_eq(zero), unknown),
      "convolution: weight's dimension 0 must be divisible by groups, got groups ", groups,
      " and weight ", w);
  const auto channels = geometry.transposed ? w[0] : w[1] * groups;
  TORCH_CHECK(
      holds(x[1].sym_eq(channels), unknown), "convolution: input must have ", channels,
      " channels for groups ", groups, " and weight ", w, ", got input ", x);
  const auto y = geometry.output_sizes(x, w);
  for (int64_t i = 0; i < geometry.dim(); ++i) {
    TORCH_CHECK(
        holds(w[i + 2].sym_gt(zero), unknown),
        "convolution: weight must not be empty in its spatial dimensions, got ", w);
    // The plain window must lie inside the padded input: division truncates, so y alone can't tell.
    const auto room = geometry.transposed
                          ? y[i + 2]
                          : x[i + 2] + geometry.padding[i] * 2 - geometry.dilation[i] * (w[i + 2] - 1);
    TORCH_CHECK(
        holds(room.sym_gt(zero), unknown),
        "convolution: kernel size must not exceed the padded input size, got input ", x, ", weight ", w,
        ", padding ", c10::SymIntArrayRef(geometry.padding), " and dilation ",
        c10::SymIntArrayRef(geometry.dilation));
  }
  if (bias && bias->defined()) {
    check_same_kind("bias", *bias, "input", input);
    TORCH_CHECK(
        bias->dim() == 1 && holds(bias->sym_size(0).sym_eq(y[1]), unknown),
        "convolution: bias must have shape [", y[1], "], the number of output channels, got ",
        bias->sym_sizes());
  }
}

void check_backward(
    const Geometry& geometry,
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    Unknown unknown) {
  check_forward(geometry, input, weight, std::nullopt, unknown);
  check_same_kind("grad_output", grad_output, "input", input);
  const auto expected = geometry.output_sizes(input.sym_sizes(), weight.sym_sizes());
  const auto got = grad_output.sym_sizes();
  bool fits = got.size() == expected.size();
  for (size_t i = 0; fits && i < expected.size(); ++i) {
    fits = holds(got[i].sym_eq(expected[i]), unknown);
  }
  TORCH_CHECK(
      fits, "convolution_backward: grad_output must have shape ", c10::SymIntArrayRef(expected),
      " for input ", input.sym_sizes(), " and weight ", weight.sym_sizes(), ", got ", got);
}

std::optional<Form> make_form(
    const Geometry& geometry, c10::SymIntArrayRef input, c10::SymIntArrayRef weight) {
  auto output = geometry.output_sizes(input, weight);
  SymSizes padded(input.begin(), input.end());
  const auto zeros = geometry.trailing_zeros();
  for (int64_t i = 0; i < geometry.dim(); ++i) {
    padded[i + 2] = padded[i + 2] + zeros[i];
  }
  const auto concrete = [](c10::SymIntArrayRef sizes, at::DimVector& out) {
    for (const auto& size : sizes) {
      if (const auto known = size.maybe_as_int()) {
        out.push_back(*known);
      } else {
        return false;
      }
    }
    return true;
  };
  Form form;
  at::DimVector groups;
  const bool known =
      concrete(geometry.transposed ? output : padded, form.x) && concrete(weight, form.w) &&
      concrete(geometry.transposed ? padded : output, form.g) &&
      concrete(geometry.stride, form.stride) && concrete(geometry.padding, form.padding) &&
      concrete(geometry.dilation, form.dilation) && concrete(geometry.groups, groups);
  if (!known) {
    return std::nullopt;
  }
  form.groups = groups[0];
  return form;
}

}  // namespace torch_convfix
