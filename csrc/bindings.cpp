#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "convolution/composed.h"
#include "convolution/traced_shapes.h"
#include "registry.h"

namespace py = pybind11;
using namespace torch_convfix;

PYBIND11_MODULE(_C, m) {
  py::enum_<OutputPadding>(m, "OutputPadding")
      .value("native", OutputPadding::kNative)
      .value("pad", OutputPadding::kPad);
  py::enum_<Hardware>(m, "Hardware")
      .value("cpu", Hardware::kCPU)
      .value("tpu", Hardware::kTPU)
      .value("other", Hardware::kOther);
  py::enum_<Grouped>(m, "Grouped").value("direct", Grouped::kDirect).value("merge", Grouped::kMerge);
  py::enum_<Convolutions>(m, "Convolutions")
      .value("native", Convolutions::kNative)
      .value("composed", Convolutions::kComposed);
  py::class_<Options>(m, "Options")
      .def(
          py::init([](OutputPadding output_padding, Hardware hardware, bool derivatives, Grouped grouped,
                      int64_t merge, bool dynamic, Convolutions convolutions, int64_t block_bytes) {
            return Options{output_padding, {hardware, grouped, merge},
                           derivatives,    dynamic,
                           convolutions,   block_bytes};
          }),
          py::arg("output_padding"), py::arg("hardware"), py::arg("derivatives"),
          py::arg("grouped") = Grouped::kDirect, py::arg("merge") = 0, py::arg("dynamic") = false,
          py::arg("convolutions") = Convolutions::kNative,
          py::arg("block_bytes") = Options{}.block_bytes)
      .def_readonly("output_padding", &Options::output_padding)
      .def_property_readonly("hardware", [](const Options& o) { return o.planner.hardware; })
      .def_property_readonly("grouped", [](const Options& o) { return o.planner.grouped; })
      .def_readonly("derivatives", &Options::derivatives)
      .def_readonly("dynamic", &Options::dynamic)
      .def_readonly("convolutions", &Options::convolutions);
  m.def("enable", &enable, py::arg("device"), py::arg("options"));
  m.def("disable", &disable, py::arg("device"));
  m.def("enabled_options", &enabled_options, py::arg("device"));
  m.def("registrations", [] {
    std::vector<std::array<std::string, 4>> fields;
    for (const auto& r : registrations()) {
      fields.push_back({r.device, r.op, r.dispatch_key, r.purpose});
    }
    return fields;
  });
  m.def("needed_operators", &needed_operators);
  m.def("traced_shapes", &traced_shapes);
  m.def(
      "check_backward",
      [](const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
         const std::vector<c10::SymInt>& stride, const std::vector<c10::SymInt>& padding,
         const std::vector<c10::SymInt>& dilation, bool transposed,
         const std::vector<c10::SymInt>& output_padding, c10::SymInt groups) {
        const Geometry geometry(
            weight, stride, padding, dilation, transposed, output_padding, std::move(groups));
        check_backward(geometry, grad_output, input, weight);
      });
}
