from typing import Any

import pytest
from cases_made import PERCENT, case, copy, cpu, gpu, ids, kernel, only, saving, training

from gpubench.diagnosis.case import ProfileCase


def test_casts_on_a_cpu_without_bf16_go_back_to_fp32() -> None:
    rank = cpu(copies=[copy("dtype_cast", phase="forward", host=20 * PERCENT)])
    settings = training(precision="bf16", performance__cpu_threads=2)
    finding = only(case(rank, settings=settings, environment={"cpu.reduced_types": [], "cpu.usable_cores": 2}))
    assert finding.id == "casts"
    assert finding.fix == {"precision": "fp32"}
    assert "the CPU has no arithmetic in that type" in finding.evidence


def test_casts_before_the_model_are_the_datas() -> None:
    finding = only(case(gpu(copies=[copy("dtype_cast", phase="host_to_device", device=6 * PERCENT)])))
    assert "the data has another type" in finding.cause
    assert finding.fix == {}


def test_casts_within_the_model_are_the_models_and_some_are_expected() -> None:
    finding = only(case(gpu(copies=[copy("dtype_cast", phase="forward", device=5 * PERCENT)])))
    assert "autocast" in finding.cause
    assert ids(case(gpu(copies=[copy("dtype_cast", phase="forward", device=5 * PERCENT - 1)]))) == []


def test_conversions_in_the_optimizer_are_the_optimizers() -> None:
    assert ids(case(gpu(copies=[copy("dtype_cast", phase="optimizer", device=9 * PERCENT)]))) == []


def rearranged(part: int, **settings: Any) -> ProfileCase:
    return case(cpu(copies=[copy("layout_change", host=part)]), settings=training(**settings))


def test_batches_that_channels_last_rearranges_are_left_as_they_are() -> None:
    finding = only(rearranged(4 * PERCENT, performance__channels_last=True))
    assert (finding.id, finding.fix) == ("layout-of-batches", {"performance.channels_last": False})
    assert saving(finding) == pytest.approx(0.04)
    assert only(rearranged(4 * PERCENT, performance__channels_last=False)).fix == {}
    assert ids(rearranged(PERCENT - 1, performance__channels_last=True)) == []


def test_copies_into_another_layout_within_the_model_are_its_own_code() -> None:
    def within(part: int) -> ProfileCase:
        return case(gpu(copies=[copy("layout_change", phase="forward", device=part, where="net.py:20")]))

    finding = only(within(6 * PERCENT))
    assert finding.id == "layout-in-model"
    assert finding.evidence == ["aten::copy_: 1 time a step in forward, 6 ms a step (6 %) at net.py:20"]
    assert ids(within(5 * PERCENT - 1)) == []


def converting(part: int, **settings: Any) -> ProfileCase:
    kernels = [kernel("void cudnn::ops::nchwToNhwcKernel<__half, __half, float>", part)]
    return case(gpu(kernels=kernels), settings=training(precision="bf16", **settings))


def test_convolutions_that_convert_their_tensors_want_channels_last() -> None:
    finding = only(converting(2 * PERCENT, performance__channels_last=False))
    assert (finding.id, finding.fix) == ("nchw-convolutions", {"performance.channels_last": True})
    assert ids(converting(PERCENT - 1, performance__channels_last=False)) == []


def test_sharded_parameters_are_not_asked_for_another_layout() -> None:
    sharded = converting(2 * PERCENT, performance__channels_last=False, distributed__strategy="fsdp2")
    assert only(sharded).fix == {}


def test_convolutions_of_miopen_are_told_what_pytorch_needs_to_pass_nhwc_on() -> None:
    kernels = [kernel("batched_transpose_32x16_half", 3 * PERCENT), kernel("batched_transpose_16x32_half", 2 * PERCENT)]
    finding = only(case(gpu(kernels=kernels, device_name="AMD Instinct MI300X")))
    assert finding.id == "nchw-convolutions"
    assert saving(finding) == pytest.approx(0.05)
    assert "MIOpen computes these convolutions in NHWC" in finding.cause
    assert "PYTORCH_MIOPEN_SUGGEST_NHWC=1" in finding.advice
    assert "MIOPEN" not in only(converting(2 * PERCENT)).advice


def test_products_that_transpose_their_tensors_are_no_convolutions() -> None:
    def transposing(operator: str) -> list[str]:
        return ids(case(gpu(kernels=[kernel("batched_transpose_64x64", 3 * PERCENT, operator=operator)])))

    assert transposing("aten::mm") == []
    for operator in ("", "aten::miopen_convolution", "aten::convolution_backward", "Torch-Compiled Region: 0/0"):
        assert transposing(operator) == ["nchw-convolutions"]
