"""Tells what a kernel computes, from its name, and shortens that name."""

import re
from functools import cache
from typing import Literal

Family = Literal["elementwise", "copy", "reduction", "normalisation", "softmax", "product", "attention", "other"]
"""What a kernel computes. The first five do so little arithmetic per byte that they are memory-bound on any GPU."""

MOVES_MEMORY: frozenset[Family] = frozenset({"elementwise", "copy", "reduction", "normalisation", "softmax"})

# The first pattern that matches counts: names of matrix products and fused attention also contain softmax, bias or
# reduce. Kernels of torch.compile (triton_) and of foreach (multi_tensor_apply) are fused already; layout
# conversions around convolutions are not the program's own work.
_FAMILIES: tuple[tuple[Family, str], ...] = (
    (
        "other",
        r"^triton_|multi_tensor|(?i:topk|sort|scan)|(?i:nchw|nhwc)to|batched_transpose|nccl|rccl",
    ),
    ("attention", r"(?i)flash|fmha|attn_(fwd|bwd)|(fwd|bwd)_attn|attention|aotriton|efficient_attn"),
    (
        "product",
        r"(?i)(?<!fb)gemm|gemv|^Cijk_|^nvjet|matmul|tensorop|splitk|dot_kernel|conv(?!ert)|scudnn|cudnn.*engine|winograd"
        r"|fprop|dgrad|wgrad|^miopenSp3|igemm|^bmm_|fused_moe",
    ),
    ("softmax", r"(?i)soft_?max"),
    (
        "normalisation",
        r"(?i)(layer|batch|group|instance|rms)_?norm|cudnn.*bn_[fb]w|RowwiseMoments|ComputeFusedParams|GammaBeta"
        r"|MIOpenBatchNorm|l2_?norm",
    ),
    ("copy", r"(?i)copy|^CatArray|[^a-z]Cat(Array|_)|index|gather|scatter|permute|transpose|embedding"),
    ("reduction", r"(?i)reduce"),
    (
        "elementwise",
        r"(?i)elementwise|pointwise|dropout|where_|FillFunctor|activation|silu|gelu|swiglu|rotary|rope_|threshold"
        r"|OpTensor|op_tensor|bias_add|add_bias",
    ),
)
_COMPILED = tuple((family, re.compile(pattern)) for family, pattern in _FAMILIES)


@cache
def family(kernel: str) -> Family:
    """What a kernel computes, from its name; "other" if unknown."""
    name = kernel.removeprefix("void ")
    return next((family for family, pattern in _COMPILED if pattern.search(name)), "other")


_GENERATED = re.compile(r"triton_|.*multi_tensor")


def is_unknown(kernel: str) -> bool:
    """Whether the name says nothing of what the kernel computes. Those of torch.compile and of foreach compute."""
    name = kernel.removeprefix("void ")
    return family(name) == "other" and not _GENERATED.match(name)


def kernel_name(signature: str) -> str:
    """Returns a kernel's C++ signature without return type and parameters."""
    name = signature.removeprefix("void ")
    if not name.endswith(")"):
        return name
    depth = 0
    for place in reversed(range(len(name))):
        depth += {")": 1, "(": -1}.get(name[place], 0)
        if not depth:
            return name[:place] if place and name[place - 1] != " " else name
    return name
