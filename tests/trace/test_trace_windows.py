"""What counts of a trace, and which call launched which work."""

import pytest
from traces_made import PUBLIC, Record, call, launched, made, slice_, step, work

from gpubench.trace.analyse import analyse
from gpubench.trace.load import read
from gpubench.trace.names import Lexicon, StepWindow, Window, window


def window_of(*parts: object) -> Window:
    trace = made(*parts)  # type: ignore[arg-type]
    return window(trace, Lexicon.of(trace))


def test_steps_tile_the_window_from_the_first_to_the_end_of_the_last() -> None:
    found = window_of(step(4, 10, 20), step(3, 0, 9), step(5, 20.5, 30), work("k", 0, 50))
    assert found == Window(
        0, 30_000, [StepWindow(3, 0, 10_000), StepWindow(4, 10_000, 20_500), StepWindow(5, 20_500, 30_000)]
    )


def test_without_steps_the_window_is_that_of_the_device() -> None:
    assert window_of(slice_("aten::mm", 0, 90), work("a", 10, 20), work("b", 15, 17)) == Window(10_000, 20_000, [])


def test_without_steps_and_device_the_window_is_that_of_the_host() -> None:
    assert window_of(slice_("aten::mm", 5, 90), slice_("aten::add", 3, 4)) == Window(3_000, 90_000, [])


def test_steps_that_overlap_or_repeat_still_tile() -> None:
    found = window_of(step(1, 0, 20), step(2, 10, 30), step(2, 10, 30), step(3, 12, 12), step(3, 15, 40))
    assert [(one.start, one.end) for one in found.steps] == [(0, 10_000), (10_000, 15_000), (15_000, 40_000)]


def test_a_step_inside_another_is_none() -> None:
    assert window_of(step(1, 0, 1000), step(1, 100, 900)) == Window(0, 1_000_000, [StepWindow(1, 0, 1_000_000)])


def test_the_window_is_the_longest_run_of_steps_without_one_missing() -> None:
    found = window_of(step(1, 0, 10), step(4, 40, 50), step(5, 50, 60), step(10**30, 70, 80))
    assert found == Window(40_000, 60_000, [StepWindow(4, 40_000, 50_000), StepWindow(5, 50_000, 60_000)])


def test_a_step_is_known_by_its_name_in_old_traces_too() -> None:
    old = slice_("ProfilerStep#7", 2, 8, cat="Operator")
    assert [one.number for one in window_of(old).steps] == [7]


def test_work_is_linked_to_its_launch_by_their_number() -> None:
    trace = made(launched("a", 0, 5, 9, 3), launched("b", 2, 9, 12, 4), work("c", 20, 21, 77))
    names = [trace.names[trace.cpu.name[link]] if link >= 0 else None for link in trace.launchers.tolist()]
    assert names == ["cudaLaunchKernel", "cudaLaunchKernel", None]
    assert trace.cpu.start[trace.launchers[:2]].tolist() == [0, 2_000]


def test_a_number_of_zero_or_less_links_nothing() -> None:
    trace = made(
        call("cudaLaunchKernel", 0, 1, 0), call("cudaLaunchKernel", 1, 2, -1), work("a", 3, 4), work("b", 5, 6, -1)
    )
    assert trace.launchers.tolist() == [-1, -1]


def test_work_of_a_graph_has_one_launch_in_common() -> None:
    trace = made(call("cudaGraphLaunch", 0, 4, 9), work("a", 3, 4, 9), work("b", 5, 6, 9))
    assert trace.launchers.tolist() == [0, 0]


def test_of_two_calls_with_one_number_the_outer_counts() -> None:
    trace = made(call("cuLaunchKernel", 1, 2, 9), call("cudaLaunchKernel", 0, 4, 9), work("a", 3, 4, 9))
    assert trace.names[trace.cpu.name[trace.launchers[0]]] == "cudaLaunchKernel"


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)",
        "one_shot_all_reduce_kernel",
        "nvshmemi_transfer_rma",
        "gemm_allreduce_fused",
        "void userbuffersAllGather",
        "void custom_ar::reduce",
        "moe_all_to_all",
        "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int4*, float*)",
        "void dpsk::ep::internode::cached_notify<false>(int, int)",
        "mori::moe::EpDispatchInterNodeKernel<hip_bfloat16>",
        "mori::moe::EpCombineIntraNodeKernel<float>",
        "void kuserbuffers_pushrecv(int, int)",
        "userbuffers_fp16_sum_inplace_gpu_rr",
        "void pplx::a2a_dispatch_send_kernel<8>",
        "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<true>",
    ],
)
def test_communication_kernels_are_known_beyond_nccl(name: str) -> None:
    assert Lexicon.of(made(work(name, 0, 1))).communication_kernel.all()


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_add_all_reduce_wait_tensor_3",
        "small_reduce_kernel",
        "smallReduceKernel",
        "void custom_arange<int>",
        "void at::native::wall_gather",
        "step::kernel",
        "EpilogueDispatch",
        "void at::native::reduce_kernel<512, 1>",
        "Memcpy DtoD (Device -> Device)",
    ],
)
def test_other_kernels_are_not_taken_for_communication(name: str) -> None:
    assert not Lexicon.of(made(work(name, 0, 1))).communication_kernel.any()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("cudaStreamSynchronize", "blocking"),
        ("hipMemcpyWithStream", "blocking"),
        ("cudaMemcpy", "blocking"),
        ("cuCtxSynchronize", "blocking"),
        ("cudaMemcpyAsync", None),
        ("cudaMemcpy2DAsync_ptsz", None),
        ("cudaStreamWaitEvent", None),
        ("cudaEventQuery", None),
        ("cudaMalloc", "allocator"),
        ("cudaMallocAsync", "allocator"),
        ("hipFree", "allocator"),
        ("cuMemCreate", "allocator"),
        ("cuMemcpyDtoDAsync_v2", None),
        ("cudaMemGetInfo", None),
    ],
)
def test_runtime_calls_are_told_apart(name: str, what: str | None) -> None:
    lexicon = Lexicon.of(made(call(name, 0, 1)))
    assert {kind for kind in ("blocking", "allocator") if getattr(lexicon, kind).any()} == ({what} - {None})


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize("workers", [0, 4])
def test_a_real_training_run_has_six_steps(workers: int) -> None:
    trace = read(PUBLIC / f"kineto_v100_resnet50_workers{workers}.pt.trace.json.gz")
    assert [one.number for one in window(trace, Lexicon.of(trace)).steps] == [5, 6, 7, 8, 9, 10]


