from typing import Any

import pytest
from cases_made import PERCENT, STEPS, case, gpu, ids, only, operator, saving, training

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Unanswered
from gpubench.trace.profile import Attention


def shaped(name: str, shapes: str, part: int = 20 * PERCENT, dtype: str = "bfloat16", **known: Any) -> ProfileCase:
    return case(gpu(operators=[operator(name, part, shapes=shapes, dtype=dtype, of_ceiling=0.5)]), **known)


def test_a_vocabulary_that_is_no_multiple_of_eight_is_named() -> None:
    finding = only(shaped("aten::mm", "[8192, 768] [768, 50257]"))
    assert finding.id == "odd-shapes"
    assert finding.evidence[0].endswith("features N = 50257 is not a multiple of 8")
    assert "features (vocabulary, classes or hidden size) from 50257 to 50264, or to 50304" in finding.advice
    assert saving(finding) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "shapes", "dtype"),
    [
        ("aten::mm", "[8191, 768] [768, 50304]", "bfloat16"),  # rows of any number
        ("aten::addmm", "[10] [32, 512] [512, 16]", "float16"),  # a bias is no factor
        ("aten::mm", "[8192, 768] [768, 50257]", "float32"),  # fp32 in full, for all that is known
        ("aten::convolution", "[64, 3, 224, 224] [64, 3, 7, 7]", "float16"),  # an image
        ("aten::mm", "", "float16"),
        ("aten::mm", "[] []", "float16"),
        ("aten::mm", "[768, 1001] [1001, 768]", "bfloat16"),  # a weight's gradient: both factors transposed
        ("aten::matmul", "[64, 30] [30]", "bfloat16"),  # a vector has no rows
    ],
)
def test_shapes_that_suit_the_tensor_cores_or_cannot_be_padded_are_left_alone(
    name: str, shapes: str, dtype: str
) -> None:
    assert ids(shaped(name, shapes, dtype=dtype)) == []


def test_tf32_asks_for_multiples_of_four() -> None:
    settings = training(precision="tf32")
    assert ids(shaped("aten::mm", "[8, 12] [12, 20]", dtype="float32", settings=settings)) == []
    assert ids(shaped("aten::mm", "[8, 12] [12, 22]", dtype="float32", settings=settings)) == ["odd-shapes"]


def test_a_factor_both_of_whose_sizes_are_odd_has_odd_rows_either_way() -> None:
    finding = only(shaped("aten::mm", "[1001, 999] [999, 768]"))
    assert "features K = 999 and rows M = 1001 are not multiples of 8" in finding.evidence[0]


def test_padding_reaches_no_more_than_products_of_the_program_that_suit() -> None:
    odd = operator("aten::mm", 20 * PERCENT, shapes="[8, 8] [8, 9]", dtype="bfloat16", of_ceiling=0.5)
    even = operator("aten::mm", PERCENT, shapes="[8, 8] [8, 8]", dtype="bfloat16", bound="compute", of_ceiling=0.625)
    assert saving(only(case(gpu(operators=[odd, even])))) == pytest.approx(0.04)


@pytest.mark.parametrize(("of_ceiling", "gained"), [(0.25, 0.225), (0.9, 0.03)])
def test_products_bound_by_memory_gain_what_they_lack_of_its_bandwidth(of_ceiling: float, gained: float) -> None:
    """Rows that a thread cannot load at once cost the most where loads are all that there is."""
    thin = operator(
        "aten::mm", 30 * PERCENT, shapes="[8, 8] [8, 9]", dtype="bfloat16", bound="memory", of_ceiling=of_ceiling
    )
    (finding,) = (each for each in diagnose(case(gpu(operators=[thin]))).findings if each.id == "odd-shapes")
    assert saving(finding) == pytest.approx(gained)


def test_products_that_reach_the_memory_bandwidth_have_nothing_to_gain() -> None:
    full = operator("aten::mm", 30 * PERCENT, shapes="[8, 8] [8, 9]", dtype="bfloat16", bound="memory", of_ceiling=0.98)
    assert "odd-shapes" not in ids(case(gpu(operators=[full])))


def unfused(**sizes: Any) -> Attention:
    usual: dict[str, Any] = {
        "groups": 16, "queries": 5185, "keys": 5185, "head_size": 64, "dtype": "bfloat16", "calls": STEPS,
        "backward_calls": 0, "products": 19 * PERCENT, "softmax": 2 * PERCENT, "elementwise": 0, "backward": 0,
        "fallback": False, "obstacles": [],
    }  # fmt: skip
    return Attention(**usual | sizes)


def attending(**parts: Any) -> ProfileCase:
    products = [
        operator("aten::bmm", 10 * PERCENT, shapes="[16, 5185, 64] [16, 64, 5185]", dtype="bfloat16", bound="memory"),
        operator("aten::bmm", 9 * PERCENT, shapes="[16, 5185, 5185] [16, 5185, 64]", dtype="bfloat16", bound="memory"),
    ]
    return case(gpu(operators=products, attention=[unfused()], **parts))


def test_an_odd_sequence_is_padded_and_no_feature_of_the_model() -> None:
    finding = next(one for one in diagnose(attending()).findings if one.id == "odd-shapes")
    assert finding.evidence[0].endswith("sequence length N = 5185 is not a multiple of 8")
    assert finding.evidence[1].endswith("sequence length K = 5185 is not a multiple of 8")
    assert "pad the sequence from 5185 to 5192, or to 5248" in finding.advice
    assert "fused attention kernels take any length" in finding.advice
    assert "vocabulary" not in finding.advice
    assert finding.expected is None


def test_no_rule_of_nvidias_is_claimed_for_amd() -> None:
    amd = attending(device_name="AMD Instinct MI300X")
    finding = next(one for one in diagnose(amd).findings if one.id == "odd-shapes")
    assert "AMD publishes no rule" in finding.cause


def test_odd_channels_of_a_convolution_are_named() -> None:
    finding = only(shaped("aten::convolution", "[64, 30, 56, 56] [60, 30, 3, 3]"))
    assert "channels 30 and channels 60 are not multiples of 8" in finding.evidence[0]


def test_odd_shapes_are_silent_just_below_their_threshold() -> None:
    assert ids(shaped("aten::mm", "[8, 8] [8, 9]", part=5 * PERCENT - 1)) == []


def test_without_shapes_the_rule_says_which_option_records_them() -> None:
    rank = gpu(operators=[operator("aten::mm", PERCENT)], missing={"shapes": "record_shapes"})
    assert [one.needs for one in diagnose(case(rank)).unanswered] == ["record_shapes"]
    own = training(profiling__record_shapes=False)
    assert diagnose(case(rank, settings=own)).unanswered == [
        Unanswered("odd-shapes", "shapes of the matrix products", "profiling.record_shapes")
    ]
