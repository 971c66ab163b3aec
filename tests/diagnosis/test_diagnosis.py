"""The whole of it: order, headline, and every rule on cases that lack everything."""

import pytest
from cases_made import PERCENT, case, copy, cpu, gpu, ids, kernel, phase, rank, training, wait
from traces_made import LOADER, Record, call, launched, made, slice_, step, work

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.headline import CPU_PARTS_IN_WORDS, IDLE_CAUSES_IN_WORDS, headline
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Finding
from gpubench.trace.analyse import analyse
from gpubench.trace.profile import CAUSES, HOST_PARTS, Collective, Straggler


def many_things_wrong() -> ProfileCase:
    ill = gpu(
        idle={"data_loader": 20 * PERCENT, "synchronisation": 3 * PERCENT, "python_and_launch": 12 * PERCENT},
        copies=[copy("dtype_cast", phase="forward", device=6 * PERCENT)],
        synchronisations=[wait("aten::item", idle=3 * PERCENT)],
        kernels=[kernel("nchwToNhwcKernel", 2 * PERCENT)],
    )
    settings = training(
        data__workers=0, performance__channels_last=False, distributed__world_size=1, training__read_loss=True
    )
    return case(ill, settings=settings, environment={"cpu.usable_cores": 8})


def test_the_most_costly_finding_comes_first() -> None:
    assert ids(many_things_wrong()) == [
        "too-few-workers", "launch-bound", "casts", "synchronisation", "nchw-convolutions",
    ]  # fmt: skip


def test_every_override_is_a_setting_of_the_program() -> None:
    known = many_things_wrong().settings
    assert known is not None
    for finding in diagnose(many_things_wrong()).findings:
        assert finding.fix.keys() <= known.keys()


def test_a_trace_from_elsewhere_never_gets_an_override() -> None:
    assert not any(finding.fix for finding in diagnose(case(many_things_wrong().rank)).findings)


def test_every_finding_says_what_it_rests_on() -> None:
    for finding in diagnose(many_things_wrong()).findings:
        assert finding.evidence
        assert finding.cause
        assert finding.advice
        assert finding.threshold.startswith("at least ")


@pytest.mark.parametrize("empty", [rank(wall=0, step_numbers=[]), rank(), gpu(), cpu(), gpu(step_numbers=[])])
def test_a_case_without_anything_in_it_has_nothing_wrong(empty: object) -> None:
    assert diagnose(case(empty)).findings == []  # type: ignore[arg-type]


def test_the_headline_says_what_an_idle_gpu_waits_for() -> None:
    idle = gpu(idle={"data_loader": 33 * PERCENT, "queued": 10 * PERCENT})
    assert headline(case(idle)) == "GPU idle 43 %: 77 % of it waits for the data loader"


def test_the_headline_names_two_causes_where_neither_is_most_of_it() -> None:
    idle = gpu(idle={"data_loader": 12 * PERCENT, "synchronisation": 18 * PERCENT, "queued": 10 * PERCENT})
    assert headline(case(idle)) == (
        "GPU idle 40 %: 45 % of it follows waits of the CPU for the GPU, 30 % waits for the data loader"
    )


def test_the_headline_of_a_busy_gpu_is_what_computes() -> None:
    busy = gpu(idle={"queued": 5 * PERCENT}, phases=[phase("backward", device=60 * PERCENT), phase("other", device=99)])
    assert headline(case(busy)) == "GPU computes 95 % of the time, 60 % in backward"


def test_the_headline_of_a_gpu_that_communicates_names_the_rank_that_is_late() -> None:
    slow = Straggler(rank=3, late=PERCENT, waited_for=30, of=40)
    found = case(gpu(exposed_communication=40 * PERCENT), gpu(rank=3), stragglers=[slow])
    assert headline(found) == "GPU communicates 40 % of the time and computes 60 %; rank 3 keeps the others waiting"


def test_the_headline_of_one_rank_alone_does_not_tell_communicating_from_waiting() -> None:
    alone = case(gpu(exposed_communication=40 * PERCENT, world_size=2))
    assert headline(alone) == "GPU communicates, or waits for other ranks, 40 % of the time and computes 60 %"


@pytest.mark.parametrize(("name", "waits"), [("SendRecv", True), ("Broadcast_RING_LL", True), ("AllReduce_Sum", False)])
def test_traces_of_all_ranks_do_not_tell_who_waits_for_a_transfer_of_one_way(name: str, waits: bool) -> None:
    found = [Collective(f"ncclDevKernel_{name}", 10, 40 * PERCENT, 40 * PERCENT, None)]
    both = [gpu(rank=rank, exposed_communication=40 * PERCENT, collectives=found, world_size=2) for rank in range(2)]
    assert ("or waits for other ranks" in headline(case(*both))) == waits


