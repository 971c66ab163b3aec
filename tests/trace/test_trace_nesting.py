"""Which CPU slice stands in which."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces_made import Record, call, launched, made, slice_

from gpubench.trace.columns import SliceKind, Trace
from gpubench.trace.slices import innermost, nearest, nest, outermost, owner, owner_slice, reaching

SLICES = st.lists(
    st.tuples(
        st.integers(0, 40), st.integers(0, 25), st.integers(1, 2), st.sampled_from(["cpu_op", "user_annotation"])
    ),
    min_size=1,
    max_size=30,
)


def parents(trace: Trace) -> dict[str, str | None]:
    """By name: the name of the slice around each."""
    found = nest(trace).parent.tolist()
    names = [trace.names[name] for name in trace.cpu.name.tolist()]
    return {name: names[parent] if parent >= 0 else None for name, parent in zip(names, found, strict=True)}


def own(trace: Trace) -> dict[str, float]:
    names = [trace.names[name] for name in trace.cpu.name.tolist()]
    return dict(zip(names, (nest(trace).own / 1000).tolist(), strict=True))


def test_slices_stand_in_what_contains_them() -> None:
    trace = made(slice_("a", 0, 10), slice_("b", 2, 8), slice_("c", 3, 4), slice_("d", 8, 9), slice_("e", 10, 12))
    assert parents(trace) == {"a": None, "b": "a", "c": "b", "d": "a", "e": None}
    assert own(trace) == {"a": 3, "b": 5, "c": 1, "d": 1, "e": 2}


def test_threads_are_apart() -> None:
    trace = made(slice_("a", 0, 10), slice_("b", 2, 8, thread=2))
    assert parents(trace) == {"a": None, "b": None}


def test_a_child_that_outlasts_its_parent_a_little_is_cut() -> None:
    trace = made(slice_("parent", 0, 10), slice_("child", 4, 11), slice_("next", 11, 12))
    assert parents(trace) == {"parent": None, "child": "parent", "next": None}
    assert own(trace) == {"parent": 4, "child": 6, "next": 1}


def test_steps_that_overlap_follow_each_other() -> None:
    first = slice_("ProfilerStep#1", 0, 101, cat="user_annotation")
    second = slice_("ProfilerStep#2", 100, 200, cat="user_annotation")
    trace = made(first, second, slice_("in second", 150, 160))
    assert parents(trace) == {"ProfilerStep#1": None, "ProfilerStep#2": None, "in second": "ProfilerStep#2"}
    assert own(trace)["ProfilerStep#1"] == 100


def test_an_annotation_that_an_exception_left_open_ends_with_its_operator() -> None:
    node = slice_("autograd::engine::evaluate_function: ReluBackward0", 0, 10)
    trace = made(node, slice_("module: fc (Linear)", 2, 90, cat="user_annotation"), slice_("after", 20, 30))
    assert parents(trace)["after"] is None
    assert own(trace)["module: fc (Linear)"] == 8


def test_a_slice_of_no_length_holds_nothing() -> None:
    assert parents(made(slice_("a", 5, 5), slice_("b", 5, 9))) == {"b": None, "a": "b"}


def test_the_nearest_is_the_slice_itself_or_the_innermost_around() -> None:
    trace = made(slice_("x", 0, 10), slice_("y", 1, 9), slice_("x", 2, 8), slice_("y", 3, 4), slice_("y", 20, 21))
    is_x = np.array([trace.names[name] == "x" for name in trace.cpu.name])
    assert nearest(nest(trace), is_x).tolist() == [0, 0, 2, 2, -1]
    assert outermost(nest(trace), is_x).tolist() == [0, 0, 0, 0, -1]


def test_the_nearest_is_found_however_deep() -> None:
    depth = 1000
    trace = made([slice_(str(level), level, 2 * depth - level) for level in range(depth)])
    found = nearest(nest(trace), np.arange(depth) == 0)
    assert set(found.tolist()) == {0}


def test_segments_tile_the_window_with_what_is_innermost() -> None:
    trace = made(slice_("a", 0, 10), slice_("b", 2, 4), slice_("c", 4, 6))
    pieces = innermost(trace, nest(trace), 0, 1000, 12_000)
    assert (pieces.start / 1000).tolist() == [1, 2, 4, 6, 10]
    assert (pieces.end / 1000).tolist() == [2, 4, 6, 10, 12]
    assert pieces.slice.tolist() == [0, 1, 2, 0, -1]


def test_the_owner_of_work_is_the_operator_that_launched_it() -> None:
    trace = made(slice_("aten::relu", 0, 10), launched("kernel", 2, 20, 30, 1), launched("stray", 15, 30, 31, 2))
    assert owner(trace, nest(trace), trace.launchers).tolist() == [trace.names.index("aten::relu"), -1]


def test_work_without_a_host_has_no_owner() -> None:
    trace = made(launched("kernel", 2, 20, 30, 1)[1])
    assert owner(trace, nest(trace), trace.launchers).tolist() == [-1]
    assert owner_slice(trace, nest(trace), trace.launchers).tolist() == [-1]


def test_a_trace_of_runtime_calls_has_no_operators() -> None:
    trace = made(call("cudaLaunchKernel", 0, 1, 1))
    assert (trace.cpu.kind == SliceKind.RUNTIME).all()
    assert nearest(nest(trace), trace.cpu.kind == SliceKind.OPERATOR).tolist() == [-1]


def recorded(slices: list[tuple[int, int, int, str]]) -> list[Record]:
    return [
        slice_(str(number), start, start + length, cat, thread)
        for number, (start, length, thread, cat) in enumerate(slices)
    ]


def test_what_is_reached_from_a_slice_is_it_and_all_around_it() -> None:
    trace = made(slice_("a", 0, 10), slice_("b", 1, 8), slice_("c", 2, 3), slice_("d", 4, 5), slice_("e", 20, 30))
    assert reaching(nest(trace), np.array([3], np.int32)).tolist() == [True, True, False, True, False]
    assert not reaching(nest(trace), np.empty(0, np.int32)).any()


@given(SLICES)
def test_own_times_of_any_slices_sum_to_their_trees(slices: list[tuple[int, int, int, str]]) -> None:
    trace = made(recorded(slices))
    forest, cpu = nest(trace), trace.cpu
    roots = forest.parent < 0
    inner = ~roots
    assert (forest.own >= 0).all()
    assert (forest.parent < np.arange(len(cpu))).all()
    assert (forest.end <= cpu.end).all()
    assert (forest.end[inner] <= forest.end[forest.parent[inner]]).all()
    assert forest.own.sum() == (forest.end - cpu.start)[roots].sum()


@given(SLICES, st.integers(0, 50), st.integers(0, 50))
def test_segments_of_any_slices_tile(slices: list[tuple[int, int, int, str]], start: int, end: int) -> None:
    trace = made(recorded(slices))
    pieces = innermost(trace, nest(trace), 0, start * 1000, end * 1000)
    assert (pieces.end > pieces.start).all()
    assert (pieces.end[:-1] == pieces.start[1:]).all()
    assert (pieces.end - pieces.start).sum() == max(0, end - start) * 1000


@pytest.mark.parametrize("kind", ["cpu_op", "python_function"])
def test_own_time_of_the_innermost_segments_agrees_with_the_nest(kind: str) -> None:
    trace = made(slice_("a", 0, 10, kind), slice_("b", 2, 8, kind), slice_("c", 5, 7, kind))
    pieces = innermost(trace, nest(trace), 0, 0, 10_000)
    spent = np.zeros(len(trace.cpu), np.int64)
    np.add.at(spent, pieces.slice, pieces.end - pieces.start)
    assert spent.tolist() == nest(trace).own.tolist()
