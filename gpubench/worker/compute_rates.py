"""Measurements outside the training loop: the FLOPs of a step, the peak rate of the device, the reference workload."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class FlopCount:
    """The floating-point operations of one step; a multiply-add counts as two. `by_operator` sums to `total`."""

    total: int
    by_operator: dict[str, int]


@dataclass(frozen=True)
class MeasuredPeak:
    """The sustained FLOP/s of a product of two `size` x `size` matrices; `dtype` is a name such as "bfloat16"."""

    flops_per_s: float
    size: int
    dtype: str


def _attention_forward(query: list[int], key: list[int], value: list[int], *_: Any, **__: Any) -> int:
    """FLOPs of Q @ K^T and P @ V for shapes (batch, heads, tokens, width), whatever the mask."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(_: list[int], query: list[int], key: list[int], value: list[int], *__: Any, **___: Any) -> int:
    """FLOPs of the gradients of Q, K, V and P, without the scores that fused kernels recompute."""
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
    """Runs `step`, one forward and backward pass, and counts the FLOPs of its products, convolutions and attention.

    The counts are those of PyTorch's FlopCounterMode, except for the fused attention kernels, so that the result does
    not depend on the kernel: PyTorch counts 0 for the CPU's flash kernel, and for the GPU's it counts the recomputed
    scores in the backward pass. The result is the number of *model* FLOPs: the backward pass has twice those of the
    forward pass, except for the input gradient of the first layer. Element-wise operators, normalisation and the
    optimizer are not counted, as is usual for MFU.

    `step` should run the plain module. With activation checkpointing the recomputation is counted too, and kernels that
    torch.compile generates are not counted.
    """
    with FlopCounterMode(display=False, custom_mapping=_FUSED_ATTENTION) as counter:
        step()
    counts = counter.get_flop_counts().get("Global", {})
    return FlopCount(counter.get_total_flops(), {str(operator): count for operator, count in counts.items()})


WINDOW = 5
"""The number of blocks whose median is compared with that of as many before them."""
SETTLED = 0.01
"""The largest relative difference of the two medians once the clock has settled."""
MOST_BLOCKS = 50


def measure_peak(device: torch.device, dtype: torch.dtype, seconds: float | None = None) -> MeasuredPeak:
    """Measures the rate that a square matrix product of type `dtype` sustains, in at most about `seconds` seconds.

    The products of two n x n matrices, of 2n^3 FLOPs each, run in uninterrupted blocks until their times have settled:
    a GPU begins at a higher clock than the one that its power limit lets it keep. n is 8192 on CUDA, 1024 on a CPU, and
    256 on a CPU for a type that it emulates: fp16, and bf16 where oneDNN does not support it. By default it takes 5 s
    at most on CUDA, and 1 s on a CPU. The matrices are random, because with zeros a GPU uses less power and runs at a
    higher clock. TF32 is used if it is enabled in the process. The global random state does not change.
    """
    emulated = dtype is torch.float16 or (dtype is torch.bfloat16 and not _has_bfloat16())
    size = 8192 if device.type == "cuda" else 256 if emulated else 1024
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    on_cuda = device.type == "cuda"
    duration = _cuda_duration if on_cuda else _cpu_duration
    duration(device, products, 3)  # warm-up: library handles, workspaces
    limit = (5.0 if on_cuda else 1.0) if seconds is None else seconds
    count = max(1, round(limit / MOST_BLOCKS / (duration(device, products, 3) / 3)))
    sustained = settled(lambda: duration(device, products, count))
    return MeasuredPeak(2 * size**3 * count / sustained, size, str(dtype).removeprefix("torch."))


def settled(block: Callable[[], float]) -> float:
    """The duration of a block once it has settled: the median of the last WINDOW blocks.

    It has settled when that differs from the median of the WINDOW blocks before by at most SETTLED. After MOST_BLOCKS
    blocks it is taken as it is.
    """
    times: list[float] = []
    while len(times) < MOST_BLOCKS:
        times.append(block())
        before, now = times[-2 * WINDOW : -WINDOW], times[-WINDOW:]
        if len(before) == WINDOW and abs(median(now) / median(before) - 1) <= SETTLED:
            break
    return median(times[-WINDOW:])


def _has_bfloat16() -> bool:
    """Whether this CPU has quick products of bf16. Without them, one of 1024 x 1024 matrices takes seconds."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _cuda_duration(device: torch.device, products: Callable[[int], None], count: int) -> float:
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    products(count)
    end.record(stream)
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _cpu_duration(_: torch.device, products: Callable[[int], None], count: int) -> float:
    start = time.perf_counter()
    products(count)
    return time.perf_counter() - start


PRODUCTS = 4
SIDE = 256
COPIED = 4_000_000  # 16 MB of fp32, more than most caches hold


def time_reference_workload(seconds: float = 0.1) -> float:
    """The mean time of one pass of the reference workload in seconds, measured for about `seconds`.

    One pass consists of PRODUCTS fp32 products of SIDE x SIDE matrices and a copy of COPIED numbers. The mean, unlike
    the minimum, shows the load by other processes. The function draws no random numbers, which would change the run.
    """
    matrix, numbers = torch.full((SIDE, SIDE), 1.0 / SIDE), torch.ones(COPIED)
    _work(matrix, numbers)
    count, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or not count:
        _work(matrix, numbers)
        count += 1
    return elapsed / count


def _work(matrix: torch.Tensor, numbers: torch.Tensor) -> None:
    for _ in range(PRODUCTS):
        matrix @ matrix
    numbers.clone()
