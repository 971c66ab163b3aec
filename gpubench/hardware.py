"""What is published about accelerators, by the exact name their driver reports.

Nothing is matched by part of a name: an L40S is no L4, an H100 PCIe reaches three quarters of an H100 SXM, and a MIG
slice ("NVIDIA A100-SXM4-80GB MIG 1g.10gb") has a fraction of its card. A name that is not listed is unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpubench.errors import DeviceError, did_you_mean

_DATA_TYPES = {"fp32": "fp32", "tf32": "tf32", "amp": "fp16", "bf16": "bf16"}  # by precision setting


@dataclass(frozen=True)
class Accelerator:
    """One device as the driver counts devices: of an AMD MI250X that is one of its two dies.

    memory_bytes is the nominal size, of which the driver and inline ECC keep up to 8 %. peaks are dense FLOP/s, never
    those with structured sparsity, at the published boost clock: "tf32", "bf16" and "fp16" on the matrix units with
    fp32 accumulation, left out where the matrix units lack the type; "fp32" in full fp32, which on NVIDIA means the
    vector units and on AMD the matrix units.
    """

    names: tuple[str, ...]
    key: str
    memory_bytes: int
    memory_bandwidth: float  # bytes/s
    peaks: Mapping[str, float] = field(hash=False)
    source: str


@dataclass(frozen=True)
class Peak:
    """The published ceiling of a device in one arithmetic, and who published it."""

    flops_per_s: float
    dtype: str
    device: str
    source: str


def find_accelerator(name: str) -> Accelerator | None:
    """The accelerator whose driver reports `name`, but for case and spacing; None if it is not listed."""
    return _BY_NAME.get(_normalised(name))


def find_by_key(key: str) -> Accelerator:
    """The accelerator called `key`, such as "h200"; DeviceError naming the nearest key if there is none."""
    if found := _BY_KEY.get(_normalised(key)):
        return found
    near = did_you_mean(_normalised(key), _BY_KEY, cutoff=0)
    raise DeviceError(f"no accelerator is called '{key}'", f"{near} known are {', '.join(_BY_KEY)}")


def peak_flops(name: str, precision: str, matmul_precision: str | None = None) -> Peak | None:
    """The dense peak of the device called `name` at a precision setting: fp32, tf32, amp (fp16) or bf16.

    Where `matmul_precision` says how float32 products are computed (highest, high or medium), it decides between the
    peaks of fp32 and TF32. None if the device is not listed or its matrix units lack the type; KeyError for any other
    precision.
    """
    dtype = _DATA_TYPES[precision]
    found = find_accelerator(name)
    if found is None:
        return None
    if matmul_precision and dtype in ("fp32", "tf32"):
        dtype = "tf32" if matmul_precision != "highest" and "tf32" in found.peaks else "fp32"
    if dtype not in found.peaks:
        return None
    return Peak(found.peaks[dtype], dtype, found.key, found.source)


def _normalised(name: str) -> str:
    return " ".join(name.split()).casefold()


def _row(
    key: str,
    names: tuple[str, ...],
    gibibytes: int,
    terabytes_per_s: float,
    teraflops: tuple[float | None, float | None, float | None, float | None],
    source: str,
) -> Accelerator:
    peaks = {dtype: peak * 1e12 for dtype, peak in zip(_COLUMNS, teraflops, strict=True) if peak is not None}
    return Accelerator(names, key, gibibytes * 2**30, terabytes_per_s * 1e12, peaks, source)


AMPERE = (8, 0)
"""The compute capability from which on there is bfloat16."""
HOPPER = (9, 0)

_COLUMNS = ("fp32", "tf32", "bf16", "fp16")

_V100 = "NVIDIA V100 data sheet"
_A100 = "NVIDIA A100 data sheet"
_HOPPER = "NVIDIA H100 architecture whitepaper"
_H200 = "NVIDIA H200 data sheet"
_GH200 = "NVIDIA GH200 data sheet"
_HGX = "NVIDIA HGX platform specifications, per GPU"
_AMPERE = "NVIDIA GA102 architecture whitepaper"
_ADA = "NVIDIA Ada architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell architecture whitepaper"
_BLACKWELL_PRO = "NVIDIA RTX PRO Blackwell architecture whitepaper"
_MI200 = "AMD Instinct MI200 series data sheet"
_MI300 = "AMD Instinct MI300X data sheet"
_MI325 = "AMD Instinct MI325X data sheet"
_MI350 = "AMD Instinct MI350 series data sheet"

_PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
_MI300X_NAMES = ("AMD Instinct MI300X", "AMD Instinct MI300X OAM", "AMD Instinct MI300X VF")

# Where a data sheet prints sparse peaks only, the dense ones are half of them.
ACCELERATORS: tuple[Accelerator, ...] = (
    # key, reported names, GiB, TB/s, dense TFLOP/s (fp32, tf32, bf16, fp16), source
    _row("b300", ("NVIDIA B300 SXM6 AC",), 268, 8.0, (75, 1125, 2250, 2250), _HGX),
    _row("b200", ("NVIDIA B200",), 180, 7.7, (75, 1125, 2250, 2250), _HGX),
    _row("gh200-144gb", ("NVIDIA GH200 144G HBM3e",), 144, 4.9, (66.9, 494.7, 989.4, 989.4), _GH200),
    # 480 and 120 GB are the memory of the Grace half.
    _row("gh200", ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), 96, 4.0, (66.9, 494.7, 989.4, 989.4), _GH200),
    _row("h200", ("NVIDIA H200",), 141, 4.8, (66.9, 494.7, 989.4, 989.4), _H200),
    _row("h200-nvl", ("NVIDIA H200 NVL",), 141, 4.8, (60, 417.5, 835.5, 835.5), _H200),
    _row("h100", ("NVIDIA H100 80GB HBM3",), 80, 3.35, (66.9, 494.7, 989.4, 989.4), _HOPPER),
    _row("h100-pcie", ("NVIDIA H100 PCIe",), 80, 2.039, (51.2, 378, 756, 756), _HOPPER),
    _row("h100-nvl", ("NVIDIA H100 NVL",), 94, 3.9, (60, 417.5, 835.5, 835.5), "NVIDIA H100 data sheet"),
    _row("a100-80gb", ("NVIDIA A100-SXM4-80GB",), 80, 2.039, (19.5, 156, 312, 312), _A100),
    _row("a100-40gb", ("NVIDIA A100-SXM4-40GB",), 40, 1.555, (19.5, 156, 312, 312), _A100),
    _row("a100-pcie-80gb", ("NVIDIA A100 80GB PCIe",), 80, 1.935, (19.5, 156, 312, 312), _A100),
    _row("a100-pcie-40gb", ("NVIDIA A100-PCIE-40GB",), 40, 1.555, (19.5, 156, 312, 312), _A100),
    _row("l40s", ("NVIDIA L40S",), 48, 0.864, (91.6, 183, 362.05, 362.05), "NVIDIA L40S data sheet"),
    _row("l40", ("NVIDIA L40",), 48, 0.864, (90.5, 90.5, 181.05, 181.05), "NVIDIA L40 data sheet"),
    _row("l4", ("NVIDIA L4",), 24, 0.3, (30.3, 60, 121, 121), "NVIDIA L4 data sheet"),
    _row("a40", ("NVIDIA A40",), 48, 0.696, (37.4, 74.8, 149.7, 149.7), "NVIDIA A40 data sheet"),
    _row("a10", ("NVIDIA A10",), 24, 0.6, (31.2, 62.5, 125, 125), "NVIDIA A10 data sheet"),
    _row("v100-32gb", ("Tesla V100-SXM2-32GB", "Tesla V100-DGXS-32GB"), 32, 0.9, (15.7, None, None, 125), _V100),
    _row("v100-16gb", ("Tesla V100-SXM2-16GB", "Tesla V100-DGXS-16GB"), 16, 0.9, (15.7, None, None, 125), _V100),
    _row("v100-pcie-32gb", ("Tesla V100-PCIE-32GB",), 32, 0.9, (14, None, None, 112), _V100),
    _row("v100-pcie-16gb", ("Tesla V100-PCIE-16GB",), 16, 0.9, (14, None, None, 112), _V100),
    _row("v100s", ("Tesla V100S-PCIE-32GB",), 32, 1.134, (16.4, None, None, 130), _V100),
    _row("t4", ("Tesla T4",), 16, 0.32, (8.1, None, None, 65), "NVIDIA Turing architecture whitepaper"),
    _row("rtx-pro-6000", (_PRO_6000,), 96, 1.792, (126, 251.9, 503.8, 503.8), _BLACKWELL_PRO),
    _row("rtx-6000-ada", ("NVIDIA RTX 6000 Ada Generation",), 48, 0.96, (91.1, 182.1, 364.2, 364.2), _ADA),
    _row("rtx-a6000", ("NVIDIA RTX A6000",), 48, 0.768, (38.7, 77.4, 154.8, 154.8), _AMPERE),
    # On GeForce, fp16 runs twice as fast when it also accumulates in fp16; training does not.
    _row("rtx-5090", ("NVIDIA GeForce RTX 5090",), 32, 1.792, (104.8, 104.8, 209.5, 209.5), _BLACKWELL),
    _row("rtx-4090", ("NVIDIA GeForce RTX 4090",), 24, 1.008, (82.6, 82.6, 165.2, 165.2), _ADA),
    _row("rtx-3090", ("NVIDIA GeForce RTX 3090",), 24, 0.936, (35.6, 35.6, 71, 71), _AMPERE),
    # CDNA 4 dropped TF32; CDNA 2 never had it.
    _row("mi355x", ("AMD Instinct MI355X",), 288, 8.0, (157.3, None, 2516.6, 2516.6), _MI350),
    _row("mi325x", ("AMD Instinct MI325X",), 256, 6.0, (163.4, 653.7, 1307.4, 1307.4), _MI325),
    _row("mi300x", _MI300X_NAMES, 192, 5.3, (163.4, 653.7, 1307.4, 1307.4), _MI300),
    # "AMD Instinct MI250X/MI250", which some drivers report for both, is left out on purpose: they differ by 6 %.
    _row("mi250x", ("AMD Instinct MI250X",), 64, 1.6384, (47.85, None, 191.5, 191.5), f"{_MI200}, per die"),
    _row("mi210", ("AMD Instinct MI210",), 64, 1.6384, (45.3, None, 181, 181), _MI200),
)

_BY_NAME = {_normalised(name): row for row in ACCELERATORS for name in row.names}
_BY_KEY = {row.key: row for row in ACCELERATORS}
