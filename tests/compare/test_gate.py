"""The gate by itself: what it reads, what it tests, how it corrects, and what it refuses to test."""

from typing import Any

import pytest
from compared import verdict
from msgspec import structs

from gpubench.compare.gate import Condition, judge, parse_condition, percent
from gpubench.compare.intervals import Error, Ratio, holm
from gpubench.compare.result import GateResult
from gpubench.compare.verdicts import Judged
from gpubench.errors import UsageError
from gpubench.report import phrases


def judged(
    metric: str = "step_time", ratio: float = 1.031, error: float = 0.002, df: float = 8, **known: Any
) -> Judged:
    found = Ratio(ratio, Error(error, df))
    return Judged(verdict(metric, ratio=ratio, interval=found.interval, **known), found)


def gated(text: str, *all_judged: Judged) -> GateResult:
    (result,) = judge([parse_condition(text)], [("new", all_judged)])
    return result


@pytest.mark.parametrize(
    ("text", "metric", "limit"),
    [
        ("step_time>2%", "step_time", 0.02),
        (" phase_* > 5 % ", "phase_*", 0.05),
        ("throughput>0%", "throughput", 0.0),
        ("throughput>0", "throughput", 0.0),
        ("step time (ms)>0.25%", "step time (ms)", 0.0025),
    ],
)
def test_a_condition_is_a_metric_and_a_percentage(text: str, metric: str, limit: float) -> None:
    assert parse_condition(text) == Condition(text, metric, limit)


@pytest.mark.parametrize(
    "text",
    ["step_time", "step_time>2", "step_time>=2%", "step_time<2%", ">2%", "step_time>-1%", "step_time>x%", "", "a>>2%",
     "step_time>nan%", "step_time>1e3%"],
)  # fmt: skip
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="--fail-on") as refused:
        parse_condition(text)
    assert ">2%" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        ("0.5%", 0.005),
        ("0.5 %", 0.005),
        ("0", 0.0),
        ("100%", 1.0),
        ("0.5", None),
        ("%", None),
        ("-1%", None),
        ("", None),
    ],
)
def test_a_percentage_has_its_sign_unless_it_is_0(text: str, fraction: float | None) -> None:
    assert percent(text) == fraction


def test_a_worsening_wholly_beyond_the_limit_is_a_regression() -> None:
    result = gated("step_time>2%", judged())
    assert (result.outcome, result.limit, result.candidate) == ("regressed", 0.02, "new")
    assert result.worsening == pytest.approx(0.031)
    assert result.interval is not None
    assert result.interval[0] > 0.02


def test_a_worsening_wholly_below_the_limit_has_passed() -> None:
    assert gated("step_time>5%", judged()).outcome == "passed"


def test_an_improvement_passes_at_no_tolerance_at_all() -> None:
    result = gated("step_time>0%", judged(ratio=0.95, verdict="faster"))
    assert result.outcome == "passed"
    assert result.worsening == pytest.approx(-0.05)


def test_what_reaches_across_the_limit_is_inconclusive() -> None:
    assert gated("step_time>3%", judged()).outcome == "inconclusive"


def test_less_of_what_should_be_high_is_worse() -> None:
    result = gated("throughput>2%", judged("throughput", ratio=0.96, better="higher", unit="samples/s"))
    assert result.outcome == "regressed"
    assert result.worsening == pytest.approx(0.04)
    assert result.interval is not None
    assert 0.02 < result.interval[0] < 0.04 < result.interval[1]


@pytest.mark.parametrize("ratio", [1.015, 1.0199, 1.02, 1.0201, 1.025, 1.0247, 1.0248, 1.03])
def test_a_lone_condition_says_what_its_interval_says(ratio: float) -> None:
    one = judged(ratio=ratio)
    assert one.ratio is not None
    low, high = one.ratio.interval
    expected = "regressed" if low > 1.02 else "passed" if high < 1.02 else "inconclusive"
    assert gated("step_time>2%", one).outcome == expected


def test_the_p_value_is_students() -> None:
    # t = ln(1.031 / 1.02) / 0.005 = 2.145, two-sided with 8 degrees of freedom
    result = gated("step_time>2%", judged(error=0.005))
    assert result.p_value == pytest.approx(0.06428, abs=2e-4)
    assert result.outcome == "inconclusive"


@pytest.mark.parametrize("ratio", [1.0, 1.01, 1.012, 1.014, 1.02, 1.026, 1.027, 1.03, 1.04])
def test_a_printed_p_value_below_5_percent_is_one_that_decides(ratio: float) -> None:
    result = gated("step_time>2%", judged(ratio=ratio, error=0.003))
    assert result.p_value is not None
    assert (result.p_value < 0.05) == (result.outcome != "inconclusive")
    assert ("below 0.05 decides" in phrases.gate(result)) == (result.outcome == "inconclusive")


def test_holm_by_hand() -> None:
    # sorted 0.005 0.01 0.03 0.04 times 4 3 2 1, never falling
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_several_conditions_share_the_chance_of_error() -> None:
    narrow = judged(ratio=1.026, error=0.002, df=30)  # alone its p is 0.003
    assert gated("step_time>2%", narrow).outcome == "regressed"
    noise = [judged(f"phase_{i}", ratio=1.0, error=0.05) for i in range(9)]
    results = judge([parse_condition("step_time>2%"), parse_condition("phase_*>2%")], [("new", [narrow, *noise])])
    assert len(results) == 10
    assert {result.outcome for result in results} == {"inconclusive"}
    assert results[0].p_value == pytest.approx(10 * (gated("step_time>2%", narrow).p_value or 0), rel=1e-6)


