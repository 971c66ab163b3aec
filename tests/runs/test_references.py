"""What a user may call a run, and what a name that fits nothing or several runs is answered with."""

import json
from pathlib import Path

import pytest
from recorded_runs import edit, write_run

from gpubench.errors import RunDirectoryError
from gpubench.runs.directory import FAILED, RUN
from gpubench.runs.references import Lookup


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("results")


def made(results: Path, run_id: str, experiment: str = "made", **changes: object) -> Path:
    """A run with this id."""
    path = write_run(results, experiment, repeats=1, steps=12)
    moved = path.rename(path.with_name(run_id))
    edit(moved / RUN, run_id=run_id, **changes)
    return moved


@pytest.fixture
def runs(results: Path) -> list[Path]:
    """Three runs, the oldest first; the second is a profile, and the first and the third are called base."""
    return [
        made(results, "20260101-100000-000-aaaa", name="base"),
        made(results, "20260101-110000-000-bbbb", "profile", command="profile"),
        made(results, "20260201-100000-000-cccc", name="base"),
    ]


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("results/made/20260101-100000-000-aaaa", 0),
        ("20260101-100000-000-aaaa", 0),
        ("20260101-10", 0),
        ("profile/2026", 1),
        ("202602", 2),
        ("base", 2),
        ("latest", 2),
        ("latest~1", 1),
        ("latest~2", 0),
        ("latest:profile", 1),
        ("latest:train-bench~1", 0),
        ("latest~1:train-bench", 0),
        ("profile/latest", 1),
        ("results/made/latest~1", 0),
    ],
)
def test_a_run_is_found_by_what_it_is_called(results: Path, runs: list[Path], name: str, index: int) -> None:
    assert Lookup(results).run(name).resolve() == runs[index].resolve()


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("20260101", "20260101 is the beginning of 2 runs", "20260101-110000-000-bbbb"),
        ("made", "made is a folder of 2 runs", "made/latest"),
        ("bas", "bas: no such run", "experiments under results"),
        ("latest~3", "latest~3: there are 3 runs", "latest~1"),
        ("latest:memory", "latest:memory: there are 0 runs of memory", "latest"),
        ("20260101-100000-000-aaab", "no such run", "did you mean '20260101-100000-000-aaaa'?"),
    ],
)
def test_a_name_that_stands_for_no_single_run_is_refused(
    results: Path, runs: list[Path], name: str, message: str, hint: str
) -> None:
    with pytest.raises(RunDirectoryError) as refused:
        Lookup(results).run(name)
    assert message in refused.value.message
    assert hint in (refused.value.hint or "")


def test_latest_counts_a_failed_run_but_not_the_runs_of_searches_and_trials(results: Path, runs: list[Path]) -> None:
    failed = write_run(results, repeats=0, status=FAILED)
    trial = write_run(results, "made-verify", repeats=1, steps=12)
    searched = write_run(results, "tune-1", repeats=1, steps=12)
    begun = {"status": "completed", "argv": [], "started": "2099-01-01T00:00:00.000Z", "settings": {}}
    (searched.parent / "tune.json").write_text(json.dumps(begun))
    assert Lookup(results).run("latest") == failed
    measured = Lookup(results, measured=True)
    assert measured.run("latest") == runs[2]
    assert set(measured.skipped()) == {
        f"skipped 1 newer run without results: {failed.name}",
        "skipped 1 newer run of tune, which cannot be a side of a comparison: tune-1",
    }
    assert Lookup(results).run("made-verify/latest") == trial
    assert Lookup(results).run("tune-1/latest") == searched


def test_a_program_beside_the_results_is_not_taken_for_a_run(results: Path, runs: list[Path]) -> None:
    Path("loop.py").touch()
    with pytest.raises(RunDirectoryError) as refused:
        Lookup(results).run("loop")
    assert "loop.py" not in (refused.value.hint or "")
