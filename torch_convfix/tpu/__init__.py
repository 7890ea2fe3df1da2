"""A TPU that is not there: trace a step on either TPU stack, and run or compile what was traced."""

from torch_convfix.tpu._compiler import CompileError
from torch_convfix.tpu._step import compile
from torch_convfix.tpu.report import Report

__all__ = ["CompileError", "Report", "compile"]
