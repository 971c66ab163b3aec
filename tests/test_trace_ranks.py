"""Several traces as one program."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from traces_made import Record, anything, launched, made, step, work

from gpubench.errors import DataError
from gpubench.trace.columns import Trace
from gpubench.trace.names import Lexicon
from gpubench.trace.profile import Straggler
from gpubench.trace.ranks import check, stragglers
from gpubench.trace.windows import window

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def of_rank(rank: int, *parts: Record | list[Record], world_size: int = 2, backend: str = "nccl") -> Trace:
    return made(*parts, distributedInfo={"rank": rank, "world_size": world_size, "backend": backend})


def checked(*traces: Trace) -> None:
    check(traces, [Lexicon.of(trace) for trace in traces])


def late(*traces: Trace) -> list[Straggler]:
    lexicons = [Lexicon.of(trace) for trace in traces]
    return stragglers(
        traces, [window(trace, lexicon) for trace, lexicon in zip(traces, lexicons, strict=True)], lexicons
    )


def collectives(durations: Sequence[float], at: float = 0, name: str = NCCL) -> list[Record]:
    """One each 1000 us."""
    return [work(name, at + 1000 * place, at + 1000 * place + long) for place, long in enumerate(durations)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (of_rank(0, collectives([5])), "are both of rank 0"),
        (of_rank(1, collectives([5]), world_size=4), "world size 2 and 4"),
        (of_rank(1, collectives([5]), backend="gloo"), "backend nccl and gloo"),
        (of_rank(1, collectives([5], name="ncclDevKernel_Broadcast")), "no collective in common"),
        (of_rank(1, work("gemm", 0, 5)), "no collective in common"),
    ],
)
def test_traces_of_two_runs_are_refused(other: Trace, message: str) -> None:
    with pytest.raises(DataError, match=message):
        checked(of_rank(0, collectives([5])), other)


def test_traces_of_one_run_belong_together() -> None:
    checked(of_rank(0, collectives([5])), of_rank(1, collectives([7])))
    checked(of_rank(0, work("gemm", 0, 1)), of_rank(1, work("gemm", 0, 1)))
    checked(made(work("gemm", 0, 1)), made(work("gemm", 0, 1)))
    checked(of_rank(0, collectives([5])))


def test_the_rank_with_the_shortest_kernels_came_last() -> None:
    early, tardy = of_rank(0, collectives([300, 200, 100])), of_rank(1, collectives([100, 100, 100], at=9e6))
    assert late(early, tardy) == [
        Straggler(rank=1, late=100_000, waited_for=2, of=3),
        Straggler(rank=0, late=0, waited_for=0, of=3),
    ]


def test_what_launches_differ_by_is_noise() -> None:
    assert [
        one.waited_for for one in late(of_rank(0, collectives([100, 110])), of_rank(1, collectives([119, 95])))
    ] == [0, 0]


def test_of_long_collectives_a_small_part_is_noise() -> None:
    assert [one.waited_for for one in late(of_rank(0, collectives([900])), of_rank(1, collectives([940])))] == [0, 0]


def test_collectives_are_matched_within_the_step_that_launched_them() -> None:
    one = of_rank(
        0, step(1, 0, 100), step(2, 100, 200), launched(NCCL, 10, 110, 150, 1), launched(NCCL, 110, 150, 160, 2)
    )
    two = of_rank(1, step(2, 0, 100), launched(NCCL, 10, 20, 120, 1))
    assert late(one, two) == [Straggler(0, 90_000, 1, 1), Straggler(1, 0, 0, 1)]


def test_steps_in_which_ranks_communicate_unlike_are_not_compared() -> None:
    one = of_rank(0, step(1, 0, 100), launched(NCCL, 10, 20, 30, 1), launched(NCCL, 40, 50, 60, 2))
    assert late(one, of_rank(1, step(1, 0, 100), launched(NCCL, 10, 20, 90, 1))) == []


def test_ranks_without_collectives_in_common_keep_nobody_waiting() -> None:
    assert late(of_rank(0, work("gemm", 0, 1)), of_rank(1, work("gemm", 0, 1))) == []
    assert late(of_rank(0, collectives([5]))) == []


def test_a_rank_that_the_trace_does_not_number_is_counted_by_its_place() -> None:
    found = late(made(collectives([300])), made(collectives([100])))
    assert [one.rank for one in found] == [1, 0]


@given(anything(), anything())
def test_lateness_is_never_negative_whatever_the_traces_hold(one: list[Record], two: list[Record]) -> None:
    assert all(each.late >= 0 and each.waited_for <= each.of for each in late(made(one), made(two)))
