from typing import Any

import pytest
from cases_made import PERCENT, STEPS, case, cpu, gpu, ids, kernel, only, operator, saving

from gpubench.diagnosis.attention import is_restricted
from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Finding
from gpubench.trace.profile import Attention


def attention(part: int, **known: Any) -> Attention:
    """Half of the time in products, half in the softmax."""
    usual: dict[str, Any] = {
        "groups": 128, "queries": 2048, "keys": 2048, "head_size": 64, "dtype": "float16", "calls": 24 * STEPS,
        "backward_calls": 0, "products": part // 2, "softmax": part // 2, "elementwise": 0, "backward": 0,
        "fallback": False, "obstacles": [],
    }  # fmt: skip
    return Attention(**usual | known)


def attending(part: int, idle: int = 0, **known: Any) -> ProfileCase:
    return case(gpu(idle={"python_and_launch": idle}, attention=[attention(part, **known)]))


def test_attention_in_separate_operators_is_named_with_its_share_its_sizes_and_the_fused_kernel() -> None:
    finding = only(attending(70 * PERCENT, idle=5 * PERCENT))
    assert (finding.id, finding.severity) == ("unfused-attention", "high")
    assert "70 ms a step (70.0 %), 73.7 % of the time that the GPU computes" in finding.evidence[0]
    assert "matrix products 50.0 %, softmax 50.0 %" in finding.evidence[0]
    assert finding.evidence[1].startswith(
        "128 (batch x heads) x 2048 queries x 2048 keys, head size 64, float16: 24 times a step"
    )
    assert "the scores of each are 1 GiB" in finding.evidence[1]
    assert 'attn_implementation="sdpa"' in finding.advice
    assert "torch.nn.functional.scaled_dot_product_attention" in finding.advice


def test_what_a_fused_kernel_still_has_to_multiply_is_not_saved() -> None:
    """Half of two products of 2 x 128 x 2048 x 2048 x 64 operations, 240 times, at 989.4 TFLOP/s."""
    still = 240 * 128 * 2048 * 2048 * 64 * 2 / 989.4e12
    assert saving(only(attending(70 * PERCENT))) == pytest.approx(0.7 - still, rel=1e-6)
    unknown = case(gpu(device_name="Some device", attention=[attention(70 * PERCENT)]))
    assert saving(only(unknown)) == pytest.approx(0.7)


def test_attention_is_silent_just_below_its_threshold() -> None:
    assert ids(attending(5 * PERCENT)) == ["unfused-attention"]
    assert ids(attending(5 * PERCENT - 2)) == []


def test_the_headline_names_attention_where_it_is_most_of_what_is_computed() -> None:
    most = attending(60 * PERCENT, idle=20 * PERCENT)
    assert diagnose(most).headline.endswith("; attention in separate operators is 75 % of what it computes")
    assert "attention" not in diagnose(attending(30 * PERCENT, idle=20 * PERCENT)).headline


def test_attention_comes_first_where_it_dominates() -> None:
    copies = [kernel("direct_copy_kernel", 25 * PERCENT, operator="aten::copy_")]
    found = ids(case(gpu(kernels=copies, attention=[attention(70 * PERCENT, softmax=0)])))
    assert found[0] == "unfused-attention"


def fallen_back(*obstacles: str) -> Finding:
    return only(attending(50 * PERCENT, fallback=True, obstacles=list(obstacles)))


def test_a_fallback_of_sdpa_says_why_as_far_as_the_trace_tells() -> None:
    why = "flash attention takes no attn_mask, and one of [2048, 2048] (float16) was given"
    finding = fallen_back(why)
    assert "math backend of scaled_dot_product_attention" in finding.title
    assert finding.cause.startswith(f"{why}; the trace does not show why memory-efficient attention was not used")
    assert "sdpa_kernel" in finding.advice


@pytest.mark.parametrize(
    "obstacles",
    [
        ["flash attention takes no attn_mask", "memory-efficient attention takes head sizes that are multiples of 8"],
        ["every fused kernel takes inputs of 4 dimensions"],
        ["the fused kernel for CPUs takes no dropout"],
    ],
)
def test_a_fallback_is_explained_where_no_fused_kernel_takes_the_inputs(obstacles: list[str]) -> None:
    cause = fallen_back(*obstacles).cause
    assert cause.startswith("; ".join(obstacles))
    assert "does not show" not in cause


def test_a_fallback_without_a_known_reason_says_so_and_names_what_tells() -> None:
    finding = fallen_back()
    assert "the trace does not show why" in finding.cause
    assert "torch.nn.attention.sdpa_kernel([SDPBackend.FLASH_ATTENTION" in finding.advice


UNKNOWN = {"groups": None, "queries": None, "keys": None, "head_size": None, "dtype": ""}


def test_without_shapes_the_finding_says_how_sure_it_is() -> None:
    rank = gpu(attention=[attention(50 * PERCENT, **UNKNOWN)], missing={"shapes": "record_shapes"})
    finding = next(one for one in diagnose(case(rank)).findings if one.id == "unfused-attention")
    assert finding.title.startswith("attention seems to run as separate operators")
    assert finding.evidence[-1].startswith("100.0 % of it is inferred from the order of the work alone")
    assert "record_shapes=True" in finding.evidence[-1]


def test_where_launches_are_not_in_the_trace_shapes_are_not_asked_for() -> None:
    finding = only(case(gpu(attention=[attention(40 * PERCENT), attention(20 * PERCENT, **UNKNOWN)])))
    assert finding.evidence[-1].startswith("33.3 % of it is inferred from the order of the work alone")
    assert "launches" in finding.evidence[-1]
    assert "record_shapes" not in finding.evidence[-1]


def test_on_a_cpu_it_is_the_operators_time() -> None:
    rank = cpu(operators=[operator("aten::bmm", 0, host=80 * PERCENT)], attention=[attention(40 * PERCENT)])
    finding = only(case(rank))
    assert "(40.0 %), 50.0 % of the time in operators" in finding.evidence[0]
    assert "takes no dropout" in finding.advice


def test_sizes_that_take_next_to_nothing_are_not_listed() -> None:
    tiny = attention(PERCENT // 10, queries=5, keys=5)
    finding = only(case(gpu(attention=[attention(50 * PERCENT), tiny])))
    assert len(finding.evidence) == 2


def test_a_program_that_allows_the_math_backend_only_is_told_so_with_a_fix() -> None:
    rank = gpu(attention=[attention(50 * PERCENT, fallback=True, obstacles=["a reason that is none here"])])
    finding = only(case(rank, settings={"performance.sdpa": "math"}))
    assert finding.fix == {"performance.sdpa": "fused"}
    assert "allow" in finding.cause
    assert "a reason" not in finding.cause
    assert only(case(rank, settings={"performance.sdpa": "fused"})).fix == {}


@pytest.mark.parametrize(
    ("obstacles", "restricted"),
    [
        ([], True),
        (["flash attention takes float16 and bfloat16"], True),
        (["the fused kernel for CPUs takes no dropout"], False),
        (["flash attention takes no attn_mask", "memory-efficient attention takes head sizes of 8"], False),
    ],
)
def test_a_fallback_that_the_inputs_do_not_explain_is_the_choice_of_the_program(
    obstacles: list[str], restricted: bool
) -> None:
    fallen = attention(50 * PERCENT, fallback=True, obstacles=obstacles)
    assert is_restricted(gpu(attention=[fallen])) == restricted
    assert not is_restricted(gpu(attention=[attention(50 * PERCENT, **UNKNOWN, fallback=True)]))
    assert not is_restricted(gpu(attention=[attention(50 * PERCENT)]))
