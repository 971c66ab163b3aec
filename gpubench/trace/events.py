"""One event of a Chrome trace, as far as it is read; format: "Trace Event Format" by the Chromium project.

The keys of `args` are those of libkineto's output_json.cpp, and those of the profiler before it (2021).
"""

import re
from decimal import Decimal
from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType, field

from gpubench.trace.columns import HostKind, WorkKind

HOST_KINDS = {
    "cpu_op": HostKind.OPERATOR,
    "operator": HostKind.OPERATOR,
    "user_annotation": HostKind.ANNOTATION,
    "python_function": HostKind.PYTHON,
    "cuda_runtime": HostKind.RUNTIME,
    "cuda_driver": HostKind.RUNTIME,
    "hip_runtime": HostKind.RUNTIME,
    "xpu_runtime": HostKind.RUNTIME,
    "xpu_driver": HostKind.RUNTIME,
    "mtia_runtime": HostKind.RUNTIME,
    "privateuse1_runtime": HostKind.RUNTIME,
    "privateuse1_driver": HostKind.RUNTIME,
    "runtime": HostKind.RUNTIME,
}
"""By category, in lower case: old traces write Operator and Runtime."""

WORK_KINDS = {
    "kernel": WorkKind.KERNEL,
    "gpu_memcpy": WorkKind.COPY,
    "memcpy": WorkKind.COPY,
    "gpu_memset": WorkKind.SET,
    "memset": WorkKind.SET,
}

LEFT_OUT = frozenset({
    "trace", "overhead", "gpu_user_annotation", "external_correlation", "cpu_instant_event", "cuda_sync", "cuda_event",
    "cuda_profiler_range", "xpu_sync", "ac2g", "async_cpu_to_gpu", "fwdbwd",
})  # fmt: skip
"""Categories of torch.profiler that say nothing more of what was done, in lower case. Others are of devices that are
not read: mtia_ccp_events, hpu_op and what a PrivateUse1 backend calls its own."""

OF_DEVICES = re.compile(r"(?i)(mtia|hpu|xpu|privateuse1|glow|mlu|gcu|npu|musa)_|collective_comm$")
"""Categories that torch.profiler and its backends write for devices, those among them that are not read included."""

ANNOTATIONS = ("ProfilerStep#", "enumerate(DataLoader)", "Optimizer.step#", "Optimizer.zero_grad#")
"""How names of annotations begin that old traces call operators."""


ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
}
"""By c10::ScalarType, as collectives name their type."""


class Args(Struct, gc=False):
    name: Any = None
    """Of a process, in metadata."""
    external: int | None = field(default=None, name="External id")
    """Of an operator or an annotation: no two have the same."""
    python: int | None = field(default=None, name="Python id")
    """The same of a call of a Python function."""
    correlation: int | None = None
    stream: int | None = None
    device: int | None = None
    bytes: int | None = None
    grid: Any = None
    """Three integers; at operators that Triton compiled, a text."""
    block: Any = None
    sequence: int | None = field(default=None, name="Sequence number")
    forward_thread: int | None = field(default=None, name="Fwd thread id")
    dims: Raw | UnsetType = field(default=UNSET, name="Input Dims")
    types: Raw | UnsetType = field(default=UNSET, name="Input type")
    strides: Raw | UnsetType = field(default=UNSET, name="Input Strides")
    concrete: Raw | UnsetType = field(default=UNSET, name="Concrete Inputs")
    stack: str | None = field(default=None, name="Call stack")
    collective: Any = field(default=None, name="Collective name")
    """As "allreduce", at kernels of collectives; so are the three below, of this rank's part."""
    elements_in: int | None = field(default=None, name="In msg nelems")
    elements_out: int | None = field(default=None, name="Out msg nelems")
    dtype: Any = None


class Event(Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = -1.0
    dur: float = 0.0
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """For times that a float cannot hold to the nanosecond."""

    ts: Decimal = Decimal(-1)  # type: ignore[assignment]
    dur: Decimal = Decimal(0)  # type: ignore[assignment]
