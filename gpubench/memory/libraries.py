"""The memory that CUDA and its libraries use outside of PyTorch's allocator. All sizes are in bytes.

It is that of the workspaces of cuBLAS and of the CUDA context. cuBLAS has a workspace for each handle on each
stream, and keeps it until the end of the process. Each thread has its own handle: the thread of the forward pass, and
the thread in which autograd runs the backward pass. From PyTorch 2.15 on, each product allocates and frees a workspace.
"""

from gpubench.units import MIB

HANDLES = 2
"""The number of cuBLAS handles of a training step on one stream; a forward pass alone needs one.

A snapshot of a training step on a Hopper shows two blocks of 33,554,432 bytes, and one of a forward pass shows one.
"""

CONTEXT = 750 * MIB
"""The assumed memory of a process outside the allocator. It depends on the GPU, the driver and the loaded kernels.

It is what the training of GPT-2 was measured to take on an H100 with PyTorch 2.11 and CUDA 13. ResNet-18, for which
cuDNN loads kernels too, took 1.42 GiB there. Users have reported less for a context with few kernels: 287 MB after one
(PyTorch pull request 86509), and 426 MiB on an RTX 6000 Ada with PyTorch 2.10 (unsloth-zoo pull request 1053).
"""

_OLDER = 2 * 4096 * 1024 + 8 * 16 * 1024
_HOPPER = 32 * MIB
_HOPPER_AND_LATER = (9, 10, 12)  # major versions
_HIPBLASLT = 76 * MIB


def blas_workspace(capability: tuple[int, int] | None) -> int:
    """The size of cuBLAS's workspace for one handle on one stream; a capability of None stands for AMD.

    It is 32 MiB from Hopper on. Before Hopper it is two times 4096 KiB and eight times 16 KiB, which is 8,519,680
    bytes. cuBLASLt shares it. Source: aten/src/ATen/cuda/CublasHandlePool.cpp of PyTorch 2.13, parseChosenWorkspaceSize
    and unified_cublas_and_lt_workspaces. Before pull requests 175344 and 175879 of early 2026, Blackwell had the older
    size, and cuBLASLt a workspace of 1 MiB of its own. The environment variable CUBLAS_WORKSPACE_CONFIG, which changes
    the size, is not considered.

    On AMD hipBLASLt uses 76 MiB (parseCUDABlasLtWorkspaceSize). A product that rocBLAS computes needs another one of 32
    MiB, or of 128 MiB on an MI300 and later, which is not included.
    """
    if capability is None:
        return _HIPBLASLT
    return _HOPPER if capability[0] in _HOPPER_AND_LATER else _OLDER
