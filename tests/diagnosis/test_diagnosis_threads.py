import msgspec
import pytest
from cases_made import PERCENT, case, cpu, gpu, ids, only, python, saving, training

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose


def threads(number: int, ranks: int = 1, elsewhere: int = 0) -> ProfileCase:
    settings = training(performance__cpu_threads=number, distributed__world_size=ranks)
    rank = cpu(host={"optimizer": 0, "copies": elsewhere})
    return case(rank, settings=settings, environment={"cpu.usable_cores": 8})


def test_one_thread_leaves_the_other_cores_idle() -> None:
    finding = only(threads(1))
    assert (finding.id, finding.fix) == ("too-few-threads", {"performance.cpu_threads": 8})
    assert saving(finding) == pytest.approx(7 / 8)


def test_as_many_threads_as_cores_are_right() -> None:
    assert ids(threads(8)) == []
    assert ids(threads(4, ranks=2)) == []


def test_more_threads_than_cores_take_turns() -> None:
    finding = only(threads(8, ranks=2))
    assert (finding.id, finding.fix) == ("too-many-threads", {"performance.cpu_threads": 4})
    assert finding.expected is None


def test_threads_do_not_help_outside_operators() -> None:
    assert ids(threads(1, elsewhere=81 * PERCENT)) == []


def test_the_threads_of_a_host_that_feeds_a_gpu_are_not_judged() -> None:
    settings = training(performance__cpu_threads=1)
    assert ids(case(gpu(), settings=settings, environment={"cpu.usable_cores": 8})) == []


@pytest.mark.parametrize(("number", "fixes"), [(8, [{"performance.cpu_threads": 1}]), (1, [])])
def test_operators_that_are_too_short_to_be_shared_get_one_thread(number: int, fixes: list[dict[str, int]]) -> None:
    short = msgspec.structs.replace(python(), operators=case(cpu()).rank.wall // 11_000, operator_median=3000)
    settings = training(performance__cpu_threads=number)
    judged = case(cpu(python=short), settings=settings, environment={"cpu.usable_cores": 8})
    assert [one.fix for one in diagnose(judged).findings if "threads" in one.id] == fixes
