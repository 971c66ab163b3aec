from typing import Any

import pytest
from cases_made import PERCENT, STEPS, case, cpu, gpu, ids, only, saving, training

from gpubench.diagnosis.case import Case
from gpubench.diagnosis.diagnose import diagnose
from gpubench.findings import Unanswered
from gpubench.trace.profile import Collective, Straggler


def reducing(exposed: int, calls: int = 4, stragglers: list[Straggler] | None = None, **settings: Any) -> Case:
    collectives = [Collective("ncclDevKernel_AllReduce_Sum_f32_RING_LL", calls * STEPS, 2 * exposed, exposed, None)]
    rank = gpu(exposed_communication=exposed, communication=2 * exposed, collectives=collectives)
    settings = {"distributed__world_size": 4, "distributed__bucket_mb": 25.0} | settings
    return case(rank, settings=training(**settings), stragglers=stragglers)


def test_few_collectives_set_out_earlier_in_smaller_buckets() -> None:
    finding = only(reducing(20 * PERCENT, calls=1))
    assert (finding.id, finding.fix) == ("exposed-communication", {"distributed.bucket_mb": 6.25})
    assert "50.0 % of it is hidden behind computing" in finding.evidence[0]


def test_many_collectives_are_joined_in_larger_buckets() -> None:
    assert only(reducing(20 * PERCENT, calls=9)).fix == {"distributed.bucket_mb": 100.0}
    assert only(reducing(20 * PERCENT, calls=9, distributed__strategy="fsdp2")).fix == {}


def test_collectives_of_a_fair_number_leave_only_to_send_less() -> None:
    assert only(reducing(20 * PERCENT, calls=8)).fix == {}


def test_some_communication_at_the_end_of_a_step_is_usual() -> None:
    assert ids(reducing(5 * PERCENT)) == ["exposed-communication"]
    assert ids(reducing(5 * PERCENT - 1)) == []


def test_gradients_summed_after_every_micro_batch_are_the_cause_and_the_waiting_is_not() -> None:
    finding = only(reducing(20 * PERCENT, training__grad_accumulation=4, distributed__sync_gradients="each"))
    assert (finding.id, finding.fix) == ("repeated-reduction", {"distributed.sync_gradients": "last"})
    assert saving(finding) == pytest.approx(0.15)  # three sums of four
    once = reducing(20 * PERCENT, training__grad_accumulation=4, distributed__sync_gradients="last")
    assert ids(once) == ["exposed-communication"]


def test_repeated_sums_that_cost_nothing_are_no_finding() -> None:
    cheap = reducing(PERCENT, training__grad_accumulation=4, distributed__sync_gradients="each")
    assert ids(cheap) == []


def test_on_a_cpu_the_main_threads_wait_for_other_ranks_counts() -> None:
    finding = only(case(cpu(host={"communication": 20 * PERCENT})))
    assert finding.evidence == ["the main thread waits for other ranks for 20 ms a step (20.0 %)"]


def test_a_slow_rank_is_the_cause_and_the_waiting_for_it_is_not() -> None:
    slow = Straggler(rank=1, late=PERCENT // 2, waited_for=36, of=40)  # 20 % of the window
    ranks = [
        gpu(exposed_communication=22 * PERCENT),
        gpu(rank=1, exposed_communication=19 * PERCENT, idle={"data_loader": 3 * PERCENT}),
    ]
    finding = only(case(*ranks, stragglers=[slow]))
    assert finding.id == "straggler"
    assert finding.title == "rank 1 keeps the others waiting"
    assert finding.cause == "it spends 3 ms a step (3 %) more than the others waiting for its batches"


def test_a_rank_that_is_last_no_more_often_than_others_is_no_straggler() -> None:
    often = [Straggler(rank=1, late=PERCENT // 2, waited_for=19, of=40)]
    assert ids(case(gpu(), gpu(rank=1), stragglers=often)) == []
    little = [Straggler(rank=1, late=PERCENT // 41, waited_for=40, of=40)]
    assert ids(case(gpu(), gpu(rank=1), stragglers=little)) == []


def test_one_ranks_trace_cannot_tell_which_rank_is_slow() -> None:
    alone = case(gpu(), settings=training(distributed__world_size=2, profiling__all_ranks=False))
    assert diagnose(alone).unanswered == [Unanswered("straggler", "traces of the other ranks", "profiling.all_ranks")]
