"""TPU generations: the compiler's name for one of each, and the peak figures of public sheets."""

from dataclasses import dataclass

_SHEETS = "https://cloud.google.com/tpu/docs/"
_PAPER_V2_V3 = "https://doi.org/10.1109/ISCA52012.2021.00010"  # Jouppi et al., 2021, table 1
_PAPER_V4 = "https://doi.org/10.1145/3579371.3589350"  # Jouppi et al., 2023, table 4
_SCALING_BOOK = "https://jax-ml.github.io/scaling-book/tpus/"


@dataclass(frozen=True)
class Chip:
    """One device as the compiler sees it: a core on v2, v3, v4 and v7, a chip on the others.

    Figures are a chip's share per device, from `source`. ``clock_hz`` is None where none is public.
    """

    name: str
    topology: str
    peak_flops: float  # bfloat16, which float32 convolutions use by default
    bandwidth: float  # HBM, bytes a second
    memory: int  # HBM, bytes
    clock_hz: float | None
    source: str


_GIB = 1024**3

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", "v2:2x2", 46e12 / 2, 700e9 / 2, 8 * _GIB, 0.70e9, _PAPER_V2_V3),
        Chip("v3", "v3:2x2", 123e12 / 2, 900e9 / 2, 16 * _GIB, 0.94e9, _PAPER_V2_V3),
        Chip("v4", "v4:2x2x1", 275e12 / 2, 1200e9 / 2, 16 * _GIB, 1.05e9, _PAPER_V4),
        Chip("v5e", "v5e:1x1", 197e12, 819e9, 16 * _GIB, 1.50e9, f"{_SHEETS}v5e, {_SCALING_BOOK}"),
        Chip(
            "v5p", "v5p:2x2x1", 459e12, 2765e9, 95 * _GIB, 1.75e9, f"{_SHEETS}v5p, {_SCALING_BOOK}"
        ),
        Chip("v6e", "v6e:1x1", 918e12, 1640e9, 32 * _GIB, None, f"{_SHEETS}v6e"),
        Chip("v7", "tpu7x:2x2x1", 2307e12 / 2, 7380e9 / 2, 96 * _GIB, None, f"{_SHEETS}tpu7x"),
    )
}
ALLOWED = f"{', '.join(CHIPS)} or a name of the compiler's own such as v5e:2x2"


def find(topology: str) -> Chip | None:
    """The chip of a friendly name (``v5e``) or of a topology of the compiler's own (``v5e:2x2``)."""
    generation = topology.split(":")[0]
    return CHIPS.get("v7" if generation == "tpu7x" else generation)


def topology_name(topology: str) -> str:
    """The compiler's name of a topology given by that or by its friendly name.

    Raises:
        ValueError: for what can be neither.
    """
    if topology not in CHIPS and ":" not in topology:
        raise ValueError(f"topology must be one of {ALLOWED}, got {topology!r}")
    return CHIPS[topology].topology if topology in CHIPS else topology
