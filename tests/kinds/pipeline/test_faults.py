import pytest

from gpubench.errors import SettingsError
from gpubench.kinds.pipeline.faults import DEFAULT_SECONDS, OF_THE_RANK, TIMED, Fault, FaultKind, parse_fault


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_of_fault_is_read_with_its_rank_and_sample(kind: FaultKind) -> None:
    expected = Fault(kind, 1, 3, DEFAULT_SECONDS if kind in TIMED else 0.0)
    assert parse_fault(f"{kind},rank=1,sample=3", 4, 8) == expected
    assert parse_fault(f" {kind} , sample = 3, rank=1 ", 4, 8) == expected


def test_what_takes_time_takes_as_long_as_it_is_told() -> None:
    assert parse_fault("late,rank=0,sample=0,seconds=0.25", 2, 1) == Fault(FaultKind.late, 0, 0, 0.25)
    assert parse_fault("slow,seconds=3,rank=1,sample=0", 2, 1) == Fault(FaultKind.slow, 1, 0, 3.0)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("dropp,rank=1,sample=3", "there is no fault 'dropp'", "did you mean 'drop'?"),
        ("repeat,rank=1,sample=3", "there is no fault 'repeat'", "one of drop, duplicate, late"),
        ("", "there is no fault ''", "one of drop, duplicate, late"),
        ("drop,rank=1", "no sample is given", "write KIND,rank=R,sample=S"),
        ("drop,1,3", "'1' is not key=value", "write KIND,rank=R,sample=S"),
        ("drop,rank=one,sample=3", "rank is 'one', not a whole number", "write KIND"),
        ("drop,rank=-1,sample=3", "rank is '-1', not a whole number", "write KIND"),
        ("drop,rank=1,sample=3,seconds=2", "drop takes no 'seconds'", "drop takes rank and sample"),
        ("drop,rank=1,sampel=3", "drop takes no 'sampel'", "drop takes rank and sample"),
        ("late,rank=1,sample=3,seconds=soon", "seconds is 'soon', not a time", "write KIND"),
        ("late,rank=1,sample=3,seconds=nan", "seconds is 'nan', not a time", "write KIND"),
        ("kill,rank=4,sample=3", "there is no rank 4 among 4", "ranks count from 0"),
        ("kill,rank=1,sample=8", "there is no sample 8 among 8", "samples count from 0"),
        ("drop,rank=3,sample=3", "rank 3, the last, sends nothing", "name a rank below 3"),
    ],
)
def test_a_fault_that_cannot_be_provoked_is_refused_with_the_reason(text: str, message: str, hint: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_fault(text, 4, 8)
    assert message in refused.value.message
    assert refused.value.hint is not None
    assert hint in refused.value.hint


def test_a_rank_alone_sends_nothing_that_could_go_wrong() -> None:
    with pytest.raises(SettingsError, match="sends nothing") as refused:
        parse_fault("corrupt,rank=0,sample=0", 1, 1)
    assert refused.value.hint == "use two ranks or more"
    for kind in OF_THE_RANK:
        assert parse_fault(f"{kind},rank=0,sample=0", 1, 1).kind is kind
