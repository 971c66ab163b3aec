"""Several traces as one program."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from traces_made import Record, anything, launched, made, slice_, step, work

from gpubench.errors import DataError
from gpubench.trace.columns import Trace
from gpubench.trace.names import Lexicon, window
from gpubench.trace.profile import Straggler
from gpubench.trace.ranks import apart, check, stragglers

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def of_rank(rank: int, *parts: Record | list[Record], world_size: int = 2, backend: str = "nccl") -> Trace:
    return made(*parts, distributedInfo={"rank": rank, "world_size": world_size, "backend": backend})


def checked(*traces: Trace) -> None:
    check(traces, [Lexicon.of(trace) for trace in traces])


def noted(*traces: Trace) -> list[str]:
    return apart(traces, [window(trace, Lexicon.of(trace)) for trace in traces])


def late(*traces: Trace) -> list[Straggler]:
    lexicons = [Lexicon.of(trace) for trace in traces]
    return stragglers(
        traces, [window(trace, lexicon) for trace, lexicon in zip(traces, lexicons, strict=True)], lexicons
    )


def collectives(durations: Sequence[float], at: float = 0, name: str = NCCL) -> list[Record]:
    """One each 1000 us, of which all ranks see the end at once."""
    return [work(name, at + 1000 * place - long, at + 1000 * place) for place, long in enumerate(durations, 1)]


def lateness(found: Sequence[Straggler]) -> list[tuple[int, int, int, int]]:
    """(rank, late, waited_for, of) of each."""
    return [(one.rank, one.late, one.waited_for, one.of) for one in found]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (of_rank(0, collectives([6])), "are both of rank 0"),
        (of_rank(0, collectives([5])), "are the same trace"),
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
    checked(made(collectives([5])), made(collectives([7])))
    checked(made(slice_("gloo:send", 0, 1)), made(slice_("gloo:recv", 0, 2)))
    checked(of_rank(0, collectives([5])))


def test_traces_that_nothing_tells_to_be_of_one_run_are_refused() -> None:
    with pytest.raises(DataError, match="do not belong together"):
        checked(made(work("gemm", 0, 1)), made(work("gemm", 0, 2)))
    with pytest.raises(DataError, match="are the same trace"):
        checked(made(work("gemm", 0, 1)), made(work("gemm", 0, 1)))


def test_ranks_that_were_not_recorded_at_the_same_time_are_noted() -> None:
    first, after, meanwhile = (of_rank(rank, collectives([9], at=at)) for rank, at in enumerate((0, 3_000_009, 5)))
    assert noted(first, after, meanwhile) == [
        "made.json begins 3 s after made.json ends: they are of two runs, or of machines whose clocks differ"
    ]
    assert noted(first, meanwhile) == []
    assert noted(first) == []


def test_the_rank_with_the_shortest_kernels_came_last() -> None:
    early, tardy = of_rank(0, collectives([300, 200, 100])), of_rank(1, collectives([100, 100, 100], at=9e6))
    assert late(early, tardy) == [
        Straggler(rank=1, late=100_000, waited_for=2, of=3, waits=2, among=2),
        Straggler(rank=0, late=0, waited_for=0, of=3, waits=2, among=2),
    ]


def test_what_launches_differ_by_is_noise() -> None:
    assert [
        one.waited_for for one in late(of_rank(0, collectives([100, 110])), of_rank(1, collectives([119, 95])))
    ] == [0, 0]


def test_of_long_collectives_a_small_part_is_noise() -> None:
    assert [one.waited_for for one in late(of_rank(0, collectives([900])), of_rank(1, collectives([940])))] == [0, 0]


def sleeping(rank: int, *durations: float, name: str = "gloo:all_reduce") -> Trace:
    """A rank without device work, whose collectives run on two threads in turn."""
    calls = [
        slice_(name, 1000 * place + 900 - long, 1000 * place + 900, "user_annotation", 2 + place % 2)
        for place, long in enumerate(durations)
    ]
    return of_rank(rank, step(1, 0, 9000), slice_("aten::mm", 0, 100), calls, backend="gloo")


def test_of_ranks_without_devices_the_shortest_collectives_tell_who_came_last() -> None:
    found = late(sleeping(0, 300, 200, 100), sleeping(1, 100, 100, 100))
    assert lateness(found) == [(1, 100_000, 2, 3), (0, 0, 0, 3)]


def test_what_is_between_two_ranks_is_not_compared() -> None:
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    assert late(of_rank(0, collectives([300], name=name)), of_rank(1, collectives([5], name=name))) == []
    assert late(sleeping(0, 300, name="gloo:send"), sleeping(1, 5, name="gloo:send")) == []


@pytest.mark.parametrize(
    ("durations", "last"),
    [
        ((10, 300, 320), 0),  # the root is late: every other rank waits
        ((300, 10, 320), 1),  # a rank to which the root and the third have to pass on
        ((10, 10, 300), None),  # the root or the second: who of them kept the third is not known
        ((10, 12, 15), None),  # nobody waits
    ],
)
@pytest.mark.parametrize("name", ["ncclDevKernel_Broadcast_RING_LL", "gloo:broadcast"])
def test_a_broadcast_waits_for_the_one_rank_that_waits_for_nobody(
    name: str, durations: tuple[int, ...], last: int | None
) -> None:
    def traces(world_size: int) -> list[Trace]:
        if name.startswith("gloo"):
            calls = [slice_(name, 500, 500 + long, "user_annotation", 2) for long in durations]
            parts = [[step(1, 0, 9000), slice_("aten::mm", 0, 100), call] for call in calls]
        else:
            parts = [collectives([long], name=name) for long in durations]
        return [of_rank(rank, part, world_size=world_size) for rank, part in enumerate(parts)]

    assert [one.rank for one in late(*traces(3)) if one.waited_for] == ([] if last is None else [last])
    assert late(*traces(4)) == []  # the root may be the fourth


@pytest.mark.parametrize("operator", ["c10d::alltoall_base_", "nccl:all_to_all"])
def test_in_an_all_to_all_every_rank_waits_for_the_last(operator: str) -> None:
    def exchanging(rank: int, long: float) -> Trace:
        kernel = launched("ncclDevKernel_SendRecv", 5, 10, 10 + long, 1)
        return of_rank(rank, step(1, 0, 400), slice_(operator, 0, 20), kernel)

    assert lateness(late(exchanging(0, 300), exchanging(1, 100)))[0] == (1, 200_000, 1, 1)


def test_the_arguments_of_a_kernel_tell_its_collective() -> None:
    def exchanging(rank: int, long: float, collective: str) -> Trace:
        about: dict[str, Any] = {"Collective name": collective}
        return of_rank(rank, work("ncclDevKernel_SendRecv", 10, 10 + long, **about))

    assert late(exchanging(0, 300, "all_to_allv"), exchanging(1, 100, "all_to_allv"))[0].rank == 1
    assert late(exchanging(0, 300, "send"), exchanging(1, 100, "recv")) == []


def test_a_trace_of_two_processes_is_refused() -> None:
    other = [{**record, "pid": 2} for record in launched("b", 0, 5, 9, 1)]
    with pytest.raises(DataError, match=r"is of 2 processes: 1 and 2"):
        checked(of_rank(0, launched("a", 0, 5, 9, 1), other))


def test_a_device_in_whose_name_the_runtime_is_called_is_no_second_process() -> None:
    of_device = [{**record, "pid": 17} for record in launched("b", 0, 5, 9, 1)]
    checked(of_rank(0, slice_("aten::mm", 0, 3), launched("a", 0, 5, 9, 1), of_device))


def test_collectives_are_matched_within_the_step_that_launched_them() -> None:
    one = of_rank(
        0, step(1, 0, 100), step(2, 100, 200), launched(NCCL, 10, 110, 150, 1), launched(NCCL, 110, 150, 160, 2)
    )
    two = of_rank(1, step(2, 0, 100), launched(NCCL, 10, 20, 120, 1))
    assert lateness(late(one, two)) == [(0, 90_000, 1, 1), (1, 0, 0, 1)]


def test_steps_in_which_ranks_communicate_unlike_are_not_compared() -> None:
    one = of_rank(0, step(1, 0, 100), launched(NCCL, 10, 20, 30, 1), launched(NCCL, 40, 50, 60, 2))
    assert late(one, of_rank(1, step(1, 0, 100), launched(NCCL, 10, 20, 90, 1))) == []


def test_ranks_without_collectives_in_common_keep_nobody_waiting() -> None:
    assert late(of_rank(0, work("gemm", 0, 1)), of_rank(1, work("gemm", 0, 1))) == []
    assert late(of_rank(0, collectives([5]))) == []


def test_a_rank_that_the_trace_does_not_number_is_counted_by_its_place() -> None:
    found = late(made(collectives([300])), made(collectives([100])))
    assert [one.rank for one in found] == [1, 0]


def described(
    rank: int, *calls: tuple[str, float, float], world_size: int = 2, on_host: bool = False, **about: Any
) -> Trace:
    """Calls of (collective, duration, end) in one process group with the default sizes, numbered if `first` is set."""
    first = about.pop("first", None)
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2, "dtype": "Float"}
    parts = [work("gemm", 0, 1)]
    for place, (collective, long, end) in enumerate(calls, 1):
        args = {"Collective name": collective, "In msg nelems": 64, "Out msg nelems": 64, **group, **about}
        if first is not None:
            args["Seq"] = first + place
        if on_host:
            parts.append(slice_("record_param_comms", 10 * place, 10 * place + 5, **args))
            parts += launched(NCCL, 10 * place + 1, end - long, end, place)
        else:
            parts.append(work(NCCL, end - long, end, place, **args))
    return of_rank(rank, parts, world_size=world_size)


@pytest.mark.parametrize("on_host", [False, True])
def test_an_all_to_all_is_not_compared_with_an_all_reduce_of_another_rank(on_host: bool) -> None:
    one = described(0, *[("all_to_all", 900, 1000.0 * place) for place in range(1, 9)], on_host=on_host)
    two = described(1, *[("allreduce", 100, 1000.0 * place) for place in range(1, 9)], on_host=on_host)
    assert late(one, two) == []
    same = described(1, *[("all_to_all", 100, 1000.0 * place) for place in range(1, 9)], on_host=on_host)
    assert lateness(late(one, same)) == [(1, 800_000, 8, 8), (0, 0, 0, 8)]


@pytest.mark.parametrize(
    ("other", "matched"),
    [
        ({}, True),
        ({"In msg nelems": 128}, False),
        ({"dtype": "Half"}, False),
        ({"Process Group Name": "1"}, False),
        ({"Process Group Ranks": "[1, 2]"}, False),
    ],
)
def test_collectives_of_one_group_size_and_type_are_compared(other: Record, matched: bool) -> None:
    found = late(described(0, ("allreduce", 300, 400)), described(1, ("allreduce", 100, 400), **other))
    assert bool(found) == matched


def test_an_all_to_all_is_compared_though_every_rank_sends_as_much_as_it_likes() -> None:
    sizes: list[Record] = [{"In msg nelems": 64}, {"In msg nelems": 65}]
    one, two = (described(rank, ("all_to_allv", 300 - rank, 400), **size) for rank, size in enumerate(sizes))
    assert len(late(one, two)) == 2


def test_collectives_are_matched_by_their_number_in_the_group() -> None:
    """Rank 1 was recorded from the third collective on, and has lost one."""
    long = [100, 100, 300, 300, 300, 300]
    one = described(0, *[("allreduce", time, 1000.0 * place) for place, time in enumerate(long, 1)], first=0)
    calls = [("allreduce", 100, 1000.0 * place) for place in (3, 4, 5)]
    two = described(1, *calls, first=2)
    assert lateness(late(one, two)) == [(1, 200_000, 3, 3), (0, 0, 0, 3)]
    assert late(one, described(1, *calls, first=9)) == []


def test_only_ranks_of_one_group_are_compared() -> None:
    """Two pairs that exchange tensors: the second pair takes longer, and in it rank 3 is late."""
    ranks = []
    for rank, long in enumerate((110, 105, 900, 400)):
        pair = rank - rank % 2
        about: Record = {"Process Group Name": str(pair), "Process Group Ranks": f"[{pair}, {pair + 1}]"}
        calls = [("allreduce", long, 1000.0 * place) for place in range(1, 9)]
        ranks.append(described(rank, *calls, world_size=4, **about))
    found = late(*ranks)
    assert lateness(found) == [(3, 500_000, 8, 8), (1, 5_000, 0, 8), (0, 0, 0, 8), (2, 0, 0, 8)]
    assert {one.among for one in found} == {2}
    assert late(ranks[1], ranks[2]) == []  # of two groups


def test_of_a_group_of_which_some_ranks_are_missing_that_is_noted() -> None:
    of_four: Record = {"Process Group Ranks": "[0, 1, 2, 3]", "Group size": 4}
    traces = [described(rank, ("allreduce", 300 - rank, 400), world_size=4, **of_four) for rank in range(4)]
    assert [one.whole for one in late(*traces[:2])] == [False, False]
    assert [one.whole for one in late(*traces)] == [True] * 4
    assert [one.whole for one in late(*(of_rank(rank, collectives([5]), world_size=128) for rank in (0, 1)))] == [
        False
    ] * 2


def test_ranks_of_a_large_group_are_recorded_in_part() -> None:
    of_many: Record = {"Process Group Ranks": "[0, 1, 2, ..., 127]", "Group size": 128}
    traces = [described(rank, ("allreduce", 300 - rank, 400), world_size=128, **of_many) for rank in (7, 90)]
    assert [one.whole for one in late(*traces)] == [False, False]


def test_a_rank_of_thousands_of_digits_is_in_no_group() -> None:
    of_two: Record = {"Process Group Ranks": f"[0, {'9' * 5000}]", "Group size": 2}
    assert late(*(described(rank, ("allreduce", 300 - rank, 400), **of_two) for rank in (0, 1))) == []


def test_without_a_recorded_group_kernels_that_end_apart_are_not_taken_for_one_collective() -> None:
    one = collectives([900, 200, 150, 700, 330, 410])
    other = [work(NCCL, end - 90, end) for end in (250, 1300, 2900, 3100, 4950, 5200)]
    assert late(of_rank(0, one), of_rank(1, other)) == []


def test_clocks_that_differ_by_hours_do_not_matter() -> None:
    one, two = of_rank(0, collectives([300, 280, 310])), of_rank(1, collectives([100, 100, 110], at=9e9))
    assert [each.waited_for for each in late(one, two)] == [3, 0]


@pytest.mark.parametrize("collective", ["gather", "scatter", "reduce", "send", "recv"])
def test_where_ranks_do_not_all_wait_for_each_other_none_is_called_late(collective: str) -> None:
    assert late(described(0, (collective, 300, 400)), described(1, (collective, 100, 400))) == []


def test_a_barrier_waits_for_all() -> None:
    assert len(late(described(0, ("barrier", 300, 400)), described(1, ("barrier", 100, 400)))) == 2
    assert len(late(sleeping(0, 300, name="gloo:barrier"), sleeping(1, 100, name="gloo:barrier"))) == 2


@given(anything(), anything())
def test_lateness_is_never_negative_whatever_the_traces_hold(one: list[Record], two: list[Record]) -> None:
    assert all(each.late >= 0 and each.waited_for <= each.of for each in late(made(one), made(two)))
