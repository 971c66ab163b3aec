"""What ran on the device by name, and what changed between two traces."""

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from traces_made import Record, anything, launched, made, slice_, step, work

from gpubench.trace.columns import WorkKind
from gpubench.trace.kernels import KernelKind, fusible, kernels, moves_memory
from gpubench.trace.names import Lexicon, window
from gpubench.trace.profile import Kernel, KernelChange, RankProfile, kernel_changes

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def test_kernels_are_listed_by_name_with_the_longest_total_first() -> None:
    trace = made(
        slice_("aten::mm", 0, 1),
        slice_("aten::add", 1, 2),
        [work("gemm", at, at + long) for at, long in ((0, 4), (10, 1), (20, 9), (30, 2))],
        work(NCCL, 50, 90, stream=8),
        work("Memset (Device)", 91, 92, cat="gpu_memset"),
        work("Memcpy HtoD (Pinned -> Device)", 93, 96, cat="gpu_memcpy"),
    )
    mm, add = trace.names.index("aten::mm"), trace.names.index("aten::add")
    owner = np.array([add, mm, mm, -1, -1, -1, -1], np.int32)
    lexicon = Lexicon.of(trace)
    assert kernels(trace, lexicon, owner, window(trace, lexicon)) == [
        Kernel(NCCL, "communication", 1, 40_000, 40_000, 40_000, 40_000, ""),
        Kernel("gemm", "compute", 4, 16_000, 1_000, 3_000, 9_000, "aten::mm"),
        Kernel("Memcpy HtoD (Pinned -> Device)", "copy", 1, 3_000, 3_000, 3_000, 3_000, ""),
        Kernel("Memset (Device)", "set", 1, 1_000, 1_000, 1_000, 1_000, ""),
    ]


def test_work_counts_in_the_window_in_which_it_starts() -> None:
    trace = made(step(1, 10, 20), work("before", 9, 15), launched("inside", 11, 19, 50, 1), work("behind", 20, 21))
    lexicon = Lexicon.of(trace)
    found = kernels(trace, lexicon, np.full(3, -1, np.int32), window(trace, lexicon))
    assert [(one.name, one.total) for one in found] == [("inside", 31_000)]


def test_a_trace_of_the_host_has_no_kernels() -> None:
    trace = made(slice_("aten::mm", 0, 1))
    lexicon = Lexicon.of(trace)
    assert kernels(trace, lexicon, np.empty(0, np.int32), window(trace, lexicon)) == []


@given(anything())
def test_every_work_of_the_window_is_counted_once(records: list[Record]) -> None:
    trace = made(records)
    lexicon, device = Lexicon.of(trace), trace.device
    around = window(trace, lexicon)
    found = kernels(trace, lexicon, np.full(len(device), -1, np.int32), around)
    inside = (device.start >= around.start) & (device.start < around.end)
    assert sum(one.calls for one in found) == inside.sum()
    assert sum(one.total for one in found) == (device.end - device.start)[inside].sum()
    assert all(one.shortest <= one.median <= one.longest <= one.total for one in found)


def rank(steps: int, **totals: tuple[int, int]) -> RankProfile:
    """Of kernels with (total, calls)."""
    listed = [Kernel(name, "compute", calls, total, 0, 0, 0, "") for name, (total, calls) in totals.items()]
    return msgspec.convert(
        {field.name: [] for field in msgspec.structs.fields(RankProfile) if field.required}
        | {"label": "", "rank": None, "device_name": None, "host_only": False, "start": 0, "wall": 1, "device": None}
        | {"step_numbers": list(range(steps)), "idle": {}, "host": {}, "critical_path": {}, "missing": {}}
        | {"threads": 1, "zeroed_gradients": 0, "optimizer_kernels": 0, "optimizer_steps": 0}
        | {"launches": None, "compiled": None, "timeline": None, "kernels": msgspec.to_builtins(listed)},
        RankProfile,
    )


