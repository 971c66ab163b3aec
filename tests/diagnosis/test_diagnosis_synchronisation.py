from typing import Any

import pytest
from cases_made import PERCENT, case, copy, cpu, gpu, ids, only, saving, training, wait

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Unanswered


def reading(idle: int, where: str | None = "train.py:12", **known: Any) -> ProfileCase:
    found = [wait("aten::item", idle=idle, blocked=3 * idle, where=where)]
    missing = {} if where else {"stacks": "with_stack"}
    return case(gpu(idle={"synchronisation": idle}, synchronisations=found, missing=missing), **known)


def test_a_value_read_in_the_loop_is_named_with_its_line() -> None:
    finding = only(reading(6 * PERCENT))
    assert finding.id == "synchronisation"
    assert finding.evidence == [
        "aten::item (cudaStreamSynchronize) at train.py:12 in other: 1 time a step, the CPU waits "
        "18 ms a step (18.0 %), and the GPU is idle 6 ms a step (6 %)"
    ]
    assert saving(finding) == pytest.approx(0.06)


def test_a_host_that_waits_for_a_busy_device_is_no_finding() -> None:
    waits = [wait("aten::item", blocked=80 * PERCENT, idle=0)]
    assert ids(case(gpu(synchronisations=waits))) == []
    assert ids(reading(PERCENT - 1)) == []


def test_reading_the_loss_is_switched_off_where_a_setting_asks_for_it() -> None:
    settings = training(training__read_loss=True)
    assert only(reading(6 * PERCENT, settings=settings)).fix == {"training.read_loss": False}
    settings = training(training__read_loss=False)
    assert only(reading(6 * PERCENT, settings=settings)).fix == {}


def test_without_stacks_the_rule_says_which_option_names_the_line() -> None:
    findings = diagnose(reading(6 * PERCENT, where=None))
    assert [finding.id for finding in findings.findings] == ["synchronisation"]
    assert findings.unanswered == [
        Unanswered("synchronisation", "file and line of what makes the CPU wait", "with_stack")
    ]


def test_a_wait_that_a_copy_asks_for_is_told_with_the_copy() -> None:
    rank = gpu(
        idle={"synchronisation": 5 * PERCENT},
        copies=[copy("device_to_host", phase="other")],
        synchronisations=[wait("aten::copy_", idle=5 * PERCENT, blocked=5 * PERCENT)],
    )
    assert ids(case(rank)) == ["device-to-host"]


def test_the_wait_of_the_gradient_scaler_belongs_to_its_precision() -> None:
    def scaling(capability: str, idle: int = 2 * PERCENT) -> ProfileCase:
        waits = [wait("aten::item", phase="optimizer", idle=idle, blocked=idle)]
        environment = {"gpus": [{"compute_capability": capability}]}
        rank = gpu(idle={"synchronisation": idle}, synchronisations=waits)
        return case(rank, settings=training(precision="amp"), environment=environment)

    assert (only(scaling("9.0")).id, only(scaling("9.0")).fix) == ("gradient-scaler", {"precision": "bf16"})
    assert only(scaling("7.0")).fix == {}
    assert ids(scaling("9.0", PERCENT - 1)) == []


def test_launches_that_block_explain_every_wait_and_gap() -> None:
    rank = gpu(
        idle={"synchronisation": 20 * PERCENT, "python_and_launch": 30 * PERCENT},
        synchronisations=[wait("cudaLaunchKernel", idle=20 * PERCENT, blocked=50 * PERCENT)],
    )
    assert ids(case(rank, environment={"variables.CUDA_LAUNCH_BLOCKING": "1"})) == ["blocking-launches"]
    assert ids(case(rank, environment={"variables.CUDA_LAUNCH_BLOCKING": "0"})) == ["launch-bound", "synchronisation"]


def test_on_a_cpu_a_loss_that_is_read_counts_for_what_it_takes_and_the_optimizers_own_reading_does_not() -> None:
    def reading(loss: int) -> ProfileCase:
        own = wait("aten::item", call="", phase="optimizer", blocked=5 * PERCENT)
        waits = [own, wait("aten::item", call="", blocked=loss)]
        return case(cpu(synchronisations=waits), settings=training(training__read_loss=True))

    assert ids(reading(1000)) == []
    assert only(reading(2 * PERCENT)).fix == {"training.read_loss": False}
    assert saving(only(reading(2 * PERCENT))) == pytest.approx(0.02)


def test_what_the_model_reads_is_not_switched_off_with_the_loss() -> None:
    waits = [wait("aten::item", phase="forward", idle=4 * PERCENT), wait("aten::item", idle=PERCENT)]
    rank = gpu(idle={"synchronisation": 5 * PERCENT}, synchronisations=waits)
    assert only(case(rank, settings=training(training__read_loss=True))).fix == {}


def test_an_optimizer_that_reads_its_step_counts_on_a_cpu_does_not_synchronise() -> None:
    rank = cpu(synchronisations=[wait("aten::item", call="", phase="optimizer", blocked=5 * PERCENT)])
    assert ids(case(rank, settings=training(training__read_loss=False))) == []


def test_a_loss_that_is_read_is_not_taken_for_the_gradient_scalers_reading() -> None:
    scaler = wait("aten::item", phase="optimizer", idle=2 * PERCENT, blocked=2 * PERCENT)
    waits = [scaler, wait("aten::item", idle=3 * PERCENT, blocked=3 * PERCENT)]
    rank = gpu(idle={"synchronisation": 5 * PERCENT}, synchronisations=waits)
    found = diagnose(case(rank, settings=training(precision="amp", training__read_loss=True))).findings
    assert [one.id for one in found] == ["synchronisation", "gradient-scaler"]
    assert [saving(one) for one in found] == pytest.approx([0.03, 0.02])
    assert found[0].fix == {"training.read_loss": False}


def test_a_wait_of_a_copy_that_the_trace_does_not_show_is_a_wait_like_any_other() -> None:
    waits = [wait("aten::copy_", idle=5 * PERCENT, blocked=5 * PERCENT, where="train.py:9")]
    assert ids(case(gpu(idle={"synchronisation": 5 * PERCENT}, synchronisations=waits))) == ["synchronisation"]


def test_the_wait_for_the_result_of_a_forward_pass_is_that_of_the_benchmark_itself() -> None:
    found = [wait("cudaDeviceSynchronize", call="cudaDeviceSynchronize", phase="forward", idle=6 * PERCENT)]
    rank = gpu(idle={"synchronisation": 6 * PERCENT}, synchronisations=found)
    assert ids(case(rank, settings=training(model__name="gpt2", inference=True))) == []
    assert ids(case(rank, settings=training(model__name="gpt2"))) == ["synchronisation"]
    assert ids(case(rank, settings={"inference": True})) == ["synchronisation"]  # a program's own wait


def test_waits_that_the_program_asks_for_are_removed_and_not_read_less_often() -> None:
    asked = wait("cudaDeviceSynchronize", call="cudaDeviceSynchronize", idle=6 * PERCENT)
    finding = only(case(gpu(idle={"synchronisation": 6 * PERCENT}, synchronisations=[asked])))
    assert "torch.cuda.synchronize()" in finding.advice
    assert ".item()" not in finding.advice


def test_a_trace_without_steps_is_no_loop() -> None:
    read = wait("aten::item", idle=6 * PERCENT)
    finding = only(case(gpu(idle={"synchronisation": 6 * PERCENT}, synchronisations=[read], step_numbers=[])))
    assert (finding.title, "steps" in finding.advice) == ("the CPU waits for the device", False)
