from typing import Any

import pytest
from cases_made import PERCENT, STEPS, WALL, case, cpu, gpu, ids, only, operator, phase, saving, training

from gpubench.diagnosis.case import ProfileCase

TWO_CORES = {"cpu.usable_cores": 2}


def stepping(part: int, **settings: Any) -> ProfileCase:
    rank = cpu(host={"optimizer": part}, phases=[phase("optimizer", host=part)], optimizer_kernels=620 * STEPS)
    settings = {"performance__cpu_threads": 2, "training__optimizer_impl": "auto"} | settings
    return case(rank, settings=training(**settings), environment=TWO_CORES)


@pytest.mark.parametrize("impl", ["auto", "loop", "foreach"])
def test_on_a_cpu_whatever_is_not_fused_can_be(impl: str) -> None:
    finding = only(stepping(12 * PERCENT, training__optimizer_impl=impl))
    assert (finding.id, finding.fix) == ("unfused-optimizer", {"training.optimizer_impl": "fused"})
    assert "one optimizer step consists of 620 operators" in finding.evidence
    assert saving(finding) == pytest.approx(0.9 * 0.12)  # one pass over the parameters remains


def test_what_auto_means_on_a_cpu_is_said() -> None:
    evidence = only(stepping(12 * PERCENT, training__optimizer_impl="auto")).evidence
    assert "training.optimizer_impl is auto, which is a loop on a CPU" in evidence
    assert "training.optimizer_impl is loop" in only(stepping(12 * PERCENT, training__optimizer_impl="loop")).evidence


def test_a_fused_optimizer_may_take_its_time() -> None:
    assert ids(stepping(30 * PERCENT, training__optimizer_impl="fused")) == []


def test_a_twentieth_of_the_step_in_the_optimizer_is_usual() -> None:
    assert ids(stepping(5 * PERCENT)) == ["unfused-optimizer"]
    assert ids(stepping(5 * PERCENT - 1)) == []


def on_gpu(kernels: int, **parts: Any) -> ProfileCase:
    settings = parts.pop("settings", None)
    rank = gpu(phases=[phase("optimizer", device=15 * PERCENT)], optimizer_kernels=kernels * STEPS, **parts)
    return case(rank, settings=settings)


def test_auto_is_fused_on_a_gpu() -> None:
    assert ids(on_gpu(620, settings=training(training__optimizer_impl="auto"))) == []
    assert ids(on_gpu(620, settings=training(training__optimizer_impl="loop"))) == ["unfused-optimizer"]


def test_of_a_trace_from_elsewhere_the_launches_tell() -> None:
    assert only(on_gpu(100)).fix == {}
    assert ids(on_gpu(99)) == []
    assert ids(on_gpu(620, operators=[operator("aten::_fused_adamw_", 15 * PERCENT)])) == []


def test_the_clean_runs_optimizer_time_is_the_one_quoted() -> None:
    settings = training(training__optimizer_impl="loop")
    clean = case(gpu(), settings=settings, metrics={"step_time": 0.1, "phase_optimizer": 0.01})
    assert only(clean).evidence[0] == "the optimizer takes 10 ms of a step without the profiler (10.0 %)"


def test_gradients_filled_with_zeros_are_better_dropped() -> None:
    zeroing = gpu(zeroed_gradients=60 * STEPS, zeroing=2 * PERCENT)
    finding = only(case(zeroing))
    assert finding.id == "zeroed-gradients"
    assert saving(finding) == pytest.approx(0.08)  # and what adding to them takes
    assert only(case(gpu(zeroed_gradients=STEPS))).expected is None
    assert ids(case(gpu(zeroed_gradients=STEPS - 1))) == []


def test_a_gpu_that_waits_for_zeros_does_not_wait_for_launches() -> None:
    idle = {"python_and_launch": 14 * PERCENT}
    finding = only(case(gpu(idle=idle, zeroed_gradients=60 * STEPS, zeroing=PERCENT, zeroing_idle=5 * PERCENT)))
    assert finding.id == "zeroed-gradients"  # the 9 % that are left may be the profiler's
    assert saving(finding) == pytest.approx(0.04 + 0.05)
    assert finding.evidence[-1] == "the GPU is idle 5 ms a step (5 %) while zero_grad launches that"


def test_what_else_the_program_fills_with_zeros_is_not_charged_to_gradients() -> None:
    filling = cpu(
        zeroed_gradients=STEPS, zeroing=PERCENT // 100, operators=[operator("aten::zero_", 0, host=WALL // 2)]
    )
    assert saving(only(case(filling))) == pytest.approx(0.0004)


def test_an_optimizer_whose_kernels_are_a_small_part_of_its_time_says_what_the_rest_is() -> None:
    rank = gpu(phases=[phase("optimizer", device=5 * PERCENT)], optimizer_kernels=1000 * STEPS)
    found = only(case(rank, metrics={"step_time": 0.1, "phase_optimizer": 0.035}))
    assert found.id == "unfused-optimizer"
    assert "(35.0 %); its kernels take 5 % of the recorded ones, the rest is launching them" in found.evidence[0]
