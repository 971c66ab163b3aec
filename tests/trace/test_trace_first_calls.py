"""Calls that a program makes only in its first steps, and the idle time under them."""

from typing import Any

import pytest
from traces_made import Record, call, launched, made, slice_, step, work

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Findings
from gpubench.trace.analyse import analyse
from gpubench.trace.profile import RankProfile

MS = 1_000_000


def rank(*parts: Record | list[Record]) -> RankProfile:
    return analyse([made(*parts)]).ranks[0]


def diagnosed(*parts: Record | list[Record]) -> Findings:
    return diagnose(ProfileCase(analyse([made(*parts)])))


def steady(start: float, number: int, first: int, names: tuple[str, ...] = ("gemm", "norm")) -> list[Record]:
    """Launches of 10 us each, for kernels of 10 us, from `start` on; correlations begin at `first`."""
    found: list[Record] = []
    for one in range(number):
        at = start + 20 * one
        found.append(slice_("aten::mm", at, at + 12))
        found += [
            call("cudaLaunchKernel", at, at + 10, first + one),
            work(names[one % 2], at + 11, at + 18, first + one),
        ]
    return found


def slow_launch(start: float, length: float, kernel: str, correlation: int) -> list[Record]:
    return [
        slice_("aten::add", start, start + length + 1),
        call("cudaLaunchKernel", start, start + length, correlation),
        work(kernel, start + length + 1, start + length + 10, correlation),
    ]


def test_the_first_launch_of_a_kernel_that_loads_its_code_is_no_slow_launch() -> None:
    cold = [*steady(0, 2, 1), *slow_launch(100, 1_600_000, "add_kernel", 50), *steady(1_600_200, 100, 60)]
    found = rank(*cold)
    assert found.idle["first_calls"] == pytest.approx(1_600 * MS, rel=0.001)
    assert [(one.kind, one.what, one.calls) for one in found.first_calls] == [
        ("load", "cudaLaunchKernel of add_kernel", 1)
    ]
    findings = diagnosed(*cold)
    assert findings.headline == "GPU idle 100 %: 100 % of it goes to first calls, as the program was not warmed up"
    assert [finding.id for finding in findings.findings] == ["not-warmed-up"]
    assert "torch.profiler.schedule(wait=1, warmup=3, active=3)" in findings.findings[0].advice


def test_a_slow_launch_of_a_kernel_that_ran_before_is_a_slow_launch() -> None:
    """Another process may have had the core, or the host's memory was being swapped."""
    found = rank(*steady(0, 20, 1), *slow_launch(1_000, 50_000, "gemm", 50), *steady(52_000, 20, 60))
    assert (found.idle["first_calls"], found.first_calls) == (0, [])
    assert found.idle["python_and_launch"] > 49 * MS


def test_a_slow_launch_of_a_kernel_that_ran_without_its_launch_in_the_trace_is_no_first_one() -> None:
    found = rank(work("late", 0, 5), *steady(10, 2, 1), *slow_launch(100, 50_000, "late", 50))
    assert found.first_calls == []


@pytest.mark.parametrize(
    ("name", "length", "kind"),
    [
        ("cuModuleLoadData", 700, "load"),
        ("cuLibraryLoadData", 700, "load"),
        ("hipModuleLoadData", 700, "load"),
        ("cudaStreamCreateWithFlags", 2_000, "initialise"),
        ("cudaFuncGetAttributes", 2_000, "initialise"),
        ("cudaGetFuncBySymbol", 2_000, "initialise"),
        ("hipGetFuncBySymbol", 2_000, "initialise"),
        ("cudaFree", 300_000, "initialise"),
        ("cudaGraphInstantiate", 500, "capture"),
    ],
)
def test_calls_that_load_and_create_are_known_by_their_names_and_length(name: str, length: float, kind: str) -> None:
    found = rank(*steady(0, 4, 1), call(name, 100, 100 + length), *steady(110 + length, 4, 10))
    assert found.idle["first_calls"] == length * 1000
    assert {one.kind for one in found.first_calls} <= {kind}
    short = rank(*steady(0, 4, 1), call("cudaFuncGetAttributes", 100, 103), *steady(110, 4, 10))
    assert short.idle["first_calls"] == 0


