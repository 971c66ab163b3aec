"""Modes for debugging that were left on."""

import pytest
from cases_made import PERCENT, case, cpu, gpu, ids, only, training
from traces_made import Record, launched, made, slice_, step

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.trace.analyse import analyse
from gpubench.trace.profile import AnomalyChecks

NODES = 6


def backward(*, checked: int, device: bool = True) -> ProfileCase:
    """A step whose backward pass has NODES nodes, of which some are checked for NaN."""
    events: list[Record] = [step(1, 0, 1000)]
    for number in range(NODES):
        at = 100 + 100 * number
        events.append(slice_(f"autograd::engine::evaluate_function: MmBackward{number}", at, at + 90))
        events.append(slice_(f"MmBackward{number}", at + 1, at + 30))
        if device:
            events += launched("gemm", at + 10, at + 15, at + 60, number + 1)
        if number < checked:
            events.append(slice_("aten::isnan", at + 40, at + 45))
            events.append(slice_("aten::_is_any_true", at + 46, at + 50))
            events.append(slice_("aten::item", at + 51, at + 85))
    return ProfileCase(analyse([made(events)]))


@pytest.mark.parametrize("device", [False, True])
def test_checks_of_each_gradient_are_anomaly_detection_and_no_reads_of_the_program(device: bool) -> None:
    findings = diagnose(backward(checked=NODES, device=device)).findings
    (found,) = [one for one in findings if one.id == "debugging-modes"]
    assert found.title == "anomaly detection is on"
    assert "6 checks a step" in found.evidence[0]
    assert ("waits for the GPU" in found.evidence[0]) == device
    assert "synchronisation" not in {one.id for one in findings}


def test_a_program_that_looks_for_nan_itself_has_no_anomaly_detection_on() -> None:
    assert backward(checked=2).rank.anomaly is None
    assert backward(checked=0).rank.anomaly is None


@pytest.mark.parametrize(
    ("fact", "value", "is_on"),
    [
        ("math.detect_anomaly", True, True),
        ("math.detect_anomaly", False, False),
        ("math.cuda_sync_debug_mode", 1, True),
        ("math.cuda_sync_debug_mode", 0, False),
        ("math.profiler", True, True),
        ("variables.TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
        ("variables.TORCH_DISTRIBUTED_DEBUG", "OFF", False),
    ],
)
def test_a_mode_in_the_environment_of_a_run_is_a_finding(fact: str, value: object, is_on: bool) -> None:
    assert ids(case(gpu(), settings=training(), environment={fact: value})) == ["debugging-modes"] * is_on


def test_several_modes_are_one_finding() -> None:
    checked = cpu(anomaly=AnomalyChecks(60, 30 * PERCENT))
    found = only(case(checked, environment={"math.profiler": True}))
    assert found.title == "modes for debugging are on"
    assert found.severity == "high"
    assert "set_detect_anomaly" in found.advice
    assert "profiler" in found.advice