def test_a_finding_without_evidence_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Finding(id="bare", title="", severity="low", evidence=[], cause="", advice="", threshold="")
    monkeypatch.setattr("gpubench.diagnosis.rules.TIME_RULES", (lambda _: [bare],))
    assert ids(case(gpu())) == []


def test_the_headline_of_a_cpu_lists_what_the_main_thread_does() -> None:
    busy = cpu(host={"data_loader": 31 * PERCENT, "python": 7 * PERCENT})
    assert headline(case(busy)) == "CPU: 62 % of the step in operators, 31 % waits for the data"


def test_a_trace_in_which_nothing_marks_steps_has_none() -> None:
    found = case(cpu(host={"python": 31 * PERCENT}, step_numbers=[]))
    assert headline(found) == "CPU: 69 % of the trace in operators, 31 % in Python"
    assert all("a step" not in said for one in diagnose(found).findings for said in one.evidence)


def recorded(overhead: float, **metrics: float) -> str:
    return headline(case(cpu(host={"python": 31 * PERCENT}), overhead=overhead, metrics=metrics))


def test_the_headline_of_a_step_that_recording_distorts_is_of_a_clean_one() -> None:
    clean = {"step_time": 0.1, "phase_backward": 0.055, "phase_forward": 0.03, "phase_optimizer": 0.009}
    assert (
        recorded(1.5, **clean)
        == "CPU, without the profiler: 55 % of a step in the backward pass, 30 % in the forward pass"
    )
    assert recorded(0.2, **clean) == "CPU: 69 % of the step in operators, 31 % in Python"
    assert recorded(1.5) == "CPU: 69 % of the step in operators, 31 % in Python"


def test_every_cause_and_part_has_its_words() -> None:
    assert IDLE_CAUSES_IN_WORDS.keys() == set(CAUSES)
    assert CPU_PARTS_IN_WORDS.keys() == set(HOST_PARTS)


DOWNLOAD = "Memcpy DtoH (Device -> Pageable)"


@pytest.mark.parametrize(
    "ending",
    [
        [*launched("b", 50, 463_000, 463_100, 2), call("cudaStreamSynchronize", 54, 463_110)],
        [call("cudaMemcpyAsync", 54, 463_110, 2), work(DOWNLOAD, 463_000, 463_100, 2, cat="gpu_memcpy")],
        [*launched("b", 50, 463_000, 463_100, 2), call("cudaMalloc", 54, 463_110)],
        [*launched("b", 50, 463_000, 463_100, 2), slice_(LOADER, 52, 463_110)],
        [*launched("b", 50, 463_000, 463_100, 2), slice_("gloo:all_reduce", 52, 463_110)],
    ],
)
def test_nothing_is_promised_of_a_gap_whose_next_work_was_launched(ending: list[Record]) -> None:
    steps = [step(1, 0, 463_120), *launched("a", 1, 2, 100, 1), slice_("aten::item", 53, 463_111)]
    profile = analyse([made(steps, ending)])
    findings = diagnose(ProfileCase(profile))
    assert profile.ranks[0].idle["queued"] > 0.99 * profile.ranks[0].wall
    assert [one for one in findings.findings if one.expected and one.expected.estimate > 0.01] == []
    assert "comes after the launch of the next work (queued, or work that was not recorded)" in findings.headline


def test_the_headline_names_no_phase_with_little_of_the_computing() -> None:
    assert headline(case(gpu(phases=[phase("forward", device=9 * PERCENT)]))) == "GPU computes 100 % of the time"
    assert headline(case(gpu(phases=[phase("forward", device=10 * PERCENT)]))).endswith("10 % in forward")


def test_nothing_is_called_python_on_a_host_whose_device_was_not_recorded() -> None:
    known = cpu(host={"python": 60 * PERCENT}, work_missing=True)
    assert headline(case(known)).endswith(": 60 % of the step outside operators, 40 % in operators")


def test_neighbours_that_overlap_a_little_are_not_said_to_overlap() -> None:
    known = case(gpu())
    assert known.time_per_step(known.whole * 104 // 100).endswith("(100.0 %)")
    assert "streams overlap" in known.time_per_step(known.whole * 106 // 100)
    assert known.calls_per_step(0) == "0 times a step"
