import re
from typing import Any

import pytest
from cases_made import PERCENT, STEPS, case, cpu, gpu, ids, only, phase, saving, training
from traces_made import made, work

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Finding, Findings, Unanswered
from gpubench.trace.analyse import analyse
from gpubench.trace.profile import Collective, RankProfile, Straggler

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def reducing(exposed: int, calls: int = 4, stragglers: list[Straggler] | None = None, **settings: Any) -> ProfileCase:
    """All of two ranks."""
    settings = {"distributed__world_size": 2, "distributed__bucket_mb": 25.0} | settings
    ranks = [communicating(exposed, calls, rank=number) for number in range(2)]
    return case(*ranks, settings=training(**settings), stragglers=stragglers)


def communicating(exposed: int, calls: int = 4, **parts: Any) -> RankProfile:
    collectives = [Collective(NCCL, calls * STEPS, 2 * exposed, exposed, None)]
    return gpu(exposed_communication=exposed, communication=2 * exposed, collectives=collectives, **parts)


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
    def slow(*last: int, late: int = PERCENT // 2) -> bool:
        """Whether one is found among ranks that are last so often."""
        found = [Straggler(rank, late, waited_for=times, of=40) for rank, times in enumerate(last)]
        return "straggler" in ids(
            case(*(communicating(20 * PERCENT, rank=one.rank) for one in found), stragglers=found)
        )

    assert not slow(20, 20)
    assert not slow(26, 14)  # 8 % of pairs that are late by turns are at least as uneven
    assert slow(28, 12)  # 2 %
    assert slow(18, 8, 7, 7)
    assert not slow(14, 9, 9, 8)
    assert not slow(0, 40, late=PERCENT // 41)


def test_a_slow_rank_costs_no_more_than_the_others_wait() -> None:
    slow = [Straggler(1, PERCENT, waited_for=40, of=40), Straggler(0, 0, 0, 40)]  # two buckets that wait at once
    assert saving(only(reducing(20 * PERCENT, stragglers=slow))) == pytest.approx(0.2)


def test_a_few_collectives_cannot_tell_a_slow_rank_from_chance() -> None:
    def always_last(times: int, **known: Any) -> Findings:
        found = [Straggler(1, 5 * PERCENT, times, times), Straggler(0, 0, 0, times)]
        return diagnose(case(communicating(20 * PERCENT), gpu(rank=1), stragglers=found, **known))

    assert [one.id for one in always_last(6).findings] == ["straggler"]
    few = always_last(5, settings=training(distributed__world_size=2))
    assert [one.id for one in few.findings] == ["exposed-communication"]
    assert [(one.id, one.needs) for one in few.unanswered] == [("straggler", "profiling.active")]


def test_ranks_that_wait_for_each_other_by_turns_are_not_told_to_send_otherwise() -> None:
    by_turns = [Straggler(rank, PERCENT // 2, waited_for=20, of=40) for rank in range(2)]
    finding = only(reducing(22 * PERCENT, calls=1, stragglers=by_turns))
    assert (finding.id, finding.fix) == ("exposed-communication", {})
    assert "ranks wait for each other" in finding.cause


def test_a_slow_rank_does_not_wait_for_itself() -> None:
    slow = [Straggler(rank=0, late=PERCENT // 2, waited_for=40, of=40), Straggler(1, 0, 0, 40)]
    assert ids(reducing(10 * PERCENT, stragglers=slow)) == ["exposed-communication", "straggler"]


@pytest.mark.parametrize("world_size", [2, None])
def test_one_rank_alone_may_be_waiting_for_another(world_size: int | None) -> None:
    alone = case(communicating(20 * PERCENT, calls=1, world_size=world_size))
    finding = only(alone)
    assert finding.cause == "the link is too slow, or another rank is late: only traces of all ranks show which"
    assert diagnose(alone).unanswered == [
        Unanswered("straggler", "traces of the other ranks", "a trace of every rank"),
    ]


def test_the_clean_run_knows_whether_ranks_that_were_not_recorded_come_late() -> None:
    def one_recorded(skew: float) -> Finding:
        settings = training(distributed__world_size=2, distributed__bucket_mb=25.0, profiling__all_ranks=False)
        recorded = communicating(20 * PERCENT, calls=1)
        return only(case(recorded, settings=settings, metrics={"straggler_skew": skew}))

    assert one_recorded(0.05).fix == {"distributed.bucket_mb": 6.25}
    assert one_recorded(0.15).fix == {}


def test_waiting_on_the_host_alone_is_evidence_too() -> None:
    finding = only(case(gpu(idle={"communication_wait": 30 * PERCENT})))
    assert finding.evidence == ["the GPU is idle 30 ms a step (30.0 %) while the CPU waits for other ranks"]


def test_one_ranks_trace_cannot_tell_which_rank_is_slow() -> None:
    alone = case(gpu(), settings=training(distributed__world_size=2, profiling__all_ranks=False))
    assert diagnose(alone).unanswered == [Unanswered("straggler", "traces of the other ranks", "profiling.all_ranks")]


SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def exchanging(*exposed: tuple[str, int]) -> ProfileCase:
    """All of two ranks, by the names of kernels and the hundredths of the step in which nothing hides them."""
    found = [Collective(name, 40 * STEPS, part * PERCENT, part * PERCENT, None) for name, part in exposed]
    whole = sum(part for _, part in exposed) * PERCENT
    ranks = [gpu(rank=number, exposed_communication=whole, collectives=found) for number in range(2)]
    return case(*ranks, settings=training(distributed__world_size=2, distributed__bucket_mb=25.0))


@pytest.mark.parametrize(
    ("kernel", "advice"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "bucket_cap_mb"),
        ("cross_device_reduce_1stage<__half, 8>", "bucket_cap_mb"),
        ("multimem_all_reduce_kernel", "bucket_cap_mb"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reshard_after_forward"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_half", "reshard_after_forward"),
        ("mscclpp_all_to_all", "embedding tables"),
        ("void deep_ep::intranode::dispatch<8, 768>(int4*)", "experts"),
        (SEND_RECV, "overlap them with computing"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast_buffers=False"),
        ("nvshmemi_transfer", "send less"),
    ],
)
def test_advice_is_of_the_kind_of_collective(kernel: str, advice: str) -> None:
    finding = only(exchanging((kernel, 20)))
    assert advice in finding.advice
    assert ("bucket" in finding.advice) == bool(finding.fix) == (advice == "bucket_cap_mb")


def test_the_size_of_buckets_is_no_matter_of_an_exchange_among_all_ranks() -> None:
    finding = only(exchanging((SEND_RECV, 63), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 27)))
    assert "bucket" not in finding.advice
    assert "compress" not in finding.advice
    assert finding.fix == {}
    assert finding.advice.startswith("send and receive: start transfers")
    assert "; all-reduce: overlap" in finding.advice
    assert "send and receive: 40 times a step, 63 ms a step (63.0 %) exposed" in finding.evidence


def test_what_is_little_beside_the_rest_changes_no_advice() -> None:
    both = exchanging(("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20), ("ncclDevKernel_Broadcast_RING_LL", 1))
    assert only(both).fix == {"distributed.bucket_mb": 100.0}


def test_of_some_ranks_of_a_job_the_latest_is_not_said_to_keep_the_others_waiting() -> None:
    found = [Straggler(1, PERCENT // 2, 36, 40, 40, 2, whole=False), Straggler(0, 0, 0, 40, 40, 2, whole=False)]
    ranks = [communicating(20 * PERCENT, rank=number, world_size=128) for number in range(2)]
    diagnosed = diagnose(case(*ranks, stragglers=found))
    late = next(one for one in diagnosed.findings if one.id == "straggler")
    assert late.title == "rank 1 is later than the other ranks that were given"
    assert late.evidence[0].startswith("rank 1 was the last of the 2 ranks that were given to reach 36 of 40")
    assert late.severity == "low"
    assert "keeps" not in diagnosed.headline
    waiting = next(one for one in diagnosed.findings if one.id == "exposed-communication")
    assert waiting.advice.startswith("give the traces of the other 126 ranks too, as --trace; if none is late: ")
    assert saving(waiting) == pytest.approx(0.2)
    assert Unanswered("straggler", "traces of the other ranks", "traces of all 128 ranks: 2 were given") in (
        diagnosed.unanswered
    )


def test_chance_is_judged_by_the_collectives_of_a_ranks_own_group() -> None:
    """In pairs a rank is last in half of its collectives by chance."""
    pairs = [Straggler(rank, PERCENT // 2, last, 40, 40, 2) for rank, last in enumerate((26, 14, 24, 16))]
    ranks = [communicating(20 * PERCENT, rank=number) for number in range(4)]
    assert "straggler" not in ids(case(*ranks, stragglers=pairs))
    assert "straggler" in ids(case(*ranks, stragglers=[Straggler(0, PERCENT // 2, 32, 40, 40, 2), *pairs[1:]]))


def test_the_fix_for_many_kinds_of_collectives_is_short() -> None:
    kinds = ("AllReduce", "ReduceScatter", "Broadcast", "SendRecv", "AllGather")
    finding = only(exchanging(*((f"ncclDevKernel_{kind}", 10) for kind in kinds), ("mscclpp_all_to_all", 11)))
    assert finding.advice.startswith("all-gather and reduce-scatter: ")
    assert len(finding.advice) < 400
    assert sum(" exposed" in one for one in finding.evidence) == 5


def test_all_reduces_of_a_program_that_is_not_known_to_train_are_not_taken_for_gradients() -> None:
    def waiting(*phases: str, calls: int = 1) -> Finding:
        parts = [phase(name, device=10 * PERCENT) for name in phases]
        ranks = [communicating(20 * PERCENT, calls, rank=number, world_size=2, phases=parts) for number in range(2)]
        return only(case(*ranks))

    for calls in (1, 4, 40):
        inference = waiting("forward", calls=calls)
        assert not re.search("gradient|backward|bucket|no_sync", f"{inference.cause} {inference.advice}")
        assert "tensor parallelism" in inference.cause
    assert "bucket_cap_mb" in waiting("forward", "backward").advice


def test_all_gathers_of_a_program_that_is_not_known_to_train_are_not_taken_for_fsdp() -> None:
    def gathering(*phases: str) -> str:
        parts = [phase(name, device=10 * PERCENT) for name in phases]
        names = ("ncclDevKernel_AllGather", "ncclDevKernel_ReduceScatter")
        kinds = [Collective(name, 10, 10 * PERCENT, 10 * PERCENT, None) for name in names]
        about = {"exposed_communication": 20 * PERCENT, "world_size": 2, "phases": parts, "collectives": kinds}
        ranks = [gpu(rank=number, **about) for number in range(2)]
        finding = only(case(*ranks))
        return f"{finding.cause} {finding.advice}"

    assert not re.search("FSDP|gradient|reshard", gathering("forward"))
    assert "FSDP" in gathering("forward", "backward")


def test_a_single_collective_that_takes_most_of_the_time_is_named_with_its_place() -> None:
    short = [work(NCCL, 20 * number, 20 * number + 4, 900 + number, stream=7) for number in range(9)]
    computing = [work("gemm", 20 * number + 5, 20 * number + 19, 800 + number) for number in range(9)]
    last = work(NCCL, 200, 645, 909, stream=7)
    (found,) = [
        one
        for one in diagnose(ProfileCase(analyse([made(*short, *computing, last)]))).findings
        if one.id == "exposed-communication"
    ]
    (line,) = [one for one in found.evidence if one.startswith("one all-reduce")]
    assert "takes 445 us of the 481 us of 10 calls (median 4 us): number 10 of 10 collectives, after gemm" in line
    alike = diagnose(ProfileCase(analyse([made(*short, *computing)]))).findings
    assert not any("one all-reduce takes" in line for one in alike for line in one.evidence)
