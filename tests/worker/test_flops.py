"""FLOP counts against closed forms written out by hand, and the measured ceiling against a clock that is known."""

import time

import pytest
import torch

from gpubench.settings.sections import DataSettings, ModelSettings
from gpubench.worker import compute_rates
from gpubench.worker.compute_rates import FlopCount, count_flops, measure_peak, settled
from gpubench.worker.models import build

torch.set_num_threads(1)


def _count(name: str, batch_size: int, sequence_length: int | None = None) -> FlopCount:
    workload = build(ModelSettings(name=name), DataSettings(sequence_length=sequence_length), seed=0)
    assert workload.make_batch is not None
    batch = workload.make_batch(batch_size)

    def step() -> None:
        workload.loss(workload.module, batch).backward()

    return count_flops(step)


def _gpt2_forward(batch: int, tokens: int, width: int, layers: int, vocabulary: int) -> int:
    """Linear layers do 2 x in x out per token; attention Q @ K^T and P @ V over all heads, masked half included."""
    block = width * 3 * width + width * width + width * 4 * width + 4 * width * width
    attention = 2 * 2 * batch * width * tokens * tokens  # heads x head width = width
    return 2 * batch * tokens * (layers * block + width * vocabulary) + layers * attention


@pytest.mark.parametrize(
    ("name", "batch", "tokens", "width", "layers", "vocabulary"),
    [("gpt2-tiny", 3, 32, 32, 2, 256), pytest.param("gpt2", 1, 64, 768, 12, 50257, marks=pytest.mark.stress)],
)
def test_gpt2_counts_three_times_its_forward(
    name: str, batch: int, tokens: int, width: int, layers: int, vocabulary: int
) -> None:
    # Backward = 2 x forward exactly: the input of the first linear layer comes from an embedding, and needs a gradient.
    assert _count(name, batch, tokens).total == 3 * _gpt2_forward(batch, tokens, width, layers, vocabulary)


def test_llama_counts_queries_of_all_heads_though_they_share_keys() -> None:
    batch, tokens, width, inner, layers, vocabulary = 2, 32, 32, 64, 2, 256
    block = width * width + 2 * width * (width // 2) + width * width + 3 * width * inner
    attention = 2 * 2 * batch * width * tokens * tokens
    forward = 2 * batch * tokens * (layers * block + width * vocabulary) + layers * attention
    assert _count("llama-tiny", batch, tokens).total == 3 * forward


def _resnet50_macs() -> tuple[int, int]:
    """Multiply-adds of a 224 x 224 image: (all, the first convolution's). He 2015, the stride in the 3x3 (v1.5)."""
    stem = 7 * 7 * 3 * 64 * 112 * 112
    total, width, side = stem, 64, 56
    for blocks, inner in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            out_side = side // 2 if block == 0 and inner > 64 else side
            total += width * inner * side**2 + 9 * inner * inner * out_side**2 + inner * 4 * inner * out_side**2
            if block == 0:
                total += width * 4 * inner * out_side**2
            width, side = 4 * inner, out_side
    return total + 2048 * 1000, stem


def test_resnet50_counts_three_times_its_forward_less_the_gradient_of_the_image() -> None:
    macs, stem = _resnet50_macs()
    assert macs == 4_089_184_256
    with torch.device("meta"):
        assert _count("resnet50", 2).total == 2 * 2 * (3 * macs - stem)


def test_the_count_does_not_depend_on_the_attention_kernel() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = _count("gpt2-tiny", 2)
    fused = _count("gpt2-tiny", 2)
    assert "aten._scaled_dot_product_flash_attention_for_cpu_backward" in fused.by_operator
    assert not any("attention" in operator for operator in plain.by_operator)
    assert fused.total == plain.total


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_the_gpu_kernels_count_as_the_plain_products_do(kernel: str) -> None:
    aten = torch.ops.aten
    query, key, value, grad = (torch.empty(2, 4, 16, 8, device="meta") for _ in range(4))
    seed = torch.empty((), dtype=torch.int64, device="meta")

    def step() -> None:
        if kernel == "flash":
            out, lse, cum_q, cum_k, max_q, max_k, *_ = aten._scaled_dot_product_flash_attention(query, key, value)
            aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, 0.0, False, seed, seed
            )
        else:
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
            aten._scaled_dot_product_efficient_attention_backward(
                grad, query, key, value, None, out, lse, seed, seed, 0.0, [True, True, True, False]
            )

    assert count_flops(step).total == 6 * (2 * 2 * 4 * 16 * 16 * 8)  # 2 products forward, 4 backward


def test_operators_sum_to_the_total() -> None:
    count = _count("resnet-tiny", 2)
    assert set(count.by_operator) == {"aten.convolution", "aten.convolution_backward", "aten.addmm", "aten.mm"}
    assert sum(count.by_operator.values()) == count.total


def test_a_step_without_products_counts_zero() -> None:
    assert count_flops(lambda: None) == FlopCount(0, {})


def test_the_peak_is_the_rate_after_the_clock_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    products = 0
    clock = 0.0

    def mm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        nonlocal products, clock
        products += 1
        clock += 0.01 if products <= 12 else 0.02
        return out

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    peak = measure_peak(torch.device("cpu"), torch.float32, seconds=0.5)
    # Of 3 products to warm up, 3 to calibrate and 1 in each block, the first 12 run at the higher clock.
    assert products == 3 + 3 + 14
    assert peak.flops_per_s == pytest.approx(2 * 1024**3 / 0.02)


@pytest.mark.parametrize(
    ("times", "blocks", "duration"),
    [
        ([1.0] * 50, 10, 1.0),
        ([0.8, 0.9, 1.0, 1.0, 1.3] + [1.0] * 45, 10, 1.0),
        ([0.7] * 6 + [1.0] * 44, 14, 1.0),
        ([1.05**number for number in range(50)], 50, 1.05**47),
    ],
    ids=["steady", "one slow block", "a burst", "never"],
)
def test_blocks_run_until_their_times_have_settled(times: list[float], blocks: int, duration: float) -> None:
    left = iter(times)
    assert settled(lambda: next(left)) == pytest.approx(duration)
    assert len(list(left)) == 50 - blocks


@pytest.mark.parametrize(
    ("dtype", "supported", "size"),
    [
        (torch.float32, False, 1024),
        (torch.bfloat16, True, 1024),
        (torch.bfloat16, False, 256),
        (torch.float16, True, 256),
    ],
)
def test_products_of_a_type_that_the_cpu_emulates_are_small(
    dtype: torch.dtype, supported: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied = []

    def mm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        multiplied.append((left.shape, right.shape))
        return out

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(compute_rates, "_has_bfloat16", lambda: supported)
    assert measure_peak(torch.device("cpu"), dtype, seconds=0).size == size
    assert set(multiplied) == {((size, size), (size, size))}


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_the_peak_is_measured_without_touching_the_random_state(dtype: torch.dtype, name: str) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    peak = measure_peak(torch.device("cpu"), dtype, seconds=0.01)
    assert torch.equal(before, torch.get_rng_state())
    assert peak.dtype == name
    assert 0 < peak.flops_per_s < 1e15


@pytest.mark.gpu
@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_a_gpu_is_that_of_a_gpu() -> None:
    peak = measure_peak(torch.device("cuda", 0), torch.bfloat16)
    assert peak.size == 8192
    assert 1e12 < peak.flops_per_s < 1e16
