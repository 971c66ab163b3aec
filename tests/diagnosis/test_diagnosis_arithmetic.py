from typing import Any

import pytest
from cases_made import H100, PERCENT, V100, case, gpu, ids, kernel, only, piping, saving, training

from gpubench.diagnosis.case import ProfileCase


def multiplying(name: str, part: int = 40 * PERCENT, device: str | None = H100, **known: Any) -> ProfileCase:
    return case(gpu(kernels=[kernel(name, part, operator="aten::mm")], device_name=device), **known)


def test_fp32_products_on_a_gpu_with_bf16_are_moved_to_it() -> None:
    finding = only(multiplying("ampere_sgemm_128x64_tn", settings=training(precision="fp32")))
    assert (finding.id, finding.fix) == ("fp32-products", {"precision": "bf16"})
    assert saving(finding) == pytest.approx(0.4 * (1 - 66.9 / 989.4))  # by the published peaks


def test_a_gpu_without_bf16_trains_in_scaled_fp16() -> None:
    settings = training(precision="fp32")
    assert only(multiplying("volta_sgemm_128x64_tn", device=V100, settings=settings)).fix == {"precision": "amp"}
    settings = piping(precision="fp32")
    assert only(multiplying("volta_sgemm_128x64_tn", device=V100, settings=settings)).fix == {"precision": "fp16"}


def test_a_gpu_that_is_not_listed_is_judged_by_its_compute_capability() -> None:
    def unlisted(capability: str) -> ProfileCase:
        environment = {"gpus": [{"compute_capability": capability}]}
        return multiplying("ampere_sgemm_128x64_tn", device="NVIDIA RTX A2000", environment=environment)

    assert 0.35 < saving(only(unlisted("8.6"))) < 0.4, "products take some time in any type"
    assert ids(unlisted("6.1")) == []


def test_of_a_device_that_is_not_described_the_kernels_names_tell_the_generation() -> None:
    settings = training(precision="fp32")
    assert only(multiplying("ampere_sgemm_128x64_tn", device=None, settings=settings)).fix == {"precision": "bf16"}
    assert only(multiplying("volta_sgemm_128x64_tn", device=None, settings=settings)).fix == {"precision": "amp"}
    assert ids(multiplying("maxwell_sgemm_128x64_tn", device=None)) == []


@pytest.mark.parametrize(
    "name",
    [
        "volta_s884gemm_fp16_128x64_ldg8_f2f_tn",
        "ampere_s16816gemm_bf16_128x64_tn",
        "sm80_xmma_gemm_tf32f32_tf32f32_f32_tn_n_tilesize128x128x16",
        "ampere_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn",
    ],
)
def test_the_tensor_cores_own_kernels_are_not_fp32(name: str) -> None:
    assert ids(multiplying(name)) == []


@pytest.mark.parametrize(
    "name",
    [
        "volta_scudnn_128x64_relu_medium_nn_v1",
        "void cutlass::Kernel<cutlass_80_simt_sgemm_128x128_8x4_nn_align1>",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8",
        "void implicit_convolve_sgemm<float, float, 1024>",
    ],
)
def test_kernels_of_the_vector_units_are_fp32(name: str) -> None:
    assert ids(multiplying(name)) == ["fp32-products"]


def test_few_fp32_products_are_not_worth_another_precision() -> None:
    assert ids(multiplying("ampere_sgemm_128x64_tn", 10 * PERCENT)) == ["fp32-products"]
    assert ids(multiplying("ampere_sgemm_128x64_tn", 10 * PERCENT - 1)) == []


def test_products_that_a_run_in_bf16_left_out_are_brought_under_autocast() -> None:
    finding = only(multiplying("ampere_sgemm_128x64_tn", settings=training(precision="bf16")))
    assert finding.fix == {}
    assert "under autocast too" in finding.advice
