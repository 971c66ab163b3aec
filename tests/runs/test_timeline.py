import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.events import Span, SpanKind
from gpubench.runs import stages
from gpubench.runs.stages import PARTS, Times, rank_times

KINDS: tuple[SpanKind, ...] = ("prepare", "evaluate", "decode", "recv_wait", "send_wait")


def span(kind: SpanKind, start: float, end: float) -> Span:
    return Span(0, 0, kind, 0, start, end - start)


def parts(found: Times) -> tuple[float, ...]:
    return tuple(getattr(found, part) for part in PARTS)


def test_what_no_span_covers_is_idle() -> None:
    assert parts(rank_times([], 10.0, 14.0)) == (0, 0, 0, 4)
    assert parts(rank_times([span("evaluate", 11, 12)], 10.0, 14.0)) == (1, 0, 0, 3)


def test_all_work_is_compute_and_counts_once() -> None:
    spans = [span("prepare", 0, 2), span("evaluate", 1, 4), span("decode", 4, 5), span("evaluate", 2, 3)]
    assert parts(rank_times(spans, 0.0, 6.0)) == (5, 0, 0, 1)


def test_a_wait_counts_only_while_nothing_is_computed() -> None:
    spans = [span("evaluate", 1, 3), span("recv_wait", 0, 2), span("send_wait", 2, 5)]
    assert parts(rank_times(spans, 0.0, 6.0)) == (2, 1, 2, 1)


def test_where_both_waits_coincide_it_is_for_the_receive() -> None:
    assert parts(rank_times([span("send_wait", 0, 3), span("recv_wait", 1, 2)], 0.0, 3.0)) == (0, 1, 2, 0)


def test_what_lies_outside_the_makespan_does_not_count() -> None:
    spans = [span("evaluate", -5, 1), span("recv_wait", 3, 9), span("evaluate", -3, -2), span("decode", 7, 8)]
    assert parts(rank_times(spans, 0.0, 4.0)) == (1, 1, 0, 2)


def test_spans_that_follow_without_a_gap_leave_none() -> None:
    assert parts(rank_times([span("evaluate", step, step + 1) for step in range(4)], 0.0, 4.0)) == (4, 0, 0, 0)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.floats(-10, 110), st.floats(0, 50)), max_size=30))
def test_the_parts_sum_to_the_makespan(drawn: list[tuple[SpanKind, float, float]]) -> None:
    found = rank_times([span(kind, start, start + length) for kind, start, length in drawn], 0.0, 100.0)
    assert sum(parts(found)) == pytest.approx(found.makespan, abs=1e-9)
    assert min(parts(found)) >= 0


def test_the_mean_of_repeats_still_sums_to_their_makespan() -> None:
    found = stages.mean([Times(10, 6, 3, 1, 0), Times(20, 10, 2, 2, 6)])
    assert found == Times(15, 8, 2.5, 1.5, 3)
    assert found.share("compute") == pytest.approx(8 / 15)
