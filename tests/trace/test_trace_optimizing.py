"""How much the optimizer asked for."""

import numpy as np
from traces_made import Record, launched, made, slice_, step

from gpubench.trace.columns import union
from gpubench.trace.phases import Optimizing, optimizing, phase_of, zeroing_idle
from gpubench.trace.slices import ProgramSlices

STEP, ZERO_GRAD = "Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"


def found(*parts: Record | list[Record]) -> Optimizing:
    program = ProgramSlices.of(made(*parts))
    return optimizing(program, phase_of(program))


def zeroed(at: float, thread: int = 1) -> list[Record]:
    return [slice_("aten::zero_", at, at + 4, thread=thread), slice_("aten::fill_", at + 1, at + 3, thread=thread)]


def test_only_zeros_that_zero_grad_writes_are_gradients() -> None:
    zero_grad = slice_(ZERO_GRAD, 20, 40, "user_annotation")
    assert found(step(1, 0, 100), zeroed(5), zero_grad, zeroed(22), zeroed(30)) == Optimizing(
        steps=0, kernels=4, zeroed_gradients=2, zeroing=8_000
    )


def test_on_a_device_the_time_is_of_the_work_they_launched() -> None:
    zero_grad = slice_(ZERO_GRAD, 20, 40, "user_annotation")
    work = [launched("fill", 6.5, 10, 30, 1), launched("fill", 23.5, 30, 33, 2)]
    one = found(step(1, 0, 100), zeroed(5), zero_grad, zeroed(22), *work)
    assert (one.zeroed_gradients, one.zeroing) == (1, 3_000)


def test_a_device_waits_for_the_zeros_of_zero_grad_and_for_no_other_call_of_it() -> None:
    filling = [slice_(ZERO_GRAD, 20, 40, "user_annotation"), *zeroed(22)]
    program = ProgramSlices.of(made(step(1, 0, 100), filling, slice_(ZERO_GRAD, 50, 90, "user_annotation"), zeroed(5)))
    assert zeroing_idle(program, union(np.array([0, 60_000]), np.array([30_000, 70_000]))) == 10_000


def test_launches_of_a_step_are_all_counted_though_the_device_is_behind() -> None:
    work = [launched("add", 10 + place, 90 + 5 * place, 95 + 5 * place, place + 1) for place in range(9)]
    one = found(step(1, 0, 100), slice_(STEP, 5, 30, "user_annotation"), *work)
    assert (one.steps, one.kernels) == (1, 9)
