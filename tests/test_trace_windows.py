"""What counts of a trace, and which call launched which work."""

import pytest
from traces_made import PUBLIC, call, launched, made, slice_, step, work

from gpubench.trace.load import read
from gpubench.trace.names import Lexicon, StepWindow, Window, window
from gpubench.trace.slices import launchers


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
    names = [trace.names[trace.host.name[link]] if link >= 0 else None for link in launchers(trace).tolist()]
    assert names == ["cudaLaunchKernel", "cudaLaunchKernel", None]
    assert trace.host.start[launchers(trace)[:2]].tolist() == [0, 2_000]


def test_a_number_of_zero_or_less_links_nothing() -> None:
    trace = made(
        call("cudaLaunchKernel", 0, 1, 0), call("cudaLaunchKernel", 1, 2, -1), work("a", 3, 4), work("b", 5, 6, -1)
    )
    assert launchers(trace).tolist() == [-1, -1]


def test_work_of_a_graph_has_one_launch_in_common() -> None:
    trace = made(call("cudaGraphLaunch", 0, 4, 9), work("a", 3, 4, 9), work("b", 5, 6, 9))
    assert launchers(trace).tolist() == [0, 0]


def test_of_two_calls_with_one_number_the_outer_counts() -> None:
    trace = made(call("cuLaunchKernel", 1, 2, 9), call("cudaLaunchKernel", 0, 4, 9), work("a", 3, 4, 9))
    assert trace.names[trace.host.name[launchers(trace)[0]]] == "cudaLaunchKernel"


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
