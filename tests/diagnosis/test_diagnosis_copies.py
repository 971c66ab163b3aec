"""Copies between host and device: causes, and what only looks like one."""

from typing import Any

import pytest
from cases_made import PERCENT, case, copy, gpu, ids, only, saving, training, wait

from gpubench.diagnosis.case import ProfileCase
from gpubench.trace.profile import Copy


def batches(pinned: bool, **parts: Any) -> Copy:
    return copy("host_to_device", pinned=pinned, bytes=40 << 20, **parts)


def pageable(percent: float, **settings: Any) -> ProfileCase:
    rank = gpu(idle={"pageable_copy": round(percent * PERCENT)}, copies=[batches(pinned=False, device=5 * PERCENT)])
    return case(rank, settings=training(**settings))


def test_a_copy_from_pageable_memory_is_cured_by_pinning() -> None:
    finding = only(pageable(8, data__pin_memory=False))
    assert (finding.id, finding.fix, finding.severity) == ("pinning", {"data.pin_memory": True}, "medium")
    assert saving(finding) == pytest.approx(0.08)
    assert finding.evidence == [
        "aten::copy_: 1 time a step in host_to_device, 4 MiB in 5 ms a step (5 %)",
        "the GPU is idle 8 ms a step (8 %) during these copies",
    ]


def test_below_a_percent_of_the_step_pageable_memory_is_no_finding() -> None:
    assert ids(pageable(1.0, data__pin_memory=False)) == ["pinning"]
    assert ids(pageable(0.9, data__pin_memory=False)) == []


def test_what_pageable_memory_brings_with_it_is_not_a_second_finding() -> None:
    symptoms = gpu(
        idle={"pageable_copy": 5 * PERCENT, "synchronisation": 10 * PERCENT},
        exposed_copies=5 * PERCENT,
        copies=[batches(pinned=False, device=7 * PERCENT, where="train.py:3")],
        synchronisations=[
            wait("aten::copy_", phase="host_to_device", idle=10 * PERCENT, blocked=12 * PERCENT, where="train.py:3"),
        ],
    )
    finding = only(case(symptoms, settings=training(data__pin_memory=False)))
    assert finding.id == "pinning"
    assert saving(finding) == pytest.approx(0.2)
    assert any("cudaStreamSynchronize at train.py:3" in sentence for sentence in finding.evidence)


def test_tensors_that_pin_memory_did_not_reach_get_no_override() -> None:
    finding = only(pageable(8, data__pin_memory=True))
    assert finding.fix == {}
    assert "applies only to tensors that the DataLoader can see" in finding.cause


def test_a_trace_from_elsewhere_is_told_the_words_of_pytorch() -> None:
    rank = gpu(idle={"pageable_copy": 8 * PERCENT}, copies=[batches(pinned=False, device=PERCENT)])
    finding = only(case(rank))
    assert finding.fix == {}
    assert "DataLoader(pin_memory=True)" in finding.advice


def test_a_wait_for_a_copy_from_pinned_memory_is_a_blocking_copy() -> None:
    def blocking(idle: int) -> ProfileCase:
        waits = [wait("aten::copy_", phase="host_to_device", idle=idle, blocked=2 * idle, where="train.py:31")]
        return case(gpu(idle={"synchronisation": idle}, copies=[batches(pinned=True)], synchronisations=waits))

    finding = only(blocking(3 * PERCENT))
    assert finding.id == "blocking-copies"
    assert "non_blocking=True" in finding.advice
    assert finding.evidence == ["aten::copy_ blocks the CPU 6 ms a step (6 %) in cudaStreamSynchronize at train.py:31"]
    assert ids(blocking(PERCENT - 1)) == []


def test_reading_tensors_back_is_told_from_sending_them() -> None:
    def returning(idle: int) -> ProfileCase:
        rank = gpu(
            idle={"synchronisation": idle},
            copies=[
                copy("device_to_host", phase="other", bytes=10 << 20, where="train.py:40"),
                copy("host_to_device", phase="other", pinned=True, where="train.py:30"),
            ],
            synchronisations=[wait("aten::to", idle=idle, blocked=idle, where="train.py:40")],
        )
        return case(rank)

    assert only(returning(4 * PERCENT)).id == "device-to-host"
    assert ids(returning(PERCENT - 1)) == []


def test_a_copy_to_the_device_in_the_forward_pass_is_a_tensor_left_on_the_host() -> None:
    def left_behind(idle: int, **other: int) -> ProfileCase:
        copies = [
            copy("host_to_device", phase="forward", pinned=False, host=90 * PERCENT, device=PERCENT, where="net.py:8")
        ]
        return case(gpu(idle={"pageable_copy": idle} | other, copies=copies))

    finding = only(left_behind(3 * PERCENT))
    assert saving(finding) == pytest.approx(0.03)
    assert finding.id == "host-tensors"
    assert "net.py:8" in finding.evidence[0]
    assert "register_buffer" in finding.advice
    assert ids(left_behind(PERCENT - 1)) == []
    assert ids(left_behind(0, data_loader=4 * PERCENT)) == []  # the device has enough to do meanwhile


def test_copies_to_the_device_that_nothing_hides_cost_time_too() -> None:
    copies = [
        copy("host_to_device", phase="forward", pinned=True, device=2 * PERCENT),
        copy("device_to_host", phase="other", device=40 * PERCENT, pinned=False),  # not of the idle time's copies
    ]
    found = case(gpu(exposed_copies=30 * PERCENT, idle={"pageable_copy": 3 * PERCENT}, copies=copies))
    assert saving(only(found)) == pytest.approx(0.02)


def test_pinning_batches_is_no_cure_for_what_the_model_copies() -> None:
    copies = [
        batches(pinned=False, device=PERCENT),
        copy("host_to_device", phase="forward", pinned=False, host=30 * PERCENT, device=39 * PERCENT),
    ]
    findings = ids(case(gpu(idle={"pageable_copy": 30 * PERCENT}, copies=copies)))
    assert findings == ["host-tensors"]
