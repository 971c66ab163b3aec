"""Where the device's time went, in closed form and on real traces."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces_made import PUBLIC, Record, launched, made, slice_, work

from gpubench.trace.analyse import analyse
from gpubench.trace.columns import Trace, WorkKind, union
from gpubench.trace.device import breakdowns, communication_work, device_spans
from gpubench.trace.load import read
from gpubench.trace.names import Lexicon, window
from gpubench.trace.profile import WallBreakdown
from gpubench.trace.ranks import collectives, kind_of

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
COPY = "Memcpy HtoD (Pinned -> Device)"


def breakdown(trace: Trace, lexicon: Lexicon, start: int, end: int) -> WallBreakdown:
    return breakdowns(device_spans(trace, lexicon), [(start, end)])[0]


def test_each_kind_of_work_counts_where_none_before_it_runs() -> None:
    trace = made(
        work("gemm", 10, 20),
        work("Memset (Device)", 20, 22, cat="gpu_memset"),
        work(NCCL, 15, 30, stream=8),
        work(COPY, 25, 40, stream=9, cat="gpu_memcpy"),
    )
    assert breakdown(trace, Lexicon.of(trace), 0, 50_000) == WallBreakdown(
        wall=50_000,
        compute=12_000,
        exposed_communication=8_000,
        exposed_copies=10_000,
        idle=20_000,
        communication=15_000,
        copies=15_000,
        hidden_communication=7_000,
    )


def test_work_counts_in_the_window_alone() -> None:
    trace = made(work("gemm", 0, 100))
    found = breakdowns(device_spans(trace, Lexicon.of(trace)), [(50_000, 120_000), (200_000, 210_000), (5, 5)])
    assert [(one.wall, one.compute, one.idle) for one in found] == [
        (70_000, 50_000, 20_000),
        (10_000, 0, 10_000),
        (0, 0, 0),
    ]


def test_kernels_that_run_at_once_count_once() -> None:
    trace = made(work("a", 0, 10), work("b", 5, 20, stream=8), work("c", 2, 3, stream=9))
    assert breakdown(trace, Lexicon.of(trace), 0, 20_000).compute == 20_000


def test_a_stream_in_the_arguments_of_an_operator_does_not_make_it_device_work() -> None:
    operator = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "triton_poi_0",
        "pid": 1,
        "tid": 1,
        "ts": 0,
        "dur": 9,
        "args": {"stream": 0},
    }
    trace = made(operator, work("triton_poi_0", 10, 11))
    assert breakdown(trace, Lexicon.of(trace), 0, 20_000).compute == 1_000


works = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 30), st.sampled_from(["gemm", NCCL, COPY]), st.integers(7, 9)),
    min_size=1,
)


@given(works, st.integers(0, 40), st.integers(0, 60))
def test_the_parts_sum_to_the_wall_whatever_runs(found: list[tuple[int, int, str, int]], start: int, wall: int) -> None:
    events = [
        work(name, at, at + long, stream=stream, cat="gpu_memcpy" if name == COPY else "kernel")
        for at, long, name, stream in found
    ]
    trace = made(events)
    one = breakdown(trace, Lexicon.of(trace), start * 1000, (start + wall) * 1000)
    parts = (one.compute, one.exposed_communication, one.exposed_copies, one.idle)
    assert sum(parts) == one.wall == wall * 1000
    assert min(*parts, one.hidden_communication) >= 0


def test_collectives_are_listed_by_name_with_what_nothing_hid() -> None:
    trace = made(
        work("gemm", 0, 10),
        work(NCCL, 5, 20, stream=8),
        work(NCCL, 30, 32, stream=8),
        work("ncclDevKernel_SendRecv", 30, 31),
    )
    lexicon = Lexicon.of(trace)
    found = collectives(trace, lexicon, window(trace, lexicon), device_spans(trace, lexicon).exposed_communication)
    assert [(one.name, one.calls, one.total, one.exposed, one.bytes) for one in found] == [
        (NCCL, 2, 17_000, 12_000, None),
        ("ncclDevKernel_SendRecv", 1, 1_000, 1_000, None),
    ]


def test_the_bytes_of_collectives_are_known_where_the_trace_has_all_of_them() -> None:
    message: Record = {"In msg nelems": 1000, "Out msg nelems": 4000, "dtype": "BFloat16"}
    trace = made(
        work("ncclA", 0, 1, 0, 7, "kernel", **message),
        work("ncclA", 1, 2, 0, 7, "kernel", **message),
        work("ncclB", 2, 3, 0, 7, "kernel", **message),
        work("ncclB", 3, 4),
    )
    lexicon = Lexicon.of(trace)
    found = collectives(trace, lexicon, window(trace, lexicon), device_spans(trace, lexicon).exposed_communication)
    assert {one.name: one.bytes for one in found} == {"ncclA": 16_000, "ncclB": None}


# HolisticTraceAnalysis (traceinsight 0.6.1) with HTA_DISABLE_NS_ROUNDING=1, in microseconds as floats:
# analysis = TraceAnalysis(trace_files={0: path}, trace_dir="", include_last_profiler_step=True)
# analysis.get_temporal_breakdown(visualize=False)[["kernel_time(us)", "idle_time(us)", "compute_time(us)"]]
# It counts memsets as no compute.
HTA = {
    "tracelens_h100_bert_small.json.gz": (3_907_825, 3_598_388, 307_197),
    "hta_a100_nccl_rank0of2.json.gz": (660_551_005, 503_050_991, 115_655_847),
    "hta_v100_ddp_rank1of2.json.gz": (1_732_965_000, 732_352_000, 620_516_000),
    "kineto_v100_resnet50_workers0.pt.trace.json.gz": (996_477_000, 392_919_000, 591_532_000),
    "kineto_v100_resnet50_workers4.pt.trace.json.gz": (801_550_000, 187_137_000, 594_868_000),
}


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize("name", HTA)
def test_real_traces_give_what_another_program_finds(name: str) -> None:
    trace = read(PUBLIC / name)
    device, lexicon = trace.device, Lexicon.of(trace)
    start, end = int(device.start.min()), int(device.end.max())
    wall, idle, compute = HTA[name]
    found = breakdown(trace, lexicon, start, end)
    assert (found.wall, found.idle) == (wall, idle)
    kernels = (device.kind == WorkKind.KERNEL) & ~communication_work(trace, lexicon)
    assert union(device.start[kernels], device.end[kernels]).length == compute


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("void vllm::cross_device_reduce_2stage<__half, 8>", "all_reduce"),
        ("two_shot_all_reduce_kernel", "all_reduce"),
        ("multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>", "all_reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", "all_gather"),
        ("c10d::_allgather_base_", "all_gather"),
        ("oneccl_reduce_scatter_small", "reduce_scatter"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("mscclpp::alltoall_kernel", "all_to_all"),
        ("symm_mem::all_to_all_vdev", "all_to_all"),
        ("deep_ep::internode::combine", "all_to_all"),
        ("void dpsk::ep::internode::dispatch<false, 8>", "all_to_all"),
        ("mori::moe::EpDispatchInterNodeKernel", "all_to_all"),
        ("moeA2ADispatchKernel", "all_to_all"),
        ("vllm::all_reduce", "all_reduce"),
        ("ncclDevKernel_SendRecv", "send_recv"),
        ("nccl:send 0->1", "send_recv"),
        ("c10d::recv_", "send_recv"),
        ("nccl:broadcast", "broadcast"),
        ("ncclDevKernel_Generic", "other"),
    ],
)
def test_collectives_are_of_a_kind_however_libraries_spell_it(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_kind_of_a_collective_is_what_the_program_asked_for() -> None:
    trace = made(
        slice_("c10d::allreduce_", 0, 10),
        slice_("nccl:all_reduce", 1, 9),
        launched("ncclKernel_SendRecv", 2, 20, 30, 1),
        slice_("c10d::alltoall_base_", 11, 19),
        launched("ncclKernel_SendRecv", 12, 30, 45, 2),
        work("ncclKernel_SendRecv", 50, 70, 901),
        launched("ncclKernel_AllGather", 21, 80, 81, 3),
    )
    lexicon = Lexicon.of(trace)
    found = collectives(trace, lexicon, window(trace, lexicon), device_spans(trace, lexicon).exposed_communication)
    # What SendRecv was where the launch is missing cannot be told, as here it stands for two other kinds.
    assert [(one.kind, one.exposed) for one in found] == [
        ("other", 20_000),
        ("all_to_all", 15_000),
        ("all_reduce", 10_000),
        ("all_gather", 1_000),
    ]


def kinds_of(*events: Record | Sequence[Record]) -> list[tuple[str, int]]:
    trace = made(*events)
    lexicon = Lexicon.of(trace)
    found = collectives(trace, lexicon, window(trace, lexicon), device_spans(trace, lexicon).exposed_communication)
    return sorted((one.kind or "", one.calls) for one in found)


def test_the_kind_of_a_few_is_not_that_of_all_kernels_of_a_name() -> None:
    """RCCL has one kernel for all collectives."""
    name = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    asked: list[Record | Sequence[Record]] = [slice_("nccl:_all_gather_base", 0, 10), launched(name, 2, 20, 30, 1)]
    others = [work(name, 40 + 10 * number, 45 + 10 * number, 900 + number) for number in range(9)]
    assert kinds_of(*asked, *others) == [("all_gather", 1), ("other", 9)]


def test_the_operator_of_a_library_says_the_kind_of_what_it_launches() -> None:
    name = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    asked: list[Record | Sequence[Record]] = [slice_("vllm::all_reduce", 0, 10), launched(name, 2, 20, 30, 1)]
    assert kinds_of(*asked, slice_("nccl:_all_gather_base", 11, 19), launched(name, 12, 40, 50, 2)) == [
        ("all_gather", 1),
        ("all_reduce", 1),
    ]


def test_a_kernel_that_only_operators_which_communicate_launch_communicates_whatever_its_name_is() -> None:
    asked: list[Record | Sequence[Record]] = [
        slice_("mylib::all_to_all_tokens", 0, 10),
        launched("ship_it", 2, 20, 30, 1),
    ]
    assert kinds_of(*asked) == [("all_to_all", 1)]
    elsewhere: list[Record | Sequence[Record]] = [
        slice_("mylib::sort_tokens", 11, 19),
        launched("ship_it", 12, 40, 50, 2),
    ]
    assert kinds_of(*asked, *elsewhere) == []
    copies: list[Record | Sequence[Record]] = [
        slice_("c10d::allreduce_", 0, 10),
        launched("void at::native::copy_kernel<float>", 2, 20, 30, 1),
    ]
    assert kinds_of(*copies) == []


def test_a_rank_of_several_without_communication_says_so_and_names_the_kernels_of_unknown_kind() -> None:
    def notes_of(*events: Record | Sequence[Record], world_size: int | None = 64) -> str:
        return " ".join(analyse([replace(made(*events), rank=0, world_size=world_size)]).ranks[0].notes)

    mystery = [work("void lib::push<4>(int*)", 0, 90, 901), work("void gemm<1>", 90, 100, 902)]
    assert "rank 0 of 64, and no communication was recorded: kernels of unknown kind take 90.0 % of the time, " in (
        notes_of(*mystery)
    )
    assert "lib::push<4>" in notes_of(*mystery, world_size=None)
    assert "unknown kind" not in notes_of(work("void gemm<1>", 0, 100, 902), world_size=None)
    assert "no communication was recorded" in notes_of(work("void gemm<1>", 0, 100, 902))
    assert "no communication" not in notes_of(*mystery, work("ncclDevKernel_AllReduce", 100, 101, 903))


def test_a_kernel_whose_launch_is_missing_is_what_others_of_its_name_are() -> None:
    trace = made(
        slice_("c10d::alltoall_base_", 0, 10), launched("ncclDevKernel_SendRecv", 2, 20, 30, 1),
        work("ncclDevKernel_SendRecv", 11, 19, 901), work("ncclDevKernel_Broadcast", 50, 60, 902),
    )  # fmt: skip
    lexicon = Lexicon.of(trace)
    found = collectives(trace, lexicon, window(trace, lexicon), device_spans(trace, lexicon).exposed_communication)
    assert [(one.kind, one.calls) for one in found] == [("all_to_all", 2), ("broadcast", 1)]
