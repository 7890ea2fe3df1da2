Tensor convolution_overrideable_meta_symint(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& /*bias*/,
    SymIntArrayRef stride,
    SymIntArrayRef padding,
    SymIntArrayRef dilation,
    bool transposed,
    SymIntArrayRef output_padding,
    c10::SymInt groups) {
  const auto sizes = transposed
      ? conv_input_size(
            input.sym_sizes(), weight.sym_sizes(), padding, output_padding, stride, dilation, groups)
      : conv_output_size(input.sym_sizes(), weight.sym_sizes(), padding, stride, dilation);
  return at::empty_symint(sizes, input.options());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward_overrideable_meta_symint(
    const Tensor& grad_output,
    const Tensor& input,
    const Tensor& weight,
    SymIntArrayRef /*stride*/,
    SymIntArrayRef /*padding*/,
    SymIntArrayRef /*dilation*/,
    bool /*transposed*/,
    SymIntArrayRef /*output_padding*/,
    c10::SymInt /*groups*/,
    std::array<bool, 3> output_mask) {
  const auto empty = [&](bool wanted, SymIntArrayRef sizes) {
    return wanted ? at::empty_symint(sizes, grad_output.options()) : Tensor();
  };
  return {
      empty(output_mask[0], input.sym_sizes()),
      empty(output_mask[1], weight.sym_sizes()),
      empty(output_mask[2], grad_output.sym_sizes().slice(1, 1))};
}