def test_changes_are_per_step_and_the_largest_comes_first() -> None:
    before = rank(2, gemm=(2_000, 4), relu=(100, 2), gone=(600, 2))
    after = rank(4, gemm=(8_000, 8), relu=(200, 4), new=(4, 4))
    assert kernel_changes(before, after) == [
        KernelChange("gemm", 1_000, 2_000, 2.0, 2.0),
        KernelChange("gone", 300, 0, 1.0, 0.0),
        KernelChange("new", 0, 1, 0.0, 1.0),
        KernelChange("relu", 50, 50, 1.0, 1.0),
    ]


def test_a_trace_without_steps_counts_as_one() -> None:
    assert kernel_changes(rank(0, gemm=(10, 1)), rank(1, gemm=(10, 1)))[0].before == 10


def test_fusing_saves_all_but_the_longest_of_neighbours_that_only_move_memory() -> None:
    add, norm, copy = "vectorized_elementwise_kernel", "layer_norm_kernel", "direct_copy_kernel"
    trace = made(
        step(1, 0, 100),
        work(add, 0, 3),
        work(norm, 3, 8),
        work(copy, 8, 10),  # 10 us in a row, of which the norm's 5 are left
        work("ampere_sgemm", 10, 30),
        work(add, 30, 34),  # alone between two products: nothing to fuse it with
        work("ampere_sgemm", 34, 50),
        work("my_kernel", 50, 51),
        work(add, 52, 54),
        work(add, 54, 57),
        work(add, 1, 9, stream=8),  # on another stream
    )
    lexicon = Lexicon.of(trace)
    owner = np.full(10, -1, np.int32)
    assert fusible(trace, lexicon, owner, window(trace, lexicon)) == (3 + 2 + 2) * 1000


@given(anything())
def test_fusing_saves_no_more_than_there_is(records: list[Record]) -> None:
    trace = made(records)
    lexicon = Lexicon.of(trace)
    owner = np.full(len(trace.device), -1, np.int32)
    found = kernels(trace, lexicon, owner, window(trace, lexicon))
    assert 0 <= fusible(trace, lexicon, owner, window(trace, lexicon)) <= sum(kernel.total for kernel in found)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60), st.integers(0, 9), st.integers(7, 8)), max_size=30),
    st.lists(st.integers(-1, 1), min_size=30, max_size=30),
)
def test_fusing_saves_of_each_run_on_a_stream_all_but_its_longest_kernel(
    works: list[tuple[int, int, int, int]], owners: list[int]
) -> None:
    names = ("layer_norm_kernel", "my_kernel", "ampere_sgemm", "Memset (Device)", "direct_copy_kernel")
    trace = made(
        step(1, 10, 50),
        slice_("aten::add", 10, 11),
        slice_("aten::mm", 11, 12),
        *(
            work(names[name], start, start + time, stream=stream, cat="gpu_memset" if name == 3 else "kernel")
            for name, start, time, stream in works
        ),
    )
    operators = ["aten::add", "aten::mm"]
    around, device, saved = window(trace, Lexicon.of(trace)), trace.device, 0
    known = [-1 if own < 0 else trace.names.index(operators[own]) for own in owners]
    owner = np.array(known[: len(device)], np.int32)
    for stream in (7, 8):
        run: list[int] = []
        for one in np.flatnonzero((device.stream == stream) & (device.start >= around.start)).tolist():
            if device.start[one] >= around.end:
                continue
            operator = trace.names[owner[one]] if owner[one] >= 0 else ""
            kind: KernelKind = "set" if device.kind[one] == WorkKind.SET else "compute"
            if moves_memory(kind, trace.names[device.name[one]], operator):
                run.append(int(device.end[one] - device.start[one]))
            else:
                saved += sum(run) - max(run, default=0)
                run = []
        saved += sum(run) - max(run, default=0)
    assert fusible(trace, Lexicon.of(trace), owner, around) == saved
