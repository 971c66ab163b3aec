"""Whatever a trace holds, its parts sum, and no question about it is an error."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces_made import PUBLIC, Record, made, slice_, work

from gpubench.trace.analyse import timeline
from gpubench.trace.columns import Trace, join
from gpubench.trace.copies import copies, synchronisations
from gpubench.trace.cpu import compiled, cpu_parts, modules
from gpubench.trace.load import read
from gpubench.trace.operators import operators
from gpubench.trace.phases import phase_of, phases
from gpubench.trace.slices import ProgramSlices

NAMES = (
    "ProfilerStep#1", "ProfilerStep#2", "enumerate(DataLoader)#x", "Optimizer.step#SGD.step", "forward", "backward",
    "module:  (Net)", "module: a.b (Linear)", "nn.Module: Net_0", "nn.Module: Linear_1", "train.py(3): step",
    "autograd::engine::evaluate_function: MmBackward0", "CheckpointFunctionBackward", "aten::mm", "aten::copy_",
    "aten::item", "cudaMemcpyAsync", "cudaStreamSynchronize", "Torch-Compiled Region: 0/0", "gloo:all_reduce",
    "_compile.compile_inner (dynamo_timed)",
)  # fmt: skip
HOST_CATEGORIES = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "Operator")
WORKS = (
    ("gemm", "kernel"),
    ("ncclKernel_AllReduce", "kernel"),
    ("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy"),
    ("Memcpy DtoD", "gpu_memcpy"),
    ("Memset", "gpu_memset"),
)
LARGE = 500_000  # bytes of a real trace that takes a second
TIMES = st.tuples(st.integers(0, 60), st.integers(0, 40))
ARGUMENTS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "Sequence number": st.integers(-1, 3),
        "Fwd thread id": st.integers(-1, 2),
        "correlation": st.integers(-1, 4),
        "Input Dims": st.sampled_from([[[4, 4], [4, 4]], [[], [2]], "?", [None, 3], [[-1]], [[4, 4], [4, 2], []]]),
        "Input type": st.sampled_from([["float", "float"], ["c10::Half", "float"], [], "float"]),
        "Input Strides": st.sampled_from([[[4, 1], [1, 4]], [[0, 0]], 7]),
        "Call stack": st.sampled_from(["train.py(3): step;torch/x.py(1): f", ";", "("]),
    },
)
HOSTS = st.tuples(st.sampled_from(NAMES), st.sampled_from(HOST_CATEGORIES), TIMES, st.integers(1, 2), ARGUMENTS)
DEVICES = st.tuples(st.sampled_from(WORKS), TIMES, st.integers(-1, 4), st.integers(7, 8))


def on_host(found: tuple[str, str, tuple[int, int], int, dict[str, Any]]) -> Record:
    name, category, (start, length), thread, arguments = found
    return slice_(name, start, start + length, category, thread, **arguments)


def on_device(found: tuple[tuple[str, str], tuple[int, int], int, int]) -> Record:
    (name, category), (start, length), correlation, stream = found
    return work(name, start, start + length, correlation, stream, category)


def check(trace: Trace) -> None:
    """Sums are exact, nothing is negative, and nothing raises."""
    program = ProgramSlices.of(trace)
    wall, known = program.window.wall, phase_of(program)
    by_phase = phases(program, known)
    assert sum(phase.host for phase in by_phase) == wall
    assert all(0 <= phase.device <= wall and phase.recompute >= 0 for phase in by_phase)
    assert trace.cpu_only or all(phase.recompute <= phase.device for phase in by_phase)
    parts = cpu_parts(program, known)
    assert sum(spans.length for spans in parts.values()) == wall == join(*parts.values()).length
    found_modules = modules(program, known)
    assert all(min(one.host, one.forward, one.backward, one.recompute, one.own) >= 0 for one in found_modules)
    assert sum(one.own for one in found_modules) <= program.effort.sum()
    found_operators = operators(program)
    assert all(min(one.host, one.device, one.kernels) >= 0 for one in found_operators)
    assert all(one.of_ceiling is None or 0 < one.of_ceiling <= 1 for one in found_operators)
    assert all(min(one.host, one.device, one.calls - 1) >= 0 for one in copies(program, known))
    waits = synchronisations(program, known, np.zeros(len(trace.cpu), np.int64))
    assert all(one.blocked >= 0 for one in waits)
    compilations = compiled(program)
    assert compilations is None or 0 <= compilations.compiling <= wall
    picture = timeline(program, known, {})
    for lane in picture.lanes if picture else ():
        assert all(0 <= box.start < box.end <= wall for box in lane.boxes)
        assert all(a.start <= b.start for a, b in pairwise(lane.boxes))


@given(st.lists(HOSTS, max_size=25), st.lists(DEVICES, max_size=10))
def test_parts_of_any_trace_sum(hosts: list[Any], devices: list[Any]) -> None:
    check(made(slice_("aten::add", 0, 1), [on_host(one) for one in hosts], [on_device(one) for one in devices]))


def test_a_trace_of_device_work_alone_is_a_program() -> None:
    check(made(work("gemm", 10, 20), work("Memcpy HtoD (Pageable -> Device)", 15, 30, cat="gpu_memcpy")))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=pytest.mark.stress if path.stat().st_size > LARGE else ())
        for path in sorted(PUBLIC.glob("*.json.gz"))
    ],
)
def test_parts_of_a_real_trace_sum(path: Path) -> None:
    check(read(path))