def test_memory_that_the_driver_gives_all_the_time_is_no_first_call() -> None:
    """As with a program that empties its cache in each step."""
    freed = [part for one in range(20) for part in (call("cudaFree", one * 30_000, one * 30_000 + 24_000),)]
    freed += [part for one in range(20) for part in steady(one * 30_000 + 25_000, 2, 1 + 2 * one)]
    findings = diagnosed(*freed)
    assert [finding.id for finding in findings.findings][:1] == ["allocator"]
    assert "not-warmed-up" not in {finding.id for finding in findings.findings}


def convolution(start: float, correlation: int, waits: int, name: str = "aten::cudnn_convolution") -> list[Record]:
    """A convolution that measures as many algorithms, each for 2 ms with the device idle for all but 50 us."""
    found: list[Record] = []
    for one in range(waits):
        at = start + 2_000 * one
        found += launched(f"candidate_{one}", at, at + 5, at + 55, correlation + one)
        found.append(call("cudaEventSynchronize", at + 10, at + 1_990))
    end = start + 2_000 * waits
    return [slice_(name, start, end + 20), *found, *launched("implicit_gemm", end, end + 5, end + 15, correlation + 90)]


def test_the_waits_of_a_convolution_that_tries_algorithms_are_not_the_programs() -> None:
    findings = diagnosed(*steady(0, 4, 1), *convolution(100, 100, 5), *steady(10_200, 20, 300))
    assert findings.findings[0].id == "not-warmed-up"
    assert not {"synchronisation", "launch-bound", "small-batch"} & {finding.id for finding in findings.findings}
    assert "aten::cudnn_convolution measures algorithms: 1 call" in findings.findings[0].evidence[1]
    assert "cudnn.benchmark = False" in findings.findings[0].advice


def test_waits_of_other_operators_stay_the_programs() -> None:
    findings = diagnosed(*steady(0, 4, 1), *convolution(100, 100, 5, "aten::nonzero"), *steady(10_200, 200, 300))
    assert "not-warmed-up" not in {finding.id for finding in findings.findings}


def test_the_capture_of_a_graph_launches_nothing_that_runs() -> None:
    captured = [call("cudaLaunchKernel", 1_000 + 20 * one, 1_010 + 20 * one, 500 + one) for one in range(300)]
    capture = [call("cudaStreamBeginCapture", 990, 995), *captured, call("cudaStreamEndCapture", 7_000, 7_010)]
    findings = diagnosed(*steady(0, 20, 1), *capture, *steady(7_100, 20, 900))
    assert findings.findings[0].id == "not-warmed-up"
    assert "capture and instantiation of CUDA graphs: 1 call, 6.02 ms" in findings.findings[0].evidence[1]


def test_compiling_in_the_first_step_is_no_recompilation() -> None:
    def steps(compiled_at: float) -> tuple[Any, ...]:
        return (
            *(step(number, number * 10_000, number * 10_000 + 10_000) for number in range(3)),
            *(part for number in range(3) for part in steady(number * 10_000 + 9_000, 40, 1 + 50 * number)),
            slice_("compile_inner (dynamo_timed)", compiled_at, compiled_at + 5_000, cat="user_annotation"),
        )

    first, later = diagnosed(*steps(2_000)), diagnosed(*steps(12_000))
    assert {"not-warmed-up", "recompilation"} & {one.id for one in first.findings} == {"not-warmed-up"}
    assert {"not-warmed-up", "recompilation"} & {one.id for one in later.findings} == {"recompilation"}


def test_a_launch_whose_kernel_began_at_once_loaded_nothing() -> None:
    """As the first launch of a recording, which returns late."""
    parts = [slice_("aten::add", 0, 2_000), call("cudaLaunchKernel", 0, 1_900, 1), work("k", 10, 14, 1)]
    assert rank(*parts, *steady(2_100, 4, 10)).first_calls == []


def test_a_first_call_that_began_before_the_window_is_named() -> None:
    found = rank(*steady(0, 4, 1), call("cuModuleLoadData", 50, 900), *steady(1_000, 4, 10), step(1, 500, 1_100))
    assert [(one.what, one.host) for one in found.first_calls] == [("cuModuleLoadData", 400_000)]
