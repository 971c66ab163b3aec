"""What keeps the fused kernels of scaled_dot_product_attention from a call, as far as its inputs tell.

Source: PyTorch's own conditions, in aten/src/ATen/native/transformers/sdp_utils_cpp.h and cuda/sdp_utils.cpp (2.13).
What they look at besides, as which backends are enabled, is not in a trace.
"""

from collections.abc import Iterator

from gpubench.hardware import AMPERE
from gpubench.trace.columns import DeviceProperties, Signature
from gpubench.trace.tensors import Tensor, flag, tensor

QUERY, KEY, VALUE, MASK, DROPOUT, CAUSAL = range(6)
GQA = 8  # of the math backend's operator; scaled_dot_product_attention itself has no dropout_mask before scale

HALF = ("float16", "bfloat16")
LARGEST_HEAD = 256
FLASH, EFFICIENT, CPU = "flash attention", "memory-efficient attention", "the fused kernel for CPUs"


def obstacles(signature: Signature, device: DeviceProperties | None, *, on_cpu: bool) -> list[str]:
    """A sentence for each condition that the inputs of a call are known to miss; empty where shapes were not recorded.

    signature: of aten::_scaled_dot_product_attention_math. device: the GPU, None where it is not described.
    """
    query, key, value = (tensor(signature, place) for place in (QUERY, KEY, VALUE))
    if query is None or key is None or value is None:
        return []
    found = list(_of_any(signature, query, key, value))
    if any(len(one.shape) != 4 for one in (query, key, value)):
        return found
    mask = tensor(signature, MASK)
    if on_cpu:
        return [*found, *_on_cpu(signature, query, key, value, mask)]
    rocm = device is not None and device.name.startswith("AMD")
    capability = device.compute_capability if device is not None and not rocm else None
    found += _of_flash(signature, query, key, value, mask, capability)
    return [*found, *_of_efficient(query, key, value, mask, capability)]


def _of_any(signature: Signature, query: Tensor, key: Tensor, value: Tensor) -> Iterator[str]:
    shapes = " ".join(str(list(one.shape)) for one in (query, key, value))
    if any(len(one.shape) != 4 for one in (query, key, value)):
        yield f"every fused kernel takes inputs of 4 dimensions, [batch, heads, length, head size]; these are {shapes}"
        return
    if len({one.shape[0] for one in (query, key, value)}) > 1:
        yield f"every fused kernel takes one batch size for queries, keys and values; these are {shapes}"
    if len({one.shape[1] for one in (query, key, value)}) > 1 and flag(signature, GQA) is False:
        yield f"without enable_gqa every fused kernel takes as many heads of keys as of queries; these are {shapes}"
    if any(one.strides and one.strides[-1] != 1 and one.shape[-1] > 1 for one in (query, key, value)):
        yield "every fused kernel takes inputs whose last dimension is contiguous (stride 1)"


def _of_flash(
    signature: Signature,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    capability: tuple[int, int] | None,
) -> Iterator[str]:
    if mask is not None:
        yield f"{FLASH} takes no attn_mask, and one of {list(mask.shape)} ({mask.dtype}) was given"
    if query.dtype not in HALF:
        yield f"{FLASH} takes float16 and bfloat16, not {query.dtype}"
    heads = sorted({one.shape[-1] for one in (query, key, value)})
    if len(heads) > 1:
        yield f"{FLASH} takes one head size, not {' and '.join(map(str, heads))}"
    elif heads[0] > LARGEST_HEAD:
        yield f"{FLASH} takes head sizes up to {LARGEST_HEAD}, not {heads[0]}"
    if flag(signature, CAUSAL) and query.shape[-2] != key.shape[-2]:
        yield f"{FLASH} takes is_causal for as many queries as keys, not for {query.shape[-2]} and {key.shape[-2]}"
    if capability is not None and capability < AMPERE:
        yield f"{FLASH} needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"


def _of_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, capability: tuple[int, int] | None
) -> Iterator[str]:
    if query.dtype not in (*HALF, "float32"):
        yield f"{EFFICIENT} takes float16, bfloat16 and float32, not {query.dtype}"
        return
    old = capability is not None and capability < AMPERE
    if query.dtype == "bfloat16" and old:
        yield f"{EFFICIENT} takes bfloat16 from compute capability 8.0 on"
        return
    if query.shape[-1] != key.shape[-1]:
        yield f"{EFFICIENT} takes one head size for queries and keys, not {query.shape[-1]} and {key.shape[-1]}"
    multiple = 8 if query.dtype in HALF else 1 if old else 4
    odd = sorted({one.shape[-1] for one in (query, value) if one.shape[-1] % multiple})
    if odd:
        yield f"{EFFICIENT} takes head sizes that are multiples of {multiple} in {query.dtype}, not {odd[0]}"
    if mask is not None and mask.strides and mask.strides[-1] != 1:
        yield f"{EFFICIENT} takes masks whose last dimension is contiguous (stride 1)"


def _on_cpu(signature: Signature, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Iterator[str]:
    dropout = _number(signature, DROPOUT)
    if dropout is not None and dropout > 0:
        yield f"{CPU} takes no dropout, and dropout_p is {dropout:g}"
    if len({one.shape[-1] for one in (query, key, value)}) > 1:
        yield f"{CPU} takes one head size for queries, keys and values"
    if mask is not None and not _is_broadcast(mask, query, key):
        yield f"{CPU} takes masks of 2 or 4 dimensions that broadcast to the scores, not {list(mask.shape)}"


def _is_broadcast(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    scores = (*query.shape[:2], query.shape[-2], key.shape[-2])
    if len(mask.shape) not in (2, 4):
        return False
    return all(size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(scores), strict=False))


def _number(signature: Signature, argument: int) -> float | None:
    try:
        return float(str(signature.concrete[argument]))
    except (IndexError, ValueError):
        return None
