"""Find out which derivatives a device gets wrong: every operator of convolutional nets against float64.

`run` sweeps the operators, `check` compares one call, and `torch_convfix.audit` your own model.
"""

from torch_convfix.verify.check import check as check
from torch_convfix.verify.conv_cases import ConvCase as ConvCase
from torch_convfix.verify.findings import Finding as Finding
from torch_convfix.verify.module_cases import ModuleCase as ModuleCase
from torch_convfix.verify.op_cases import OpCase as OpCase
from torch_convfix.verify.report import Report as Report
from torch_convfix.verify.spelling import tensor as tensor
from torch_convfix.verify.sweep import run as run
