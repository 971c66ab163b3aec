from typing import Any

import pytest
from cases_made import PERCENT, case, cpu, gpu, ids, only, operator, phase, saving, training

from gpubench.diagnosis.case import Case


def repeating(part: int, held: float = 20e9, **settings: Any) -> Case:
    rank = gpu(phases=[phase("backward", device=60 * PERCENT, recompute=part)])
    environment = {"gpus": [{"memory_bytes": 80e9}]}
    metrics = {"peak_memory_reserved": held}
    return case(rank, settings=training(**settings), metrics=metrics, environment=environment)


def test_checkpointing_is_given_up_where_memory_allows() -> None:
    finding = only(repeating(20 * PERCENT, model__activation_checkpointing=True))
    assert (finding.id, finding.fix) == ("recompute", {"model.activation_checkpointing": False})
    assert saving(finding) == pytest.approx(0.2)
    assert "the clean run held 25.0 % of the GPU's memory at its peak" in finding.evidence


def test_on_a_cpu_what_is_computed_twice_is_the_hosts_time() -> None:
    rank = cpu(phases=[phase("backward", host=50 * PERCENT, recompute=20 * PERCENT)])
    finding = only(case(rank, settings=training(model__activation_checkpointing=True)))
    assert (finding.id, finding.fix) == ("recompute", {"model.activation_checkpointing": False})
    assert saving(finding) == pytest.approx(0.2)


@pytest.mark.parametrize("some", [2, "layers.*.mlp"])
def test_checkpointing_of_some_blocks_is_given_up_as_that_of_all_is(some: int | str) -> None:
    finding = only(repeating(20 * PERCENT, model__activation_checkpointing=some))
    assert finding.fix == {"model.activation_checkpointing": False}


def test_checkpointing_stays_where_memory_is_short() -> None:
    assert only(repeating(20 * PERCENT, held=60e9, model__activation_checkpointing=True)).fix == {}


def test_a_little_recomputing_is_a_fair_price() -> None:
    assert ids(repeating(5 * PERCENT)) == ["recompute"]
    assert ids(repeating(5 * PERCENT - 1)) == []


def test_memory_from_the_driver_in_every_step_is_a_finding() -> None:
    assert "empty_cache" in only(case(gpu(idle={"allocator": PERCENT}))).advice
    assert ids(case(gpu(idle={"allocator": PERCENT - 1}))) == []


def test_a_cache_that_is_switched_off_is_named_as_the_cause() -> None:
    environment = {"variables.PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    finding = only(case(gpu(idle={"allocator": 30 * PERCENT}), environment=environment))
    assert finding.cause == "PyTorch's caching allocator is switched off"


def test_operators_bound_by_memory_are_fused_by_the_compiler() -> None:
    def bound(part: int, **known: Any) -> Case:
        return case(gpu(operators=[operator("aten::gelu", part, bound="memory", of_ceiling=0.8)]), **known)

    finding = only(bound(30 * PERCENT, settings=training()))
    assert (finding.id, finding.fix) == ("memory-bound", {"performance.compile": True})
    assert finding.expected is None
    assert "at 80.0 % of the memory's speed" in finding.evidence[1]
    assert ids(bound(20 * PERCENT - 1)) == []
    assert ids(bound(30 * PERCENT, settings=training(performance__compile=True))) == []


@pytest.mark.parametrize(
    ("of_ceiling", "microseconds", "found"),
    [(0.5, 10, True), (0.49, 10, False), (0.0018, 2, False), (0.5, 9, False), (None, 10, False)],
)
def test_an_operator_far_from_the_memorys_speed_or_of_short_kernels_is_not_bound_by_it(
    of_ceiling: float | None, microseconds: int, found: bool
) -> None:
    kernels = 60 * PERCENT // (microseconds * 1000)
    tiny = operator("aten::add", 60 * PERCENT, kernels=kernels, bound="memory", of_ceiling=of_ceiling)
    assert ids(case(gpu(operators=[tiny]))) == (["memory-bound"] if found else [])
