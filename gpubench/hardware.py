"""The published figures of accelerators, by the exact name that the driver reports.

Names must match as a whole: an L40S is not an L4, an H100 PCIe reaches three quarters of an H100 SXM, the "NVIDIA
GeForce RTX 4090 Laptop GPU" has another chip than the desktop card, and a MIG slice ("NVIDIA A100-SXM4-80GB MIG
1g.10gb") has a fraction of its card. A name that is not listed is unknown. Some GeForce cards with different memory
have the same name; the memory that the driver reports distinguishes them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpubench.errors import DeviceError, one_of

_LEAST_MEMORY, _MOST_MEMORY = 0.88, 1.05  # reported / nominal memory: the driver and inline ECC reserve up to a tenth
_DATA_TYPES = {"fp32": "fp32", "tf32": "tf32", "amp": "fp16", "bf16": "bf16"}  # by precision setting


@dataclass(frozen=True)
class Accelerator:
    """The published figures of one device, as the driver counts devices: each die of an AMD MI250X is a device.

    `memory_bytes` is the nominal size, of which the driver and inline ECC reserve up to 9 %. `peaks` are dense FLOP/s
    at the published boost clock, without structured sparsity. "tf32", "bf16" and "fp16" are those of the matrix units
    with fp32 accumulation, and missing if the matrix units do not support the type. "fp32" is full fp32, which NVIDIA
    computes in the vector units and AMD Instinct in the matrix units.
    """

    names: tuple[str, ...]
    key: str
    memory_bytes: int
    memory_bandwidth: float  # bytes/s
    peaks: Mapping[str, float] = field(hash=False)
    source: str


@dataclass(frozen=True)
class Peak:
    """The published dense peak of a device for one data type, with its source."""

    flops_per_s: float
    dtype: str
    device: str
    source: str


def computes_in(reduced: Collection[str] | None, precision: str) -> bool | None:
    """Returns whether a CPU has arithmetic for a value of `precision`; None if it is unknown.

    `reduced` are the types of 16 bits that it computes in.
    """
    dtype = _DATA_TYPES.get(precision, precision)
    return True if dtype in ("fp32", "tf32") else None if reduced is None else dtype in reduced


def find_accelerator(name: str, memory_bytes: int | None = None) -> Accelerator | None:
    """The accelerator whose driver reports `name`, ignoring case and spacing; None if it is not listed.

    `memory_bytes` is the memory that the driver reports, which must agree with the nominal size. It distinguishes cards
    that share a name, and a part of a card from the whole card. Without it, the result is None for a name that several
    cards of different speed share.
    """
    found = _BY_NAME.get(_normalised(name), [])
    if memory_bytes is not None:
        found = [
            row for row in found if _LEAST_MEMORY * row.memory_bytes <= memory_bytes <= _MOST_MEMORY * row.memory_bytes
        ]
    equal = all((row.peaks, row.memory_bandwidth) == (found[0].peaks, found[0].memory_bandwidth) for row in found)
    return found[0] if found and equal else None


LISTED_BY = "gpubench memory --help lists all"


def find_by_key(key: str) -> Accelerator:
    """The accelerator `key`, such as "h200". Raises DeviceError with the nearest key if there is none."""
    if found := _BY_KEY.get(_normalised(key)):
        return found
    wanted = _normalised(key).removeprefix("nvidia").removeprefix("amd").strip(" -")
    raise DeviceError(f"no accelerator is called '{key}'", one_of(wanted, _BY_KEY, LISTED_BY))


def peak_flops(
    name: str, precision: str, matmul_precision: str | None = None, memory_bytes: int | None = None
) -> Peak | None:
    """The dense peak of the device `name` at a precision setting: fp32, tf32, amp (fp16) or bf16.

    If `matmul_precision` is given (highest, high or medium), it chooses between the peaks of fp32 and TF32.
    `memory_bytes` is that of `find_accelerator`. None if the device is not listed or its matrix units do not support
    the type. Raises KeyError for any other precision.
    """
    dtype = _DATA_TYPES[precision]
    found = find_accelerator(name, memory_bytes)
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


def _geforce(
    model: str, gigabytes: int, gigabytes_per_s: float, cores: int, megahertz: int, key: str = ""
) -> Accelerator:
    """A GeForce card of the RTX 30, 40 or 50 series from its published cores, boost clock and bandwidth.

    fp32 is two operations per core and clock cycle. Where they accumulate in fp32, the tensor cores of these cards
    compute TF32 at the same rate and fp16 and bf16 at twice that, dense: the white papers of GA102, Ada and RTX
    Blackwell state this for the largest card of each series, and the others have the same multiprocessors. Accumulating
    in fp16 is twice as fast as in fp32 on GeForce, but training does not do so.
    """
    fp32 = 2 * cores * megahertz * 1e-6
    series = f"NVIDIA GeForce RTX {model[0]}0 series specifications: 2 x {cores} cores x {megahertz} MHz"
    names = (f"NVIDIA GeForce RTX {model}",)
    key = key or f"rtx-{model.casefold().replace(' ', '-')}"
    return _row(key, names, gigabytes, gigabytes_per_s / 1e3, (fp32, fp32, 2 * fp32, 2 * fp32), series)


AMPERE = (8, 0)
"""The first compute capability with bfloat16."""
HOPPER = (9, 0)

_COLUMNS = ("fp32", "tf32", "bf16", "fp16")

_V100 = "NVIDIA V100 data sheet"
_A100 = "NVIDIA A100 data sheet"
_HOPPER = "NVIDIA H100 architecture whitepaper"
_H200 = "NVIDIA H200 data sheet"
_H800 = "NVIDIA H800 data sheet"
_A800 = "NVIDIA A800 data sheet"
_TURING = "NVIDIA Turing architecture whitepaper"
_GH200 = "NVIDIA GH200 data sheet"
_HGX = "NVIDIA HGX platform specifications, per GPU"
_AMPERE = "NVIDIA GA102 architecture whitepaper"
_ADA = "NVIDIA Ada architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell architecture whitepaper"
_BLACKWELL_PRO = "NVIDIA RTX PRO Blackwell architecture whitepaper"
_PRO_SHEET = "NVIDIA RTX PRO 6000 Blackwell data sheets"
_MI200 = "AMD Instinct MI200 series data sheet"
_MI300 = "AMD Instinct MI300X data sheet"
_MI300A = "AMD Instinct MI300A data sheet"
_MI325 = "AMD Instinct MI325X data sheet"
_MI350 = "AMD Instinct MI350 series data sheet"

_GRACE_BLACKWELL = "NVIDIA GB200 and GB300 NVL72 specifications, per GPU"

_PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell {} Edition"
_MI300X_NAMES = ("AMD Instinct MI300X", "AMD Instinct MI300X OAM", "AMD Instinct MI300X VF")

# Where a data sheet prints sparse peaks only, the dense ones are half of them.
ACCELERATORS: tuple[Accelerator, ...] = (
    # key, reported names, GiB, TB/s, dense TFLOP/s (fp32, tf32, bf16, fp16), source
    # The figures of NVL72 racks include sparsity, except for fp32: 360 PFLOP/s of bf16 are 2.5 dense for each of the
    # 72 GPUs.
    _row("gb300", ("NVIDIA GB300",), 279, 8.0, (80, 1250, 2500, 2500), _GRACE_BLACKWELL),
    _row("gb200", ("NVIDIA GB200",), 186, 8.0, (80, 1250, 2500, 2500), _GRACE_BLACKWELL),
    _row("b300", ("NVIDIA B300 SXM6 AC",), 268, 8.0, (75, 1125, 2250, 2250), _HGX),
    _row("b200", ("NVIDIA B200",), 180, 7.7, (75, 1125, 2250, 2250), _HGX),
    _row("gh200-144gb", ("NVIDIA GH200 144G HBM3e",), 144, 4.9, (66.9, 494.7, 989.4, 989.4), _GH200),
    # 480 and 120 GB are the memory of the Grace CPU.
    _row("gh200", ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), 96, 4.0, (66.9, 494.7, 989.4, 989.4), _GH200),
    _row("h200", ("NVIDIA H200",), 141, 4.8, (66.9, 494.7, 989.4, 989.4), _H200),
    _row("h200-nvl", ("NVIDIA H200 NVL",), 141, 4.8, (60, 417.5, 835.5, 835.5), _H200),
    _row("h100", ("NVIDIA H100 80GB HBM3",), 80, 3.35, (66.9, 494.7, 989.4, 989.4), _HOPPER),
    _row("h100-pcie", ("NVIDIA H100 PCIe",), 80, 2.039, (51.2, 378, 756, 756), _HOPPER),
    _row("h100-nvl", ("NVIDIA H100 NVL",), 94, 3.9, (60, 417.5, 835.5, 835.5), "NVIDIA H100 data sheet"),
    # The H800 and the A800 differ from the H100 and the A100 in NVLink and in double precision.
    _row("h800", ("NVIDIA H800",), 80, 3.35, (66.9, 494.7, 989.4, 989.4), _H800),
    _row("h800-pcie", ("NVIDIA H800 PCIe",), 80, 2.039, (51.2, 378, 756, 756), _H800),
    # NVIDIA publishes no data sheet for the H20.
    _row(
        "h20-3e",
        ("NVIDIA H20-3e",),
        141,
        4.8,
        (44, 74, 148, 148),
        "specifications of the NVIDIA H20 with HBM3e as published by vendors",
    ),
    _row(
        "h20",
        ("NVIDIA H20",),
        96,
        4.0,
        (44, 74, 148, 148),
        "specifications of the NVIDIA H20 as published by vendors",
    ),
    _row("a100-80gb", ("NVIDIA A100-SXM4-80GB",), 80, 2.039, (19.5, 156, 312, 312), _A100),
    _row("a100-40gb", ("NVIDIA A100-SXM4-40GB",), 40, 1.555, (19.5, 156, 312, 312), _A100),
    _row("a100-pcie-80gb", ("NVIDIA A100 80GB PCIe",), 80, 1.935, (19.5, 156, 312, 312), _A100),
    _row("a100-pcie-40gb", ("NVIDIA A100-PCIE-40GB",), 40, 1.555, (19.5, 156, 312, 312), _A100),
    _row("a800-80gb", ("NVIDIA A800-SXM4-80GB",), 80, 2.039, (19.5, 156, 312, 312), _A800),
    _row("a800-pcie-80gb", ("NVIDIA A800 80GB PCIe",), 80, 1.935, (19.5, 156, 312, 312), _A800),
    _row("a30", ("NVIDIA A30",), 24, 0.933, (10.3, 82, 165, 165), "NVIDIA A30 data sheet"),
    _row("l40s", ("NVIDIA L40S",), 48, 0.864, (91.6, 183, 362.05, 362.05), "NVIDIA L40S data sheet"),
    _row("l40", ("NVIDIA L40",), 48, 0.864, (90.5, 90.5, 181.05, 181.05), "NVIDIA L40 data sheet"),
    _row("l4", ("NVIDIA L4",), 24, 0.3, (30.3, 60, 121, 121), "NVIDIA L4 data sheet"),
    _row("a40", ("NVIDIA A40",), 48, 0.696, (37.4, 74.8, 149.7, 149.7), "NVIDIA A40 data sheet"),
    _row("a10", ("NVIDIA A10",), 24, 0.6, (31.2, 62.5, 125, 125), "NVIDIA A10 data sheet"),
    _row("a2", ("NVIDIA A2",), 16, 0.2, (4.5, 9, 18, 18), "NVIDIA A2 data sheet"),
    # A board has four of these GPUs.
    _row("a16", ("NVIDIA A16",), 16, 0.2, (4.5, 9, 17.9, 17.9), "NVIDIA A16 data sheet, per GPU"),
    # Tensor cores at GeForce's rate: 512 operations a clock in each of 80 multiprocessors at 1.71 GHz make 70 TFLOP/s.
    _row("a10g", ("NVIDIA A10G",), 24, 0.6, (35, 35, 70, 70), "NVIDIA A10G specifications for AWS"),
    _row("v100-32gb", ("Tesla V100-SXM2-32GB", "Tesla V100-DGXS-32GB"), 32, 0.9, (15.7, None, None, 125), _V100),
    _row("v100-16gb", ("Tesla V100-SXM2-16GB", "Tesla V100-DGXS-16GB"), 16, 0.9, (15.7, None, None, 125), _V100),
    _row("v100-pcie-32gb", ("Tesla V100-PCIE-32GB",), 32, 0.9, (14, None, None, 112), _V100),
    _row("v100-pcie-16gb", ("Tesla V100-PCIE-16GB",), 16, 0.9, (14, None, None, 112), _V100),
    _row("v100s", ("Tesla V100S-PCIE-32GB",), 32, 1.134, (16.4, None, None, 130), _V100),
    _row("t4", ("Tesla T4",), 16, 0.32, (8.1, None, None, 65), _TURING),
    _row("quadro-rtx-6000", ("Quadro RTX 6000",), 24, 0.672, (16.3, None, None, 130.5), _TURING),
    _row("titan-rtx", ("NVIDIA TITAN RTX",), 24, 0.672, (16.3, None, None, 130.5), _AMPERE),
    # The clock of the reference card. Accumulating in fp32 halves the rate of a GeForce.
    _row("rtx-2080-ti", ("NVIDIA GeForce RTX 2080 Ti",), 11, 0.616, (13.4, None, None, 53.8), _TURING),
    # The white paper describes the workstation edition. The others have as many multiprocessors at lower clocks: fp32
    # is published for each, and the tensor cores compute TF32 at twice and bf16 at four times that rate.
    _row("rtx-pro-6000", (_PRO_6000.format("Workstation"),), 96, 1.792, (126, 251.9, 503.8, 503.8), _BLACKWELL_PRO),
    _row("rtx-pro-6000-max-q", (_PRO_6000.format("Max-Q Workstation"),), 96, 1.792, (110, 220, 440, 440), _PRO_SHEET),
    _row("rtx-pro-6000-server", (_PRO_6000.format("Server"),), 96, 1.597, (120, 240, 480, 480), _PRO_SHEET),
    _row("rtx-6000-ada", ("NVIDIA RTX 6000 Ada Generation",), 48, 0.96, (91.1, 182.1, 364.2, 364.2), _ADA),
    # 427.6 sparse TFLOP/s of fp8 are 213.8 dense, of which bf16 reaches a half and TF32 a quarter.
    _row(
        "rtx-4000-ada",
        ("NVIDIA RTX 4000 Ada Generation",),
        20,
        0.36,
        (26.7, 53.4, 106.9, 106.9),
        "NVIDIA RTX 4000 Ada Generation data sheet",
    ),
    _row("rtx-a5000", ("NVIDIA RTX A5000",), 24, 0.768, (27.8, 55.6, 111.1, 111.1), "NVIDIA RTX A5000 data sheet"),
    _row("rtx-a6000", ("NVIDIA RTX A6000",), 48, 0.768, (38.7, 77.4, 154.8, 154.8), _AMPERE),
    # GB, GB/s, cores, boost clock in MHz. Where a card was later also sold with other memory of the same size (3060 Ti,
    # 4070), the bandwidth is that of the first.
    # The GeForce RTX 5090 D is left out on purpose: its tensor cores are slower than those of the RTX 5090 by a factor
    # that NVIDIA publishes for fp4 only. So is the GB10, of which fp4 alone is published.
    _row("rtx-5090", ("NVIDIA GeForce RTX 5090",), 32, 1.792, (104.8, 104.8, 209.5, 209.5), _BLACKWELL),
    _geforce("5080", 16, 960, 10752, 2617),
    _geforce("5070 Ti", 16, 896, 8960, 2452),
    _geforce("5070", 12, 672, 6144, 2512),
    _geforce("5060 Ti", 16, 448, 4608, 2572, "rtx-5060-ti-16gb"),
    _geforce("5060 Ti", 8, 448, 4608, 2572, "rtx-5060-ti-8gb"),
    _geforce("5060", 8, 448, 3840, 2497),
    _geforce("5050", 8, 320, 2560, 2572),
    _row("rtx-4090", ("NVIDIA GeForce RTX 4090",), 24, 1.008, (82.6, 82.6, 165.2, 165.2), _ADA),
    _geforce("4090 D", 24, 1008, 14592, 2520),
    _geforce("4080 SUPER", 16, 736, 10240, 2550),
    _geforce("4080", 16, 716.8, 9728, 2505),
    _geforce("4070 Ti SUPER", 16, 672, 8448, 2610),
    _geforce("4070 Ti", 12, 504, 7680, 2610),
    _geforce("4070 SUPER", 12, 504, 7168, 2475),
    _geforce("4070", 12, 504, 5888, 2475),
    _geforce("4060 Ti", 16, 288, 4352, 2535, "rtx-4060-ti-16gb"),
    _geforce("4060 Ti", 8, 288, 4352, 2535, "rtx-4060-ti-8gb"),
    _geforce("4060", 8, 272, 3072, 2460),
    _geforce("3090 Ti", 24, 1008, 10752, 1860),
    _row("rtx-3090", ("NVIDIA GeForce RTX 3090",), 24, 0.936, (35.6, 35.6, 71, 71), _AMPERE),
    _geforce("3080 Ti", 12, 912, 10240, 1665),
    _geforce("3080", 12, 912, 8960, 1710, "rtx-3080-12gb"),
    _geforce("3080", 10, 760, 8704, 1710, "rtx-3080-10gb"),
    _geforce("3070 Ti", 8, 608, 6144, 1770),
    _geforce("3070", 8, 448, 5888, 1725),
    _geforce("3060 Ti", 8, 448, 4864, 1665),
    _geforce("3060", 12, 360, 3584, 1777, "rtx-3060-12gb"),
    _geforce("3060", 8, 240, 3584, 1777, "rtx-3060-8gb"),
    _geforce("3050", 8, 224, 2560, 1777),
    # CDNA 4 dropped TF32; CDNA 2 never had it. An MI350X is an MI355X at 2.2 GHz in place of 2.4.
    _row("mi355x", ("AMD Instinct MI355X",), 288, 8.0, (157.3, None, 2516.6, 2516.6), _MI350),
    _row("mi350x", ("AMD Instinct MI350X",), 288, 8.0, (144.2, None, 2306.9, 2306.9), _MI350),
    _row("mi325x", ("AMD Instinct MI325X",), 256, 6.0, (163.4, 653.7, 1307.4, 1307.4), _MI325),
    _row("mi300x", _MI300X_NAMES, 192, 5.3, (163.4, 653.7, 1307.4, 1307.4), _MI300),
    _row("mi300a", ("AMD Instinct MI300A",), 128, 5.3, (122.6, 490.3, 980.6, 980.6), _MI300A),
    # "AMD Instinct MI250X/MI250", which some drivers report for both, is left out on purpose: they differ by 6 %.
    _row("mi250x", ("AMD Instinct MI250X",), 64, 1.6384, (47.85, None, 191.5, 191.5), f"{_MI200}, per die"),
    _row("mi210", ("AMD Instinct MI210",), 64, 1.6384, (45.3, None, 181, 181), _MI200),
    # RDNA 3 has no matrix instructions for fp32; those for bf16 are as fast as those for fp16 (AMD GPUOpen, "How to
    # accelerate AI applications on RDNA 3 using WMMA").
    _row(
        "rx-7900-xtx",
        ("AMD Radeon RX 7900 XTX",),
        24,
        0.96,
        (61.4, None, 122.8, 122.8),
        "AMD Radeon RX 7900 XTX specifications",
    ),
)

_BY_NAME: dict[str, list[Accelerator]] = {}
for _listed in ACCELERATORS:
    for _name in _listed.names:
        _BY_NAME.setdefault(_normalised(_name), []).append(_listed)
_BY_KEY = {row.key: row for row in ACCELERATORS}

_CAPABILITIES: dict[tuple[int, int], tuple[str, ...]] = {
    (7, 0): ("v100-32gb", "v100-16gb", "v100-pcie-32gb", "v100-pcie-16gb", "v100s"),
    (7, 5): ("t4", "quadro-rtx-6000", "titan-rtx", "rtx-2080-ti"),
    (8, 0): ("a100-80gb", "a100-40gb", "a100-pcie-80gb", "a100-pcie-40gb", "a800-80gb", "a800-pcie-80gb", "a30"),
    (8, 6): ("a40", "a16", "a10", "a10g", "a2", "rtx-a6000", "rtx-a5000"),
    (8, 9): ("l40s", "l40", "l4", "rtx-6000-ada", "rtx-4000-ada"),
    (9, 0): (
        "gh200-144gb",
        "gh200",
        "h200",
        "h200-nvl",
        "h100",
        "h100-pcie",
        "h100-nvl",
        "h800",
        "h800-pcie",
        "h20",
        "h20-3e",
    ),
    (10, 0): ("b200", "gb200"),
    (10, 3): ("b300", "gb300"),
    (12, 0): ("rtx-pro-6000", "rtx-pro-6000-max-q", "rtx-pro-6000-server"),
}
_CAPABILITY = {key: capability for capability, keys in _CAPABILITIES.items() for key in keys}
_GEFORCE = {"rtx-30": (8, 6), "rtx-40": (8, 9), "rtx-50": (12, 0)}  # by the first characters of the key


def capability(key: str) -> tuple[int, int] | None:
    """The compute capability of an accelerator, such as (8, 0); None for AMD's accelerators.

    Source: NVIDIA, "CUDA GPU Compute Capability". Raises DeviceError if no accelerator is called `key`.
    """
    listed = find_by_key(key).key
    return _CAPABILITY.get(listed) or _GEFORCE.get(listed[: len("rtx-30")])
