"""The whole of it: order, headline, and every rule on cases that lack everything."""

import pytest
from cases_made import PERCENT, case, copy, cpu, gpu, ids, kernel, phase, rank, training, wait

from gpubench.diagnosis.case import Case
from gpubench.diagnosis.diagnose import diagnose
from gpubench.diagnosis.headline import DOES, WAITS, headline
from gpubench.trace.profile import CAUSES, HOST_PARTS, Straggler


def many_things_wrong() -> Case:
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
        assert finding.threshold.startswith("from ")


@pytest.mark.parametrize("empty", [rank(wall=0, step_numbers=[]), rank(), gpu(), cpu(), gpu(step_numbers=[])])
def test_a_case_without_anything_in_it_has_nothing_wrong(empty: object) -> None:
    assert diagnose(case(empty)).findings == []  # type: ignore[arg-type]


def test_the_headline_says_what_an_idle_gpu_waits_for() -> None:
    idle = gpu(idle={"data_loader": 33 * PERCENT, "queued": 10 * PERCENT})
    assert headline(case(idle)) == "GPU idle 43 %: 77 % of it waits for the data loader"


def test_the_headline_names_two_causes_where_neither_is_most_of_it() -> None:
    idle = gpu(idle={"data_loader": 12 * PERCENT, "synchronisation": 18 * PERCENT, "queued": 10 * PERCENT})
    assert headline(case(idle)) == (
        "GPU idle 40 %: 45 % of it follows waits of the host for the GPU, 30 % waits for the data loader"
    )


def test_the_headline_of_a_busy_gpu_is_what_computes() -> None:
    busy = gpu(idle={"queued": 5 * PERCENT}, phases=[phase("backward", device=60 * PERCENT), phase("other", device=99)])
    assert headline(case(busy)) == "GPU computes 95 % of the time, 60 % in backward"


def test_the_headline_of_a_gpu_that_communicates_names_the_rank_that_is_late() -> None:
    slow = Straggler(rank=3, late=PERCENT, waited_for=30, of=40)
    found = case(gpu(exposed_communication=40 * PERCENT), stragglers=[slow])
    assert headline(found) == "GPU communicates 40 % of the time and computes 60 %; rank 3 keeps the others waiting"


def test_the_headline_of_a_cpu_lists_what_the_main_thread_does() -> None:
    busy = cpu(host={"data_loader": 31 * PERCENT, "python": 7 * PERCENT})
    assert headline(case(busy)) == "CPU: 62 % of the step in operators, 31 % waits for the data"


def test_every_cause_and_part_has_its_words() -> None:
    assert WAITS.keys() == set(CAUSES)
    assert DOES.keys() == set(HOST_PARTS)
