#include <ATen/TensorOperators.h>
#include <ATen/ops/_segment_reduce_backward_ops.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/segment_reduce_ops.h>
#include <ATen/ops/zeros.h>

#include "derivatives/differentiable.h"
#include "derivatives/fixes.h"

namespace torch_convfix {
namespace {

// The segments along an axis, with the dimensions before it, and those after it, joined: data is
// [outer, length, inner], results are [outer, segments, inner].
class Segments {
 public:
  Segments(
      const at::Tensor& data,
      const std::optional<at::Tensor>& lengths,
      const std::optional<at::Tensor>& offsets,
      int64_t axis)
      : sizes_(data.sizes()), axis_(axis < 0 ? axis + data.dim() : axis), length_(data.size(axis_)) {
    TORCH_CHECK(
        (lengths && lengths->defined()) || (offsets && offsets->defined()),
        "segment_reduce: lengths or offsets must be given, got neither");
    outer_ = c10::multiply_integers(sizes_.begin(), sizes_.begin() + axis_);
    inner_ = c10::multiply_integers(sizes_.begin() + axis_ + 1, sizes_.end());
    if (offsets && offsets->defined()) {
      count_ = offsets->size(-1) - 1;
      const auto bounds = offsets->to(at::kLong).reshape({outer_, count_ + 1});
      first_ = bounds.narrow(1, 0, count_);
      size_ = bounds.narrow(1, 1, count_) - first_;
    } else {
      count_ = lengths->size(-1);
      size_ = lengths->to(at::kLong).reshape({outer_, count_});
      first_ = size_.cumsum(1) - size_;
    }
    const auto position = at::arange(length_, size_.options()).unsqueeze(-1);
    // As many segments end at or before a position as there are before its own.
    segment_ = (position >= (first_ + size_).unsqueeze(1)).sum(-1);
    outside_ = (segment_ == count_).unsqueeze(-1);
    segment_ = segment_.clamp_max(count_ - 1).unsqueeze(-1).expand({outer_, length_, inner_});
  }

  at::Tensor flat(const at::Tensor& t, int64_t length) const {
    return t.reshape({outer_, length, inner_});
  }
  at::Tensor data(const at::Tensor& t) const {
    return flat(t, length_);
  }
  at::Tensor restored(const at::Tensor& t) const {
    return t.reshape(sizes_);
  }

  // Of each segment, at each of its positions; 0 outside of them.
  at::Tensor at_positions(const at::Tensor& results) const {
    return flat(results, count_).gather(1, segment_).masked_fill(outside_, 0);
  }

  at::Tensor sums(const at::Tensor& data) const {
    const auto zeros = at::zeros({outer_, count_, inner_}, data.options());
    return zeros.scatter_add(1, segment_, data.masked_fill(outside_, 0));
  }

  at::Tensor sizes_at_positions(const at::Tensor& like) const {
    return at_positions(size_.unsqueeze(-1).expand({outer_, count_, inner_}))
        .clamp_min(1)
        .to(like.scalar_type());
  }

  // The product of the others of its segment, at each position: of those before it and those after.
  at::Tensor products_of_others(const at::Tensor& data) const {
    const auto longest = std::max<int64_t>(1, size_.max().item<int64_t>());
    const auto place = at::arange(longest, size_.options());
    const auto rows = (first_.unsqueeze(-1) + place).clamp_max(length_ - 1).reshape({outer_, -1, 1});
    const auto beyond = (place >= size_.unsqueeze(-1)).unsqueeze(-1);
    const auto padded = data.gather(1, rows.expand({outer_, count_ * longest, inner_}))
                            .reshape({outer_, count_, longest, inner_})
                            .masked_fill(beyond, 1);
    const auto one = at::ones_like(padded.narrow(2, 0, 1));
    const auto before = at::cat({one, padded.narrow(2, 0, longest - 1)}, 2).cumprod(2);
    const auto after = at::cat({one, padded.narrow(2, 1, longest - 1).flip(2)}, 2).cumprod(2).flip(2);
    const auto start = first_.unsqueeze(-1).expand({outer_, count_, inner_}).gather(1, segment_);
    const auto position = at::arange(length_, size_.options()).unsqueeze(-1);
    const auto places = segment_ * longest + (position - start).clamp(0, longest - 1);
    return (before * after).reshape({outer_, count_ * longest, inner_}).gather(1, places);
  }

 private:
  at::DimVector sizes_;
  int64_t axis_, length_, outer_, inner_, count_;
  at::Tensor first_, size_, segment_, outside_;
};

// Of its segment's result, at each position. Extrema that tie share it equally, as in core.
at::Tensor derivative(
    const Segments& segments,
    const at::Tensor& output,
    const at::Tensor& data,
    std::string_view reduce,
    const std::optional<at::Scalar>& initial) {
  if (reduce == "sum") {
    return at::ones_like(data);
  }
  if (reduce == "mean") {
    return at::ones_like(data) / segments.sizes_at_positions(data);
  }
  if (reduce == "prod") {
    const auto others = segments.products_of_others(data);
    return initial ? others * *initial : others;
  }
  const auto extreme =
      (data == segments.at_positions(output)).logical_or(data.isnan()).to(data.scalar_type());
  return extreme / segments.at_positions(segments.sums(extreme)).clamp_min(1);
}

at::Tensor segment_reduce_backward(
    const at::Tensor& grad,
    const at::Tensor& output,
    const at::Tensor& data,
    std::string_view reduce,
    const std::optional<at::Tensor>& lengths,
    const std::optional<at::Tensor>& offsets,
    int64_t axis,
    const std::optional<at::Scalar>& initial) {
  if (data.sym_numel() == 0 || output.sym_numel() == 0) {
    return at::zeros_symint(data.sym_sizes(), data.options());
  }
  const Segments segments(data, lengths, offsets, axis);
  const auto slope = derivative(segments, output, segments.data(data), reduce, initial);
  return segments.restored(segments.at_positions(grad) * slope);
}

at::Tensor segment_reduce(
    const at::Tensor& output,
    const at::Tensor& data,
    std::string_view reduce,
    const std::optional<at::Tensor>& lengths,
    const std::optional<at::Tensor>& /*indices*/,
    const std::optional<at::Tensor>& offsets,
    int64_t axis,
    bool /*unsafe*/,
    const std::optional<at::Scalar>& initial) {
  const auto point = primal(data);
  if (data.sym_numel() == 0 || output.sym_numel() == 0) {
    return with_tangent(output, at::zeros_symint(output.sym_sizes(), output.options()));
  }
  const Segments segments(point, lengths, offsets, axis);
  const auto slope = derivative(segments, output, segments.data(point), reduce, initial);
  const auto tangent = segments.sums(segments.data(data._fw_grad(/*level=*/0)) * slope);
  return with_tangent(output, tangent.reshape_symint(output.sym_sizes()));
}

}  // namespace

torch::CppFunction make_segment_reduce() {
  return make_forward_rule<at::_ops::segment_reduce, &segment_reduce>();
}

torch::CppFunction make_segment_reduce_backward() {
  return make_differentiable<at::_ops::_segment_reduce_backward, &segment_reduce_backward>();
}

}  // namespace torch_convfix
