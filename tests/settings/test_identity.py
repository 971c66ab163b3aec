"""What a run is called beside others of the same work."""

import pytest

from gpubench.settings.identity import asked, label_of, variants
from gpubench.settings.loading import load
from gpubench.settings.programs import ProgramSettings

BASE = load(ProgramSettings, None, {"program.command": "python train.py"})


def test_the_sides_of_a_comparison_have_a_label_each() -> None:
    cases = {
        ("baseline", "workers=2"): [BASE, BASE.with_overrides({"data.workers": 2}, "--vs")],
        ("baseline", "+ --compile"): [
            BASE,
            BASE.with_overrides({"program.command": "python train.py --compile"}, "--vs-args"),
        ],
        ("HEAD~1", "working tree"): [BASE.with_overrides({"program.ref": "HEAD~1"}, "--vs-ref"), BASE],
    }
    for expected, runs in cases.items():
        assert tuple(variants(runs)) == expected


def test_what_both_sides_have_in_common_is_in_neither_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base = BASE.with_overrides({"precision": "bf16"}, "command line")
    assert variants([base, base.with_overrides({"data.workers": 2}, "--vs")]) == ["baseline", "workers=2"]


def test_a_run_is_told_by_what_was_asked_of_it_and_not_by_how_it_is_measured() -> None:
    run = BASE.with_overrides(
        {"data.workers": 2, "performance.compile": True, "measurement.repeats": 9}, "command line"
    )
    assert asked(run) == {"program.command": "python train.py", "data.workers": 2, "performance.compile": True}
    assert label_of(run) == "compile=true workers=2"
    assert variants([run]) == [None], "a run alone needs no name"
    assert label_of(BASE) == ""


def test_variables_that_change_the_work_are_part_of_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert label_of(BASE) == "OMP_NUM_THREADS=1"


def test_a_variable_that_the_command_sets_itself_has_not_the_value_that_gpubench_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    own = BASE.with_overrides({"program.command": "env OMP_NUM_THREADS=2 python train.py"}, "command line")
    assert label_of(own) == ""
    assert asked(own) == {"program.command": "env OMP_NUM_THREADS=2 python train.py"}
    other = BASE.with_overrides({"program.command": "env A=2 python train.py OMP_NUM_THREADS=2"}, "command line")
    assert label_of(other) == "OMP_NUM_THREADS=1"


def test_many_settings_are_counted() -> None:
    more = {
        "data.workers": 2,
        "data.prefetch": 3,
        "performance.cpu_threads": 1,
        "performance.compile": True,
        "precision": "bf16",
    }
    assert label_of(BASE.with_overrides(more, "command line")).endswith("and 1 more")


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
