from typing import Any

import pytest
from cases_made import (
    PERCENT,
    STEPS,
    case,
    cpu,
    gpu,
    ids,
    launches,
    only,
    phase,
    piping,
    python,
    saving,
    stretch,
    training,
)

from gpubench.diagnosis.case import ProfileCase


def short_work(total: int, held: float = 20e9, **known: Any) -> ProfileCase:
    rank = gpu(launches=launches(short=990, short_total=total))
    environment = {"gpus": [{"memory_bytes": 80e9}]}
    return case(rank, metrics={"peak_memory_reserved": held}, environment=environment, **known)


def test_a_busy_gpu_with_short_kernels_gets_a_larger_batch() -> None:
    finding = only(short_work(80 * PERCENT, settings=training(training__batch_size=8)))
    assert (finding.id, finding.fix) == ("small-batch", {"training.batch_size": 16})
    assert saving(finding) == pytest.approx(0.4)  # per sample: twice as many in the same time
    assert ids(short_work(50 * PERCENT - 1)) == []


def test_a_few_short_kernels_tell_nothing_of_a_batch() -> None:
    def short(number: int) -> list[str]:
        return ids(case(gpu(launches=launches(short=number, works=number, short_total=100 * PERCENT))))

    assert (short(19), short(20)) == ([], ["small-batch"])


def test_a_batch_is_not_doubled_where_memory_is_half_full() -> None:
    assert only(short_work(80 * PERCENT, held=50e9, settings=training(training__batch_size=8))).fix == {}


def test_micro_batches_grow_no_larger_than_the_samples_there_are() -> None:
    settings = piping(work__micro_batch=3, work__samples=8)
    assert only(short_work(80 * PERCENT, settings=settings)).fix == {"work.micro_batch": 6}
    settings = piping(work__micro_batch=6, work__samples=8)
    assert only(short_work(80 * PERCENT, settings=settings)).fix == {}


def stepping(optimizer: int, median: int = 2_650, **known: Any) -> ProfileCase:
    """A CPU that spends so much of the step in a fused optimizer, and a tenth between operators."""
    rank = cpu(
        host={"optimizer": optimizer, "python": 10 * PERCENT},
        phases=[phase("optimizer", host=optimizer)],
        python=python(operators=200 * STEPS, operator_median=median, median=1_700),
    )
    settings = training(training__batch_size=1, training__optimizer_impl="fused", **known.pop("settings", {}))
    return case(rank, settings=settings, **known)


def test_on_a_cpu_a_batch_shares_what_every_step_costs_anyhow() -> None:
    finding = only(stepping(65 * PERCENT))
    assert (finding.id, finding.fix) == ("small-batch", {"training.batch_size": 4})
    assert saving(finding) == pytest.approx(0.75 * 0.75)
    assert finding.evidence[:2] == [
        "a batch has 1 sample",
        "75.0 % of the step does not grow with the batch size: 65.0 % in the optimizer and 10.0 % in "
        "Python and in calling operators",
    ]
    assert ids(stepping(40 * PERCENT)) == ["small-batch"]
    assert ids(stepping(40 * PERCENT - 1)) == []


def test_a_batch_whose_operators_take_their_time_is_large_enough() -> None:
    assert ids(stepping(65 * PERCENT, median=5_001)) == []


def test_what_recording_cost_does_not_make_a_batch_small() -> None:
    assert ids(stepping(40 * PERCENT, overhead=0.05)) == []


def test_long_stretches_of_python_do_not_make_a_batch_small() -> None:
    slept = python(stretch(60 * PERCENT), operators=200 * STEPS, operator_median=2_650)
    assert ids(case(cpu(host={"python": 60 * PERCENT}, python=slept))) == ["python-bound"]
