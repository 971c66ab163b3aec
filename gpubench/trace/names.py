"""What the names in a trace mean. They come from PyTorch, from the CUDA and HIP runtimes, and from kernel libraries."""

import re
from dataclasses import dataclass
from typing import Self

import numpy as np

from gpubench.trace.columns import Mask, Trace

_DATA_LOADER = r"enumerate\(DataLoader\)"
_PROFILER_STEP = r"ProfilerStep#\d"
_OPTIMIZER = r"Optimizer\.step#"
_ZERO_GRAD = r"Optimizer\.zero_grad#"
_ALLOCATOR = (
    r"(cuda|hip)(Ext)?(Malloc|Free|HostAlloc|HostMalloc|HostFree|HostRegister|HostUnregister|Mem(Create|Map|Unmap|Release))"
    r"|(cu|hip)Mem(Alloc|Free|Create|Map|Unmap|Release|SetAccess|Address|Host)"
)
_BLOCKING = r"(cuda|cu|hip|ze)\w*Synchronize|(cuda|cu|hip)Memcpy(?!\w*Async)|ur(EventWait|QueueFinish)$"
_DEVICE_WIDE = r"(cuda|hip)DeviceSynchronize|(cu|hip)CtxSynchronize|urQueueFinish$|zeCommandQueueSynchronize"
_COMMUNICATION = r"_?c10d(_functional)?::|(nccl|rccl|gloo|mpi|ucc|xccl|hccl):|symm_mem::|ProcessGroup"
# Of these only a few keep the host: collectives on a device are enqueued, and return.
_COMMUNICATION_WAIT = (
    r"(gloo|mpi|ucc):|_?c10d(_functional)?::(wait_tensor|work_wait|barrier|monitored_barrier)|ProcessGroup\w*::?wait"
)
# Inductor names a fused kernel after the operators around it, collectives too, though it is none.
_COMMUNICATION_KERNEL = (
    r"^(?!triton_\w*fused).*("
    r"(?i:nccl|rccl|hccl|oneccl|mscclpp|nvshmem|deep_ep|multimem_|symm_mem|cross_device_reduce|quickreduce"
    r"|custom_ar(?![a-z])|(one|two)_?shot_?(all|reduce)|reduce_?scatter)"
    r"|((?<![A-Za-z])all|All|ALL)_?(?i:reduce|gather|to_?all))"
)


@dataclass(frozen=True)
class Lexicon:
    """Masks over `Trace.names`: `lexicon.blocking[trace.host.name]` is one over slices."""

    data_loader: Mask
    """Fetching a batch."""
    profiler_step: Mask
    optimizer: Mask
    zero_grad: Mask
    allocator: Mask
    """Runtime calls that bring or return memory, of the device or page-locked."""
    blocking: Mask
    """Runtime calls that return when the device is done."""
    device_wide: Mask
    """Of these, the ones that wait for all of the device, as torch.cuda.synchronize does."""
    communication_host: Mask
    communication_wait: Mask
    """Of these, the ones that return when the other ranks are done."""
    communication_kernel: Mask
    pageable_upload: Mask
    """Copies to the device from memory that is not page-locked."""
    pageable_download: Mask
    """Copies from the device to such memory: their call is a wait."""
    download: Mask
    """Copies from the device to any memory of the host."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        return cls(
            data_loader=_mask(_DATA_LOADER, trace),
            profiler_step=_mask(_PROFILER_STEP, trace),
            optimizer=_mask(_OPTIMIZER, trace),
            zero_grad=_mask(_ZERO_GRAD, trace),
            allocator=_mask(_ALLOCATOR, trace),
            blocking=_mask(_BLOCKING, trace),
            device_wide=_mask(_DEVICE_WIDE, trace),
            communication_host=_mask(_COMMUNICATION, trace),
            communication_wait=_mask(_COMMUNICATION_WAIT, trace),
            communication_kernel=_mask(_COMMUNICATION_KERNEL, trace),
            pageable_upload=_mask(r".*Memcpy.*\(Pageable -> ", trace),
            pageable_download=_mask(r".*Memcpy.*-> Pageable\)", trace),
            download=_mask(r".*(DtoH|DeviceToHost)", trace),
        )


def _mask(pattern: str, trace: Trace) -> Mask:
    match = re.compile(pattern).match
    return np.fromiter((match(name) is not None for name in trace.names), np.bool_, len(trace.names))
