"""What libraries take of a GPU's memory below the operators: cuBLAS's workspaces, and the CUDA context.

cuBLAS is given a workspace for each of its handles on each stream, and keeps it to the end of the process. Each thread
has a handle of its own: the one that runs the forward pass, and the one in which autograd runs the backward pass.
"""

from gpubench.hardware import find_by_key

MIB = 2**20

HANDLES = 2
"""In a training step on one stream; a forward pass alone makes one. A snapshot of a training step on a Hopper shows two
blocks of 33,554,432 bytes, one of a forward pass one."""

CONTEXT = 512 * MIB
"""An assumption, since it depends on the GPU, its driver and the kernels that were loaded: what a process takes outside
of the allocator. Reported were 287 MB after one kernel (PyTorch pull request 86509), about 400 MB (PyTorch issue
109888), and 426 MiB for the bare context on an RTX 6000 Ada under PyTorch 2.10 with CUDA 13 (unsloth-zoo pull request
1053), all with lazy loading; the kernels of a training step come on top."""

_OLDER = 2 * 4096 * 1024 + 8 * 16 * 1024
_HOPPER = 32 * MIB
_HOPPER_AND_LATER = (9, 10, 12)  # major versions
_HIPBLASLT = 76 * MIB

_CAPABILITIES: dict[tuple[int, int], tuple[str, ...]] = {
    (7, 0): ("v100-32gb", "v100-16gb", "v100-pcie-32gb", "v100-pcie-16gb", "v100s"),
    (7, 5): ("t4",),
    (8, 0): ("a100-80gb", "a100-40gb", "a100-pcie-80gb", "a100-pcie-40gb"),
    (8, 6): ("a40", "a10", "rtx-a6000", "rtx-3090"),
    (8, 9): ("l40s", "l40", "l4", "rtx-6000-ada", "rtx-4090"),
    (9, 0): ("gh200-144gb", "gh200", "h200", "h200-nvl", "h100", "h100-pcie", "h100-nvl"),
    (10, 0): ("b200",),
    (10, 3): ("b300",),
    (12, 0): ("rtx-pro-6000", "rtx-5090"),
}
_CAPABILITY = {key: capability for capability, keys in _CAPABILITIES.items() for key in keys}


def capability(key: str) -> tuple[int, int] | None:
    """The compute capability of an accelerator of the hardware table, as (8, 0); None for AMD's, which have none.

    Source: NVIDIA, "CUDA GPU Compute Capability". Raises DeviceError if no accelerator is called `key`.
    """
    return _CAPABILITY.get(find_by_key(key).key)


def blas_workspace(capability: tuple[int, int] | None) -> int:
    """Bytes for one handle on one stream, by compute capability; None is AMD.

    32 MiB from Hopper on; before it two times 4096 KiB and eight times 16 KiB, which is 8,519,680 bytes. Products that
    go to cuBLASLt share it. Source: aten/src/ATen/cuda/CublasHandlePool.cpp of PyTorch 2.13, parseChosenWorkspaceSize
    and unified_cublas_and_lt_workspaces. Before pull requests 175344 and 175879, of early 2026, Blackwell had the older
    size, and cuBLASLt 1 MiB of its own. CUBLAS_WORKSPACE_CONFIG in the environment changes it.

    On AMD 76 MiB, which hipBLASLt takes (parseCUDABlasLtWorkspaceSize); a product that goes to rocBLAS adds one of
    32 MiB, or 128 MiB on an MI300 and later.
    """
    if capability is None:
        return _HIPBLASLT
    return _HOPPER if capability[0] in _HOPPER_AND_LATER else _OLDER
