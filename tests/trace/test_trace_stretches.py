"""Time of the main thread outside operators."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from traces_made import LOADER, PUBLIC, Record, anything, call, frame, launched, made, numbered, slice_, step, work

from gpubench.trace.columns import Trace
from gpubench.trace.cpu import PLACES, stretches
from gpubench.trace.load import read
from gpubench.trace.phases import phase_of
from gpubench.trace.profile import Python, PythonStretch
from gpubench.trace.slices import ProgramSlices

NODE = "autograd::engine::evaluate_function: "


def of(trace: Trace) -> Python | None:
    program = ProgramSlices.of(trace)
    return stretches(program, phase_of(program))


def found(*parts: Record | list[Record]) -> Python:
    python = of(made(*parts))
    assert python
    return python


def note(name: str, start: float, end: float, thread: int = 1) -> Record:
    return slice_(name, start, end, "user_annotation", thread)


def test_a_stretch_is_what_lies_between_operators_whatever_is_annotated_in_it() -> None:
    python = found(step(1, 0, 100), slice_("aten::mm", 10, 30), note("forward", 40, 50), slice_("aten::add", 90, 100))
    assert (python.total, python.stretches, python.median) == (70_000, 2, 35_000)
    assert python.longest == [
        PythonStretch(length=60_000, count=1, total=60_000, phase="other", module="", after="aten::mm", where=None),
        PythonStretch(length=10_000, count=1, total=10_000, phase="other", module="", after="", where=None),
    ]


def test_equal_layers_are_one_place() -> None:
    """Twenty-four layers that each keep the device waiting for 5 us are one cause of 120 us."""
    layers = [
        record
        for number in range(24)
        for record in (
            slice_(f"module: layers.{number}.attn (Attention)", 10 * number, 10 * number + 10, "user_annotation"),
            slice_("aten::mm", 10 * number, 10 * number + 5),
        )
    ]
    longest = found(step(1, 0, 240), layers).longest
    assert [(one.module, one.count, one.total) for one in longest] == [("layers.*.attn", 24, 120_000)]
    alone = found(step(1, 0, 10), layers[:2]).longest
    assert [(one.module, one.count) for one in alone] == [("layers.0.attn", 1)]


def test_loading_data_and_runtime_calls_are_no_python() -> None:
    python = found(
        step(1, 0, 100), note(LOADER, 0, 40), slice_("aten::stack", 10, 20),
        launched("k", 50, 51, 60, 1), call("cudaDeviceSynchronize", 60, 100),
    )  # fmt: skip
    assert (python.total, python.stretches) == (19_000, 2)
    assert [one.after for one in python.longest] == [LOADER, "cudaLaunchKernel"]


def test_waiting_for_what_autograds_thread_does_after_its_nodes_is_no_python() -> None:
    python = found(
        step(1, 0, 100), slice_("aten::ones_like", 0, 10),
        numbered(NODE + "MmBackward0", 20, 40, 1, 1, thread=2), slice_("aten::copy_", 50, 70, thread=2),
    )  # fmt: skip
    assert [(one.length, one.after) for one in python.longest] == [(30_000, "aten::copy_"), (10_000, "aten::ones_like")]


def test_waiting_for_a_collective_on_a_thread_of_its_own_is_no_python() -> None:
    assert found(step(1, 0, 100), note("gloo:all_reduce", 20, 80, thread=2)).total == 40_000


def test_before_the_first_slice_and_after_the_last_nothing_is_known() -> None:
    python = found(work("before", 0, 5), launched("k", 20, 21, 90, 1), slice_("aten::mm", 30, 40))
    assert (python.total, python.stretches) == (9_000, 1)


def test_a_stretch_is_where_most_of_it_is() -> None:
    python = found(
        step(1, 0, 100), slice_("aten::mm", 0, 10), slice_("aten::mm", 99, 100),
        note("forward", 0, 70), note("module: a (Linear)", 5, 20), note("module: b (Linear)", 20, 69),
        note("module: b.relu (ReLU)", 20, 40), note("backward", 70, 100),
    )  # fmt: skip
    (one,) = python.longest
    assert (one.length, one.phase, one.module) == (89_000, "forward", "")
    python = found(step(1, 0, 9), note("module: a (A)", 0, 9), note("module: a.b (B)", 1, 8), slice_("aten::mm", 8, 9))
    assert python.longest[0].module == "a.b"


def test_modules_known_by_stacks_are_named_by_those_that_called_them() -> None:
    events = [frame("nn.Module: Net_0", 0, 90), frame("model.py(8): forward", 1, 89), frame("nn.Module: ReLU_1", 2, 88)]
    assert found(step(1, 0, 90), *events).longest[0].module == "Net_0/ReLU_1"


@pytest.mark.parametrize(
    ("parsed", "where"),
    [(95, "train.py:25 in parse"), (80, "train.py:9 in load")],
)
def test_a_stretch_is_named_after_the_innermost_of_the_users_functions_with_nearly_all_of_it(
    parsed: int, where: str
) -> None:
    python = found(
        step(1, 0, 100),
        frame("train.py(1): <module>", 0, 100), frame("train.py(3): main", 0, 100), frame("train.py(9): load", 1, 99),
        frame("train.py(25): parse", 2, 30), frame("/usr/lib/python3.11/json/decoder.py(1): decode", 12, 28),
        frame("train.py(25): parse", 30, parsed), frame("train.py(40): strip", 31, 80),
    )  # fmt: skip
    (one,) = python.longest
    assert (one.length, one.where) == (100_000, where)


def test_a_stretch_in_no_function_but_its_module_is_named_by_what_has_most_of_it() -> None:
    module, parse = frame("train.py(1): <module>", 0, 100), frame("train.py(25): parse", 10, 70)
    assert found(step(1, 0, 100), module, parse).longest[0].where == "train.py:25 in parse"


def test_a_function_that_calls_itself_counts_once() -> None:
    calls = [frame("train.py(3): walk", 20 + depth, 60 - depth) for depth in range(5)]
    inner = frame("train.py(9): main", 0, 100)
    assert found(step(1, 0, 100), inner, *calls).longest[0].where == "train.py:9 in main"


def test_old_traces_without_frames_do_not_tell_where() -> None:
    operator = slice_("aten::mm", 1, 2) | {"args": {"Call stack": "train.py(3): main"}}
    assert found(step(1, 0, 9), operator).longest[0].where is None


def test_stretches_of_one_place_are_counted_if_they_are_about_as_long_as_its_longest() -> None:
    ends = (100, 151, 200, 210)  # 90, 50, 48 and 9 of Python after an operator of one
    events = [slice_("aten::mm", start, start + 1) for start in (9, *ends[:-1])]
    python = found(step(1, 9, 210), *events)
    assert python.longest == [
        PythonStretch(length=90_000, count=3, total=188_000, phase="other", module="", after="aten::mm", where=None)
    ]
    assert (python.total, python.stretches) == (197_000, 4)


def test_half_of_the_time_tells_few_long_stretches_from_many_short_ones() -> None:
    short = [slice_("aten::mm", at, at + 1) for at in range(0, 100, 2)]
    many = found(step(1, 0, 100), *short)
    assert (many.total, many.stretches, many.median, many.half) == (50_000, 50, 1_000, 1_000)
    few = found(step(1, 0, 500), *short)
    assert (few.total, few.stretches, few.median, few.half) == (450_000, 50, 1_000, 401_000)


def test_the_longest_places_are_listed_the_longest_first() -> None:
    edges = [0, 10, 15, 35, 38, 40, 90, 97]
    events = [slice_(f"aten::op{start}", start, start + 1) for start in edges[:-1]]
    listed = found(step(1, 0, 97), *events).longest
    assert [(one.length, one.after) for one in listed] == [
        (49_000, "aten::op40"), (19_000, "aten::op15"), (9_000, "aten::op0"), (6_000, "aten::op90"),
        (4_000, "aten::op10"),
    ]  # fmt: skip
    assert len(listed) == PLACES


def test_operators_are_counted_on_all_threads_without_those_they_call() -> None:
    python = found(
        step(1, 0, 100), slice_("aten::linear", 10, 30), slice_("aten::addmm", 12, 28), slice_("aten::mm", 40, 44),
        slice_("aten::mm", 50, 58, thread=2), slice_("aten::mm", 101, 109),
    )  # fmt: skip
    assert (python.operators, python.operator_median) == (3, 8_000)


def test_a_node_of_autograd_is_no_operator_but_what_it_calls_is() -> None:
    node = [
        numbered(NODE + "MmBackward0", 10, 90, 1, 1), numbered("MmBackward0", 12, 88, 1, 1),
        slice_("aten::mm", 20, 30), slice_("aten::mm", 40, 60),
    ]  # fmt: skip
    python = found(step(1, 0, 100), *node)
    assert (python.operators, python.operator_median, python.total) == (2, 15_000, 20_000)


def test_operators_that_load_data_are_not_counted() -> None:
    python = found(step(1, 0, 100), note(LOADER, 0, 40), slice_("aten::stack", 10, 20), slice_("aten::mm", 50, 60))
    assert python.operators == 1


def test_without_slices_of_the_host_nothing_is_told() -> None:
    assert of(made(work("k", 0, 5))) is None


def test_a_thread_that_is_never_outside_operators_has_no_stretch() -> None:
    python = found(slice_("aten::mm", 0, 10))
    assert (python.total, python.stretches, python.median, python.half, python.longest) == (0, 0, 0, 0, [])


@given(anything())
def test_whatever_overlaps_the_stretches_fit_into_the_window(events: list[Record]) -> None:
    trace = made(events)
    python = of(trace)
    if python is None:
        return
    assert 0 <= python.total <= ProgramSlices.of(trace).window.wall
    assert sum(one.total for one in python.longest) <= python.total
    assert all(0 < one.length <= one.total <= one.count * one.length for one in python.longest)
    assert 0 <= python.median <= python.half <= python.total


class Sleepy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.first(images))
        time.sleep(0.03)
        answer: torch.Tensor = self.last(features)
        return answer


class Fine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = torch.nn.LSTMCell(8, 8), torch.nn.Linear(8, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        state = None
        for _ in range(100):
            state = self.cell(images, state)
        assert state
        answer: torch.Tensor = self.last(state[0])
        return answer


def recorded(folder: Path, build: Callable[[], torch.nn.Module], with_stack: bool) -> Python:
    path, model = folder / "recorded.json", build()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        with_stack=with_stack,
    ) as profiler:
        for _ in range(3):
            with record_function("forward"):
                loss = model(torch.zeros(4, 8)).sum()
            loss.backward()
            profiler.step()
    python = of(read(path))
    assert python
    return python


def test_a_sleep_in_a_recorded_forward_is_found_where_it_is(tmp_path: Path) -> None:
    python = recorded(tmp_path, Sleepy, with_stack=True)
    longest = python.longest[0]
    assert (longest.phase, longest.module, longest.after) == ("forward", "Sleepy_0", "aten::relu")
    assert longest.where
    assert longest.where.endswith(" in forward")
    assert longest.length >= 30_000_000
    assert python.half >= 30_000_000
    assert longest.total >= 60_000_000


def test_a_recorded_loop_of_small_operators_has_no_long_stretch(tmp_path: Path) -> None:
    python = recorded(tmp_path, Fine, with_stack=False)
    assert python.operators > 2 * 100 * 3
    assert python.stretches > 1000
    assert python.longest[0].total < python.total / 2


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_waiting_for_buckets_of_a_real_distributed_backward_is_no_python() -> None:
    python = of(read(PUBLIC / "hta_a100_nccl_rank0of2.json.gz"))
    assert python
    assert python.longest[0].length < 2_000_000
    assert (python.operators, python.operator_median) == (3711, 50_994)
