#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/DimVector.h>
#include <c10/util/SmallVector.h>

#include <optional>

namespace torch_convfix {

using SymSizes = c10::SmallVector<c10::SymInt, 5>;

// The spatial parameters of one convolution, one entry per spatial dimension.
struct Geometry {
  SymSizes stride, padding, dilation, output_padding;
  bool transposed;
  c10::SymInt groups;

  // A parameter of length 1 holds for every spatial dimension of `weight`. Throws where a parameter
  // has another length, or a value that no convolution has.
  Geometry(
      const at::Tensor& weight,
      c10::SymIntArrayRef stride,
      c10::SymIntArrayRef padding,
      c10::SymIntArrayRef dilation,
      bool transposed,
      c10::SymIntArrayRef output_padding,
      c10::SymInt groups);

  int64_t dim() const {
    return static_cast<int64_t>(stride.size());
  }

  // Sizes of the convolution's result.
  SymSizes output_sizes(c10::SymIntArrayRef input, c10::SymIntArrayRef weight) const;

  // Zeros to append to each spatial dimension of a transposed convolution's input, so that it is the
  // grad_output of the plain convolution over the result: floor(output_padding / stride).
  SymSizes trailing_zeros() const;
};

// What to do with a condition on sizes that are not known yet.
enum class Unknown {
  kDefer,   // leave it to the kernel: asking would materialize a lazy tensor
  kAssert,  // record it as an assertion of the traced program
};

// Throw, naming the argument, unless the tensors fit together. Only metadata is read.
void check_forward(
    const Geometry& geometry,
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    Unknown unknown = Unknown::kDefer);
void check_backward(
    const Geometry& geometry,
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    Unknown unknown = Unknown::kDefer);

// The concrete sizes of the trilinear form <F(x, w), g> of a plain convolution. A transposed
// convolution has one too: x is its output, and g its input with the trailing zeros.
struct Form {
  at::DimVector x, w, g;  // x [N, C, *H], w [K, C / groups, *k], g [N, K, *O]
  at::DimVector stride, padding, dilation;
  int64_t groups;

  int64_t dim() const {
    return static_cast<int64_t>(stride.size());
  }
  bool depthwise() const {
    return groups > 1 && groups == x[1];
  }
};

// The form of the convolution of `input` and `weight`; none where a size is not known yet.
std::optional<Form> make_form(
    const Geometry& geometry, c10::SymIntArrayRef input, c10::SymIntArrayRef weight);

}  // namespace torch_convfix
