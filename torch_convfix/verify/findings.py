"""What can be wrong with an operator."""

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What can be wrong, the worst first."""

    WRONG = "wrong numbers, no error"
    CRASH = "ends the process"
    RAISES = "raises, and the formula does not"
    ACCEPTS = "accepts what the CPU refuses"
    REFUSES = "refuses with an error; the CPU computes it"
    NOT_TRACEABLE = "not traceable: ends the process that traces it"
    NOT_SWEPT = "not swept: drawing, comparing or telling it raised"
    RIGHT = "right"


# These make a sweep fail. A clear error of an operator that a backend has not implemented does not,
# nor one of the sweep itself: both are told.
FAULTS = (Kind.WRONG, Kind.CRASH, Kind.RAISES, Kind.ACCEPTS)


@dataclass(frozen=True)
class Finding:
    """One fault of one operator, with the smallest case that shows it."""

    op: str
    kind: Kind
    fault: str  # the first stage that is wrong, or how the process ended
    stages: dict[str, float]  # the wrong stages, with the worst relative error of each
    cases: int
    line: str  # Python that shows it
    detail: str = ""

    @property
    def error(self) -> float:
        """The worst relative error."""
        return max(self.stages.values(), default=0.0)

    @property
    def what(self) -> str:
        """What is wrong, in words."""
        if self.kind is Kind.WRONG:
            return ", ".join(self.stages)
        if self.kind is Kind.ACCEPTS:
            return self.kind.value
        return f"raises at {self.fault}" if self.kind is Kind.RAISES else self.fault
