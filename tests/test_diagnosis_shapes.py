from typing import Any

import pytest
from cases_made import PERCENT, case, gpu, ids, only, operator, saving, training

from gpubench.diagnosis.case import Case
from gpubench.diagnosis.diagnose import diagnose
from gpubench.findings import Unanswered


def shaped(name: str, shapes: str, part: int = 20 * PERCENT, dtype: str = "bfloat16", **known: Any) -> Case:
    return case(gpu(operators=[operator(name, part, shapes=shapes, dtype=dtype, of_ceiling=0.5)]), **known)


def test_a_vocabulary_that_is_no_multiple_of_eight_is_named() -> None:
    finding = only(shaped("aten::mm", "[8192, 768] [768, 50257]"))
    assert finding.id == "odd-shapes"
    assert finding.evidence[0].endswith("50257 is no multiple of 8")
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
    assert "999 and 1001 is no multiple of 8" in finding.evidence[0]


def test_padding_reaches_no_more_than_products_of_the_program_that_suit() -> None:
    odd = operator("aten::mm", 20 * PERCENT, shapes="[8, 8] [8, 9]", dtype="bfloat16", of_ceiling=0.5)
    even = operator("aten::mm", PERCENT, shapes="[8, 8] [8, 8]", dtype="bfloat16", bound="compute", of_ceiling=0.625)
    assert saving(only(case(gpu(operators=[odd, even])))) == pytest.approx(0.04)


def test_products_bound_by_memory_gain_nothing_from_padding() -> None:
    thin = operator("aten::mm", 30 * PERCENT, shapes="[8, 8] [8, 9]", dtype="bfloat16", bound="memory", of_ceiling=0.8)
    assert ids(case(gpu(operators=[thin]))) == ["memory-bound"]


def test_odd_channels_of_a_convolution_are_named() -> None:
    finding = only(shaped("aten::convolution", "[64, 30, 56, 56] [60, 30, 3, 3]"))
    assert "30 and 60 is no multiple of 8" in finding.evidence[0]


def test_odd_shapes_are_silent_just_below_their_threshold() -> None:
    assert ids(shaped("aten::mm", "[8, 8] [8, 9]", part=5 * PERCENT - 1)) == []


def test_without_shapes_rules_about_them_say_which_option_records_them() -> None:
    rank = gpu(operators=[operator("aten::mm", PERCENT)], missing={"shapes": "record_shapes"})
    assert [one.needs for one in diagnose(case(rank)).unanswered] == ["record_shapes", "record_shapes"]
    own = training(profiling__record_shapes=False)
    assert diagnose(case(rank, settings=own)).unanswered == [
        Unanswered("odd-shapes", "shapes of the matrix products", "profiling.record_shapes"),
        Unanswered(
            "memory-bound", "shapes of the operators, from which their traffic follows", "profiling.record_shapes"
        ),
    ]
