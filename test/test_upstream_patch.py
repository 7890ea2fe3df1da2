"""scripts/make_upstream_patch, on a miniature tree; with PYTORCH_SOURCE=DIR, on a real checkout."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch.utils.cpp_extension

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts/make_upstream_patch"

MINIATURE = {
    "aten/src/ATen/native/Convolution.cpp": """\
#include <ATen/TensorOperators.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/_convolution_double_backward_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty_like.h>

namespace at::native {

std::tuple<Tensor, Tensor, Tensor> convolution_backward_overrideable(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
    IntArrayRef output_padding, int64_t groups, std::array<bool, 3> output_mask) {
  TORCH_CHECK(false, "an unbalanced brace { in a string"); // and } in a comment
}

static Tensor subvariable(const Tensor& t, int64_t dim, int64_t groups, int64_t g) {
  return t.narrow(dim, g, groups);
}

std::tuple<Tensor,Tensor,Tensor> _convolution_double_backward( const std::optional<Tensor>& ggI_opt,
    const std::optional<Tensor>& ggW_opt, const std::optional<Tensor>& ggb_opt, const Tensor& gO_r,
    const Tensor& weight_r, const Tensor& input, IntArrayRef stride_, IntArrayRef padding_,
    IntArrayRef dilation_, bool transposed_, IntArrayRef output_padding_, int64_t groups_,
    std::array<bool, 3> output_mask) {
  for (int64_t g = 0; g < groups_; ++g) {
    subvariable(gO_r, 0, groups_, g);
  }
  return {};
}

}  // namespace at::native
""",
    "aten/src/ATen/native/native_functions.yaml": "".join(
        f"- func: {name}(Tensor input) -> Tensor\n  dispatch:\n    CompositeExplicitAutograd: {name}\n"
        f"  autogen: {name}.out\n\n"
        for name in ("convolution_overrideable", "convolution_backward_overrideable")
    ),
    "tools/autograd/derivatives.yaml": """\
- name: hardsigmoid(Tensor self) -> Tensor
  self: hardsigmoid_backward(grad, self)
  result: auto_element_wise

- name: histc(Tensor self) -> Tensor
""",
    "test/nn/test_convolution.py": """\
class TestConvolutionNN(NNTestCase):
    def test_old(self):
        pass


class TestConvolutionNNDeviceType(NNTestCase):
    pass
""",
}


@pytest.fixture
def miniature(tmp_path):
    for name, text in MINIATURE.items():
        path = tmp_path / "pytorch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "pytorch"


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )


def patched(checkout, tmp_path):
    """The text of the pull request, and a copy of the files with the patch applied by git."""
    patch, copy = tmp_path / "out.patch", tmp_path / "patched"
    ran = run("--pytorch", checkout, "--out", patch)
    assert ran.returncode == 0, ran.stderr
    for name in MINIATURE:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text((checkout / name).read_text())
    subprocess.run(["git", "apply", "--check", patch], cwd=copy, check=True)
    subprocess.run(["git", "apply", patch], cwd=copy, check=True)
    return ran.stdout, copy


def errors(source, tmp_path):
    """What g++ says of a file of ATen, without its places; headers that torch does not ship are empty."""
    include = pathlib.Path(torch.utils.cpp_extension.include_paths()[0])
    for header in re.findall(r"#include [<\"]([^>\"]+\.h)[>\"]", source.read_text()):
        if header.startswith("ATen/native/") and not (include / header).exists():
            (tmp_path / "stub" / header).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "stub" / header).touch()
    paths = [include, include / "torch/csrc/api/include", tmp_path / "stub"]
    command = ["g++", "-std=c++20", "-fsyntax-only", "-w", "-fmax-errors=0"]
    command += ["-DAT_PER_OPERATOR_HEADERS", *(f"-I{path}" for path in paths), str(source)]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    return {line.split("error: ", 1)[1] for line in said.splitlines() if "error: " in line}


def test_the_patch_applies(miniature, tmp_path):
    text, tree = patched(miniature, tmp_path)
    source = (tree / "aten/src/ATen/native/Convolution.cpp").read_text()
    assert "subvariable" not in source and "SymInt groups,\n    std::array" not in source
    assert source.count("> _convolution_double_backward(") == 1
    assert "#include <ATen/ops/convolution.h>\n#include <ATen/ops/convolution_backward.h>" in source
    functions = (tree / "aten/src/ATen/native/native_functions.yaml").read_text()
    assert functions.count("    Meta: convolution_") == 2
    assert "- name: hardsigmoid_backward(" in (tree / "tools/autograd/derivatives.yaml").read_text()
    tests = (tree / "test/nn/test_convolution.py").read_text()
    assert tests.index("test_old") < tests.index("no_loop_over") < tests.index("NNDeviceType")
    compile(tests, "test_convolution.py", "exec")
    for word in ("Problem", "trilinear", "Figures", "Complex", "Quantized", "mkldnn", "Nested", "functorch", "Lazy"):  # fmt: skip
        assert word in text


def test_the_patched_file_compiles(miniature, tmp_path):
    _, tree = patched(miniature, tmp_path)
    assert errors(tree / "aten/src/ATen/native/Convolution.cpp", tmp_path) == set()


@pytest.mark.skipif("PYTORCH_SOURCE" not in os.environ, reason="needs a checkout of PyTorch")
def test_a_real_checkout_compiles_as_well_as_before(tmp_path):
    checkout = pathlib.Path(os.environ["PYTORCH_SOURCE"])
    _, tree = patched(checkout, tmp_path)
    name = "aten/src/ATen/native/Convolution.cpp"
    assert errors(tree / name, tmp_path) <= errors(checkout / name, tmp_path)


def test_what_it_refuses(miniature, tmp_path):
    ran = run("--pytorch", tmp_path / "nothing")
    assert ran.returncode == 2 and "--pytorch must be a checkout of PyTorch" in ran.stderr
    source = miniature / "aten/src/ATen/native/Convolution.cpp"
    source.write_text(source.read_text().replace("_convolution_double_backward(", "renamed("))
    ran = run("--pytorch", miniature)
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    assert "no definition of _convolution_double_backward" in ran.stderr
