"""How much arithmetic a step does, and how fast the device can do arithmetic at all: the two numbers behind MFU."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of one step, a multiply-add being two; `by_operator` sums to `total`."""

    total: int
    by_operator: dict[str, int]


@dataclass(frozen=True)
class MeasuredPeak:
    """The rate that a `size` x `size` x `size` matrix product reached, in FLOP/s; `dtype` as in "bfloat16"."""

    flops_per_s: float
    size: int
    dtype: str


def _attention_forward(query: list[int], key: list[int], value: list[int], *_: Any, **__: Any) -> int:
    """Q @ K^T and P @ V over shapes (batch, heads, tokens, width). Causal masks are not discounted."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(_: list[int], query: list[int], key: list[int], value: list[int], *__: Any, **___: Any) -> int:
    """Gradients of Q, K, V and P: twice the forward, without the scores that fused kernels recompute."""
    return 2 * _attention_forward(query, key, value)


_FUSED_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention: _attention_forward,
    torch.ops.aten._scaled_dot_product_efficient_attention: _attention_forward,
    torch.ops.aten._scaled_dot_product_cudnn_attention: _attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def count_flops(step: Callable[[], None]) -> FlopCount:
    """Runs `step` (one forward and backward) once and counts its matrix products, convolutions and attention.

    The counts are those of PyTorch's FlopCounterMode, with one formula of our own for the fused attention kernels, so
    that the number does not depend on the kernel chosen. PyTorch has none for the CPU's flash kernel, which would
    count as 0, and for the GPU's it adds a fifth product to the backward: the scores, recomputed to save memory.
    These are *model* FLOPs: backward = 2 x forward, less the input gradient of the first layer. Element-wise work,
    normalisation and the optimizer are left out, as in every published MFU.

    `step` should run the plain module: recomputation by activation checkpointing would be counted as work, and what
    torch.compile generates would not be seen.
    """
    with FlopCounterMode(display=False, custom_mapping=_FUSED_ATTENTION) as counter:
        step()
    counts = counter.get_flop_counts().get("Global", {})
    return FlopCount(counter.get_total_flops(), {str(operator): count for operator, count in counts.items()})


def measure_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> MeasuredPeak:
    """The best sustained rate of a square matrix product of `dtype`, in about `seconds` seconds.

    An attainable ceiling, below the data sheet's: the best of five uninterrupted blocks of n x n x n products, 2n^3
    FLOPs each. n is 8192 on CUDA, 1024 on a CPU, and 256 for the CPU's fp16, which is emulated. The operands are
    random, since zeros draw less power and clock higher. TF32 applies if the process has it on. Leaves the global
    random state alone.
    """
    size = 8192 if device.type == "cuda" else 256 if dtype is torch.float16 else 1024
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    duration = _cuda_duration if device.type == "cuda" else _host_duration
    duration(device, products, 3)  # warm-up: library handles, workspaces, clocks
    blocks = 5
    count = max(1, round(seconds / blocks / (duration(device, products, 3) / 3)))
    best = min(duration(device, products, count) for _ in range(blocks))
    return MeasuredPeak(2 * size**3 * count / best, size, str(dtype).removeprefix("torch."))


def _cuda_duration(device: torch.device, products: Callable[[int], None], count: int) -> float:
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    products(count)
    end.record(stream)
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _host_duration(_: torch.device, products: Callable[[int], None], count: int) -> float:
    start = time.perf_counter()
    products(count)
    return time.perf_counter() - start
