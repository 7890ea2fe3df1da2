"""Reports: the parsing of compiled programs, the roofline, what is written."""

import dataclasses
import itertools
import json
from html.parser import HTMLParser

import pytest

from torch_convfix.tpu import _chips, _compiler, report
from torch_convfix.tpu._origin import Origin

PROGRAM = """HloModule m, is_scheduled=true

FileNames
1 "/step.py"
2 "label7"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=0 end_column=0}
2 {file_name_id=2 function_name_id=1 line=1 end_line=1 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


ENTRY %main {
  %p = f32[8]{0} parameter(0)
  %fusion.1 = f32[8]{0:T(8)S(1)} fusion(%p), kind=kLoop, calls=%c, metadata={op_name="label3.4/aten__tanh" source_file="a.py" source_line=3}, backend_config={"estimated_cycles":"100","x":[]}
  %conv = f32[8]{0} convolution(%fusion.1), metadata={op_name="convolution/convolution" stack_frame_id=2}, backend_config={"estimated_cycles":"40"}
  %add = f32[8]{0} add(%conv), metadata={op_name="add/add" stack_frame_id=1}, backend_config={"estimated_cycles":"3"}
  ROOT %copy.2 = f32[8]{0} copy(%add), backend_config={"estimated_cycles":"7"}
}
"""


COSTS = _compiler.Costs(
    compile_seconds=1.5,
    compile_cpu_seconds=1.2,
    cycles=150,
    flops=3 * 10**9,
    bytes=10**6,
    argument_bytes=819_000,
    output_bytes=819_000,
    temporary_bytes=2**20,
    peak_bytes=2**30,
)


def make(topology: str = "v5e") -> report.Report:
    origins = {"label3": Origin("backward", "u.py:9"), "label7": Origin("forward", "u.py:8")}
    return report.make_report(
        COSTS,
        _compiler._instructions(PROGRAM),
        "stablehlo.convolution stablehlo.convolution",
        origins,
        name="<step>",
        stack="torch_xla",
        kernels="ours",
        topology=topology,
        trace_seconds=0.1,
    )


def test_instructions_and_their_origins():
    found = {(o.stage, o.name, o.source): o.cycles for o in make().operators}
    assert found == {
        ("backward", "tanh", "u.py:9"): 100,  # by the scope in its name
        ("forward", "convolution", "u.py:8"): 40,  # by its innermost frame
        ("", "add", "/step.py:12"): 3,  # no label: the frame itself
        ("", "(copy)", ""): 7,
    }
    assert make().convolutions == 2


def test_roofline_by_hand():
    # 3e9 flops at 197e12 a second are 15.2 us; 1.638 MB at 819 GB/s 2.0 us. 1.5 GHz: 22,843 cycles.
    assert make().bound_seconds == pytest.approx(3e9 / 197e12)
    assert make().ratio_to_bound == pytest.approx(150 / 22842.6, rel=1e-4)
    slow = dataclasses.replace(make(), flops=10)
    assert slow.bound_seconds == pytest.approx(2e-6)
    assert make().intensity == 3000
    assert make("v5e:2x2").bound_seconds == make().bound_seconds
    assert make("v6e").ratio_to_bound is None  # its clock is not public
    assert make("v99").bound_seconds is None


def test_chips_are_plausible():
    """Memory, peak and bandwidth grow from each generation's larger chip to the next."""
    large = [_chips.CHIPS[name] for name in ("v2", "v3", "v4", "v5p", "v7")]
    for old, new in itertools.pairwise(large):
        assert old.peak_flops < new.peak_flops
        assert old.bandwidth < new.bandwidth
        assert old.memory <= new.memory
    for chip in _chips.CHIPS.values():
        assert chip.source.startswith("https://")
        assert _chips.find(chip.topology) == chip


def test_written_forms():
    failure = report.Failure("<step>", "torch_xla", "stock", "v5e", "RESOURCE_EXHAUSTED: <memory>")
    results = [make(), failure]
    back = json.loads(report.to_json(results))
    assert report.Report.from_dict(back[0]) == make()
    assert report.Failure(**back[1]) == failure

    page = report.to_html(results)
    assert "<step>" not in page and "&lt;step&gt;" in page and "&lt;memory&gt;" in page

    class Bars(HTMLParser):
        widths: list[float] = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            values = dict(attrs)
            if "bar" in (values.get("class") or "").split():
                self.widths.append(float(values["style"].split()[1].rstrip("%")))

    Bars().feed(page)
    assert Bars.widths == [100, 100, 40, 7, 3]

    text = str(make())
    for part in ("estimate", "150", "backward", "tanh", "1,024.0", "6.2%"):
        assert part in text