def test_every_candidate_is_judged() -> None:
    slower, same = [judged()], [judged(ratio=1.0)]
    results = judge([parse_condition("step_time>2%")], [("one", same), ("two", slower)])
    assert [(result.candidate, result.outcome) for result in results] == [("one", "passed"), ("two", "regressed")]


@pytest.mark.parametrize(
    ("ratio", "outcome"), [(1.03, "regressed"), (1.0199, "passed"), (1.0, "passed"), (0.9, "passed")]
)
def test_identical_repeats_are_decided_by_their_value(ratio: float, outcome: str) -> None:
    assert gated("peak_memory_rss>2%", judged("peak_memory_rss", ratio, error=0.0)).outcome == outcome


def test_nothing_on_both_sides_is_no_worsening() -> None:
    zero = verdict("skipped_steps", baseline=0.0, candidate=0.0, ratio=None, interval=None, level=None)
    result = gated("skipped_steps>0%", Judged(zero, None))
    assert (result.outcome, result.worsening) == ("passed", 0.0)


def test_where_nothing_tells_the_noise_there_is_no_outcome() -> None:
    alone = verdict(verdict="inconclusive", interval=None, level=None, units=(1, 1), noise_floor=None)
    result = gated("step_time>2%", Judged(alone, None))
    assert (result.outcome, result.p_value) == ("inconclusive", None)
    assert result.worsening == pytest.approx(0.031)


@pytest.mark.parametrize(("raised", "limit"), [(0.04, 0.04), (0.01, 0.02), (0.005, 0.02)])
def test_a_limit_that_noise_raised_holds_for_the_gate_too(raised: float, limit: float) -> None:
    assert gated("step_time>2%", judged(limit=raised)).limit == limit


def test_what_drowns_in_noise_can_fail_and_cannot_pass() -> None:
    alone: dict[str, Any] = {"level": "step", "units": (1, 1), "limit": 0.04}
    assert gated("step_time>2%", judged(ratio=1.001, **alone)).outcome == "inconclusive"
    assert gated("step_time>2%", judged(ratio=1.031, **alone)).outcome == "inconclusive"
    assert gated("step_time>2%", judged(ratio=1.06, **alone)).outcome == "regressed"
    assert gated("step_time>6%", judged(ratio=1.001, **alone)).outcome == "passed"


def test_a_noise_floor_beyond_everything_passes_nothing() -> None:
    drowned = judged("throughput", 0.99, better="higher", level="step", units=(1, 1), limit=1.5)
    assert gated("throughput>2%", drowned).outcome == "inconclusive"


def test_a_candidate_that_left_work_undone_passes_nothing() -> None:
    rejected = judged("throughput", 1.2, better="higher", verdict="rejected", reason="12 steps skipped")
    fine = judged(ratio=0.9, verdict="faster")
    conditions = [parse_condition("throughput>2%"), parse_condition("step_time>2%")]
    results = judge(
        conditions, [("new", [rejected, fine]), ("other", [judged("throughput", 1.2, better="higher"), fine])]
    )
    assert [(result.candidate, result.outcome) for result in results] == [
        ("new", "inconclusive"),
        ("other", "passed"),
        ("new", "inconclusive"),
        ("other", "passed"),
    ]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("step_tme>2%", "names no metric that was compared for new", "did you mean 'step_time'?"),
        ("zzz>2%", "names no metric", "it is one of step_time, final_loss, mfu, hfu, skipped_steps"),
        ("phase_*>2%", "names no metric", "it is one of"),
        ("final_loss>2%", "neither more nor less of final_loss is worse", "step_time>2%"),
        ("mfu>2%", "the verdict on mfu of new is withheld: world size 1 against 2", "the same workload"),
        ("*>2%", "the verdict on mfu of new is withheld: world size 1 against 2", "the same workload"),
        ("hfu>100%", "can never fail", "step_time>2%"),
        ("skipped_steps>2%", "is 0 in the baseline", "new has 3"),
    ],
)
def test_a_gate_that_tests_nothing_is_refused(text: str, message: str, hint: str) -> None:
    known = [
        judged(),
        judged("final_loss", better=None),
        judged("mfu", better="higher", verdict="withheld", reason="world size 1 against 2"),
        judged("hfu", better="higher"),
        Judged(verdict("skipped_steps", baseline=0.0, candidate=3.0, ratio=None, interval=None), None),
    ]
    with pytest.raises(UsageError) as refused:
        judge([parse_condition(text)], [("new", known)])
    assert message in refused.value.message
    assert hint in (refused.value.hint or "")


def test_a_condition_that_misses_one_of_the_candidates_is_refused() -> None:
    with pytest.raises(UsageError, match="for two"):
        judge(
            [parse_condition("step_time>2%")], [("one", [judged()]), ("two", [judged("throughput", better="higher")])]
        )


def test_a_condition_without_any_candidate_is_refused() -> None:
    with pytest.raises(UsageError, match="no candidate"):
        judge([parse_condition("step_time>2%")], [])


def test_a_pattern_passes_over_what_has_no_better_and_worse() -> None:
    results = judge([parse_condition("*>5%")], [("new", [judged(), judged("final_loss", better=None)])])
    assert [result.metric for result in results] == ["step_time"]


def test_a_name_with_brackets_names_itself() -> None:
    assert gated("time [ms]>5%", judged("time [ms]")).outcome == "passed"


def test_no_conditions_are_no_gate() -> None:
    assert judge([], [("new", [judged()])]) == []


def test_a_change_too_noisy_to_quote_is_tested_and_not_quoted() -> None:
    vague = judged("step_time", 0.95, error=1.0)
    vague = Judged(structs.replace(vague.verdict, ratio=None, interval=None, verdict="inconclusive"), vague.ratio)
    result = gated("step_time>2%", vague)
    assert (result.outcome, result.worsening, result.interval) == ("inconclusive", None, None)
    assert result.p_value is not None