def queued(launched_at: float, start: float, number: int, first: int) -> list[Record]:
    """Kernels of 9 us without gaps worth mentioning, all launched from `launched_at` on, a microsecond each."""
    return [
        part
        for one in range(number)
        for part in launched("k", launched_at + one, start + 10 * one, start + 10 * one + 9, first + one)
    ]


def test_a_hole_after_stray_work_is_cut_off_where_the_rest_was_queued() -> None:
    """As where the recording of the device begins late: half a second of queued work ran unrecorded."""
    found = analyse([made(launched("stray", 0, 5, 9, 1), *queued(20, 500_000, 100, 2))]).ranks[0]
    assert (found.start, found.wall) == (500_000_000, 999_000)
    assert found.device is not None
    assert found.device.idle < found.wall / 5
    assert any(
        note.startswith("the window begins where recorded work begins: 500 ms before it") for note in found.notes
    )


def test_a_hole_before_stray_work_at_the_end_is_cut_off_too() -> None:
    found = analyse([made(*queued(0, 200, 100, 1), *launched("stray", 150, 500_000, 500_009, 500))]).ranks[0]
    assert (found.start, found.wall) == (200_000, 999_000)
    assert any(note.startswith("the window ends where recorded work ends: 499 ms after it") for note in found.notes)


def test_steps_with_a_hole_are_left_out_as_whole_steps() -> None:
    steps = [step(number, number * 10_000, number * 10_000 + 10_000) for number in range(3)]
    parts = (*launched("stray", 5, 10, 15, 1), *queued(20, 9_000, 2_100, 2))
    found = analyse([made(*steps, *parts)]).ranks[0]
    assert (found.step_numbers, found.start, found.wall) == ([1, 2], 10_000_000, 20_000_000)


@pytest.mark.parametrize(
    "parts",
    [
        (*launched("stray", 0, 5, 9, 1), *queued(499_000, 500_000, 100, 2)),  # the host launched nothing
        (*queued(0, 10, 100, 1), *queued(200, 500_000, 100, 200)),  # not stray, but half of the work
        (*launched("stray", 0, 5, 9, 1), *queued(20, 50, 100, 2)),  # hardly a gap
    ],
)
def test_other_gaps_stay_in_the_window(parts: tuple[Record, ...]) -> None:
    trace = made(*parts)
    found = analyse([trace]).ranks[0]
    assert (found.start, found.wall) == (window(trace, Lexicon.of(trace)).start, window(trace, Lexicon.of(trace)).wall)


def test_time_after_a_launch_whose_work_was_not_recorded_is_not_the_hosts() -> None:
    """Of the 1,000 us between two kernels, work may have run in the 900 after the launch that the trace lacks."""
    lost = [call("cudaLaunchKernel", 110, 120, 50)]
    parts = (*queued(0, 10, 1, 1), *launched("k", 1_015, 1_020, 1_029, 2))
    idle = analyse([made(*parts, *lost)]).ranks[0].idle
    assert (idle["queued"], idle["python_and_launch"]) == (900_000, 101_000)
    assert analyse([made(*parts)]).ranks[0].idle["python_and_launch"] == 997_000
    (note,) = [one for one in analyse([made(*parts, *lost)]).ranks[0].notes if "launches have no" in one]
    assert note.startswith("1 of 2 launches have no GPU work in the trace")


def test_a_launch_at_the_end_of_the_recording_or_of_a_function_of_the_host_is_not_missed() -> None:
    parts = (*queued(0, 10, 3, 1), call("cudaLaunchHostFunc", 1, 1.5, 80), call("cudaLaunchKernel", 50, 51, 90))
    assert not any("launches have no" in note for note in analyse([made(*parts)]).ranks[0].notes)
