"""Kernels that hold most of the step: far below the device's peak, or of unknown speed."""

from typing import Any

import pytest
from cases_made import PERCENT, STEPS, case, gpu, ids, kernel, only, operator, saving

from gpubench.diagnosis.case import ProfileCase
from gpubench.trace.profile import Launches

ATTENTION = "aten::_flash_attention_forward"
MOE = "fused_moe_kernel"


def computing(name: str, part: int, reached: float | None, **more: Any) -> ProfileCase:
    shapes = "[1, 4096, 32, 128] [1, 4096, 32, 128] [1, 4096, 32, 128]"
    known = {"shapes": shapes, "dtype": "bfloat16", "calls": STEPS, "kernels": STEPS, "flops": 1e12}
    known |= more.pop("operator", {})
    bound = "compute" if reached is not None else "insufficient data"
    one = operator(name, part, bound=bound, of_ceiling=reached, **known)
    return case(gpu(operators=[one], kernels=[kernel("attn_fwd", part, operator=name)], **more))


def test_attention_far_below_the_peak_is_a_finding_with_its_speed_and_a_limit() -> None:
    finding = only(computing(ATTENTION, 90 * PERCENT, 0.204))
    assert (finding.id, finding.severity) == ("below-ceiling", "high")
    assert finding.title == "attention runs at 20.4 % of the device's peak"
    assert saving(finding) == pytest.approx(0.9 * (1 - 0.204))
    assert "20.4 % of the peak" in finding.evidence[1]
    assert "sdpa_kernel" in finding.advice
    assert "a limit and not an estimate" in finding.threshold


def test_on_amd_the_advice_is_for_amd() -> None:
    finding = only(computing(ATTENTION, 90 * PERCENT, 0.2, device_name="AMD Instinct MI300X"))
    assert "preferred_rocm_fa_library" in finding.advice


@pytest.mark.parametrize(
    ("part", "reached", "more"),
    [
        (90 * PERCENT, 0.55, {}),
        (19 * PERCENT, 0.1, {}),
        (90 * PERCENT, 0.2, {"operator": {"kernels": 10**6}}),  # kernels so short that their fixed cost counts
        (90 * PERCENT, None, {}),
    ],
)
def test_fast_small_short_and_unknown_kernels_are_not_called_slow(
    part: int, reached: float | None, more: dict[str, Any]
) -> None:
    assert "below-ceiling" not in ids(computing(ATTENTION, part, reached, **more))


def test_products_of_odd_shapes_are_left_to_their_own_rule() -> None:
    odd = {"shapes": "[4096, 4097] [4097, 4095]", "dtype": "bfloat16"}
    assert ids(computing("aten::mm", 60 * PERCENT, 0.2, operator=odd))[0] == "odd-shapes"
    assert "below-ceiling" not in ids(computing("aten::mm", 60 * PERCENT, 0.2, operator=odd))


def moe(operators: list[Any] | None = None, by: str = "", **more: Any) -> ProfileCase:
    kernels = [kernel(f"{MOE}_128x64", 50 * PERCENT, operator=by), kernel(f"{MOE}_64x64", 28 * PERCENT, operator=by)]
    return case(gpu(kernels=kernels, operators=operators or [], **more))


def test_kernels_that_hold_most_of_the_step_are_named_also_where_nothing_else_is_known() -> None:
    finding = only(moe())
    assert (finding.id, finding.severity, finding.expected) == ("dominant-kernel", "low", None)
    assert finding.title == f"78 % of the step is in {MOE}*"
    assert "links no operator" in finding.cause


def test_what_hides_the_speed_of_a_dominant_kernel_is_said_with_the_way_to_show_it() -> None:
    by = [
        operator("vllm::moe_forward", 78 * PERCENT, bound="insufficient data", of_ceiling=None, flops=None, bytes=None)
    ]
    graph = Launches(1, 9, 1, 1, 0, 1.0, 1, 0, 0, 0, 0, works=500)
    shown = {
        "enforce_eager=True": moe(launches=graph),
        "record_shapes=True": moe(by, "vllm::moe_forward", missing={"shapes": "record_shapes"}),
        "at the same shapes": moe(by, "vllm::moe_forward"),
    }
    for advice, one in shown.items():
        assert advice in only(one).advice
    assert "no formula for the arithmetic of vllm::moe_forward" in only(shown["at the same shapes"]).cause
    lacking = only(moe([operator("aten::convolution", 78 * PERCENT)], "aten::convolution"))
    assert "the recorded inputs of aten::convolution lack" in lacking.cause
    other = only(moe([operator("aten::mm", 5 * PERCENT)]))  # the host was recorded
    assert ("no recorded operator launches it" in other.cause, "record the host" in other.advice) == (True, False)
    known = only(computing(ATTENTION, 90 * PERCENT, 0.62))
    assert (known.id, known.cause) == ("dominant-kernel", "it runs at 62.0 % of the ceiling that its shapes give")


def test_a_dominant_kernel_is_no_finding_where_another_one_explains_the_step() -> None:
    assert ids(moe(idle={"data_loader": 20 * PERCENT})) == ["data-loading"]
    assert ids(case(gpu(kernels=[kernel("gemm_1", 49 * PERCENT)]))) == []
