"""Sets of intervals against sets of integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpubench.trace.columns import EMPTY, Spans, clip, complement, intersect, join, overlap, span, subtract, union

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda one: (one[0], one[0] + one[1])))


def spans(found: list[tuple[int, int]]) -> Spans:
    bounds = np.array(found, np.int64).reshape(-1, 2)
    return union(bounds[:, 0], bounds[:, 1])


def instants(a: Spans) -> set[int]:
    pairs = zip(a.start.tolist(), a.end.tolist(), strict=True)
    return {instant for start, end in pairs for instant in range(start, end)}


def well_formed(a: Spans) -> bool:
    return bool((a.start < a.end).all() and (a.start[1:] > a.end[:-1]).all())


@given(intervals)
def test_a_union_holds_every_instant_of_its_intervals_and_no_other(found: list[tuple[int, int]]) -> None:
    joined = spans(found)
    assert instants(joined) == {instant for start, end in found for instant in range(start, end)}
    assert well_formed(joined)
    assert joined.length == len(instants(joined))


@given(intervals, intervals)
def test_the_operations_are_those_of_sets(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = spans(left), spans(right)
    for made, expected in (
        (intersect(a, b), instants(a) & instants(b)),
        (subtract(a, b), instants(a) - instants(b)),
        (join(a, b), instants(a) | instants(b)),
        (complement(a, 5, 30), set(range(5, 30)) - instants(a)),
        (clip(a, 5, 30), set(range(5, 30)) & instants(a)),
    ):
        assert instants(made) == expected
        assert well_formed(made)


@given(intervals, intervals)
def test_overlaps_are_counted_for_each_interval(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    bounds, b = np.array(left, np.int64).reshape(-1, 2), spans(right)
    counted = [len(set(range(start, end)) & instants(b)) for start, end in left]
    assert overlap(bounds[:, 0], bounds[:, 1], b).tolist() == counted


def test_a_complement_reaches_no_further_than_asked() -> None:
    assert len(complement(span(0, 100), 20, 30)) == 0
    assert instants(complement(EMPTY, 3, 5)) == {3, 4}
    assert len(complement(EMPTY, 5, 5)) == 0
    assert len(span(5, 5)) == 0
