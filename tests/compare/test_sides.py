"""Which runs a name on the command line stands for, and what is said where it stands for none."""

import shutil
from pathlib import Path

import pytest
from recorded_runs import edit, write_run

from gpubench.compare.evidence import Side
from gpubench.compare.inputs import find
from gpubench.compare.log_columns import LogColumn
from gpubench.errors import DataError, RunDirectoryError
from gpubench.runs.directory import (
    COMPLETED,
    CONFIG,
    ENVIRONMENT,
    FAILED,
    INTERRUPTED,
    RUN,
    RUNNING,
    STEPS,
    SUMMARY,
    TELEMETRY,
)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of exp-a, then one of exp-b, in the folder `results` of the working directory."""
    monkeypatch.chdir(tmp_path)
    for experiment in ("exp-a", "exp-a", "exp-b"):
        write_run(Path("results"), experiment, repeats=1, steps=12)
    return Path("results")


def runs(results: Path) -> list[Path]:
    """Oldest first."""
    return sorted(results.glob("*/*"), key=lambda path: path.name)


def paths(*sides: Side) -> list[Path]:
    return [run.path for side in sides for run in side.runs]


def refusal(*names: str, results: Path = Path("results"), skip_invalid: bool = False) -> RunDirectoryError:
    with pytest.raises(RunDirectoryError) as refused:
        find(names, results, skip_invalid=skip_invalid)
    assert "\n" not in refused.value.message
    return refused.value


def test_a_run_directory_is_a_side_of_one_run(results: Path) -> None:
    first, second, _ = runs(results)
    (baseline, candidate), left_out = find([str(second), f"{first}/"], results)
    assert paths(baseline, candidate) == [second, first]
    assert baseline.label == second.name
    assert candidate.label == first.name
    assert baseline.runs[0].label == second.name
    assert not left_out


def test_a_folder_of_runs_is_a_group_in_order_of_time(results: Path) -> None:
    (group, single), _ = find(["results/exp-a", "results/exp-b"], results)
    assert paths(group) == runs(results)[:2]
    assert len(single.runs) == 1
    assert group.label == "exp-a"


def test_a_bare_name_is_looked_up_under_results(results: Path) -> None:
    first, second, third = runs(results)
    (experiment, run, qualified), _ = find(["exp-b", first.name, f"exp-a/{second.name}"], results)
    assert paths(experiment, run, qualified) == [third, first, second]


def test_the_latest_runs_count_back_from_the_newest(results: Path) -> None:
    (oldest, second, newest), _ = find(["latest~2", "latest~1", "latest"], results)
    assert paths(oldest, second, newest) == runs(results)


@pytest.mark.parametrize("within", ["results/exp-a", "exp-a"])
def test_the_latest_of_a_folder_or_experiment(results: Path, within: str) -> None:
    (before, last), _ = find([f"{within}/latest~1", f"{within}/latest"], results)
    assert paths(before, last) == runs(results)[:2]


def test_trials_of_a_fix_are_the_latest_only_where_they_are_named(results: Path) -> None:
    _, second, third = runs(results)
    (results / "exp-a-verify").mkdir()
    trial = third.rename(results / "exp-a-verify" / third.name)
    (latest, named), _ = find(["latest", "exp-a-verify/latest"], results)
    assert paths(latest, named) == [second, trial]


def test_a_renamed_run_is_never_the_latest(results: Path) -> None:
    _, second, third = runs(results)
    third.rename(third.with_name("zz-best"))
    (latest, renamed), _ = find(["latest", "results/exp-b/zz-best"], results)
    assert paths(latest, renamed) == [second, Path("results/exp-b/zz-best")]


def test_a_path_that_exists_comes_before_all_other_meanings(results: Path) -> None:
    first, *_ = runs(results)
    shutil.copytree(first, "latest")
    (side,), _ = find(["latest"], results)
    assert paths(side) == [Path("latest")]


def test_runs_of_one_name_are_labelled_by_their_folder_too(results: Path) -> None:
    first, second, _ = runs(results)
    shutil.copytree(second, "elsewhere/" + first.name)
    (ours, theirs), _ = find([str(first), f"elsewhere/{first.name}"], results)
    assert [side.runs[0].label for side in (ours, theirs)] == [f"exp-a/{first.name}", f"elsewhere/{first.name}"]


def test_a_copy_of_a_run_is_the_same_run(results: Path) -> None:
    first, *_ = runs(results)
    shutil.copytree(first, "elsewhere/copy")
    assert "is on two sides" in refusal(str(first), "elsewhere/copy").message


def test_a_misspelt_name_offers_the_nearest(results: Path) -> None:
    assert refusal("exp-c").hint == "did you mean 'exp-b'?"
    assert refusal("nothing like it").hint == "experiments under results are exp-a, exp-b"
    assert refusal("results/exp-bb").hint == "did you mean 'exp-b'?"
    almost = f"{runs(results)[0].name[:-1]}x"
    assert refusal(almost).hint == f"did you mean '{runs(results)[0].name}'?"


def test_without_any_results_the_hint_says_what_to_give(tmp_path: Path) -> None:
    refused = refusal("exp-a", results=tmp_path / "none")
    assert refused.message == "exp-a: no such run, experiment or folder"
    assert refused.hint


def test_a_log_instead_of_a_run_hints_at_column(results: Path) -> None:
    Path("steps.csv").write_text("ms\n1\n2\n")
    with pytest.raises(DataError, match=r"steps\.csv has no column that names the time of a step") as refused:
        find(["steps.csv"], results)
    assert "--column ms --unit ms" in str(refused.value.hint)


def test_a_folder_of_experiments_names_them(results: Path) -> None:
    refused = refusal("results")
    assert refused.message == "results holds experiments, not runs"
    assert refused.hint == "give one of them: results/exp-a, results/exp-b"


def test_an_empty_folder_is_refused(results: Path) -> None:
    Path("empty").mkdir()
    assert refusal("empty").message == "empty holds no runs"


def test_there_is_nothing_before_the_oldest(results: Path) -> None:
    assert refusal("latest~9").message == "latest~9: there are 3 runs in results"
    assert refusal("exp-b/latest~1").message == "latest~1: there is 1 run in results/exp-b"
    assert refusal("latest", results=Path("none")).message == "latest: there are 0 runs in none"


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "//", "~", "latest~", "\u200b"])
def test_names_that_no_path_can_have_are_refused(results: Path, name: str) -> None:
    refusal(name)


def test_one_run_on_two_sides_is_refused(results: Path) -> None:
    first, *_ = runs(results)
    assert refusal(str(first), f"./{first}").message == f"{first} is on two sides, {first} and ./{first}"
    assert "on two sides" in refusal("exp-a", str(first)).message


def test_one_run_under_two_names_is_refused(results: Path) -> None:
    first, second, _ = runs(results)
    Path("group").mkdir()
    for name in ("one", "other"):
        Path("group", name).symlink_to(first.resolve())
    assert refusal("group", str(second)).message == "group/other is twice on one side"


def test_a_damaged_run_of_a_group_is_named_and_left_out_only_on_demand(results: Path) -> None:
    first, second, _ = runs(results)
    (second / SUMMARY).write_text("{")
    refused = refusal("exp-a", "exp-b")
    assert str(second / SUMMARY) in refused.message
    assert refused.hint == "--skip-invalid leaves it out"
    (group, _), (left_out,) = find(["exp-a", "exp-b"], results, skip_invalid=True)
    assert paths(group) == [first]
    assert str(second / SUMMARY) in left_out


def test_a_run_without_its_record_is_still_one_of_the_group(results: Path) -> None:
    _, second, _ = runs(results)
    (second / RUN).unlink()
    assert str(second) in refusal("exp-a").message


def test_a_running_run_of_a_group_is_named(results: Path) -> None:
    running = write_run(results, "exp-a", repeats=1, steps=12, status=RUNNING)
    assert f"{running} is still running" in refusal("exp-a").message
    (group,), (left_out,) = find(["exp-a"], results, skip_invalid=True)
    assert len(group.runs) == 2
    assert str(running) in left_out


def test_a_group_of_which_nothing_is_left_is_refused(results: Path) -> None:
    for run in runs(results)[:2]:
        (run / SUMMARY).unlink()
    refused = refusal("exp-a", "exp-b", skip_invalid=True)
    assert refused.message == "exp-a: none of its 2 runs can be read"
    assert "summary.json" in str(refused.hint)


@pytest.mark.parametrize("name", [STEPS, TELEMETRY])
def test_a_line_that_does_not_read_is_damage_to_a_completed_run(results: Path, name: str) -> None:
    first, second, _ = runs(results)
    lines = (second / name).read_bytes().splitlines(keepends=True)
    (second / name).write_bytes(b"".join([*lines[:-1], lines[-1][:20]]))
    refused = refusal(str(first), str(second))
    assert refused.message.startswith(f"{second / name}:{len(lines)}: ")
    assert refusal("exp-a").hint == "--skip-invalid leaves it out"
    (group,), (left_out,) = find(["exp-a"], results, skip_invalid=True)
    assert paths(group) == [first]
    assert f"{second / name}:{len(lines)}: " in left_out


@pytest.mark.parametrize("name", [STEPS, CONFIG, ENVIRONMENT])
def test_a_missing_file_is_damage_to_a_completed_run(results: Path, name: str) -> None:
    first, second, _ = runs(results)
    (second / name).unlink()
    assert str(second / name) in refusal(str(first), str(second)).message


def test_a_run_that_was_cut_off_may_be_torn_where_it_ended(results: Path) -> None:
    first, second, _ = runs(results)
    record = (second / RUN).read_text()
    (second / RUN).write_text(record.replace(COMPLETED, INTERRUPTED))
    with (second / STEPS).open("a") as file:
        file.write('{"repeat":1,"ra')
    (_, candidate), _ = find([str(first), str(second)], results)
    assert len(candidate.runs[0].steps) == 12
    assert len(candidate.runs[0].problems) == 1


def test_a_run_named_directly_is_never_skipped(results: Path) -> None:
    first, second, _ = runs(results)
    (first / SUMMARY).unlink()
    assert str(first) in refusal(str(first), str(second), skip_invalid=True).message


def test_what_lies_beside_the_runs_of_a_group_is_no_run(results: Path) -> None:
    Path("results/exp-a/plots").mkdir()
    Path("results/exp-a/.cache").mkdir()
    Path("results/exp-a/notes.md").write_text("slow")
    (group,), _ = find(["exp-a"], results)
    assert len(group.runs) == 2


def test_with_a_column_names_are_logs_and_folders_of_them(results: Path) -> None:
    Path("logs").mkdir()
    for name in ("b.csv", "a.csv", "notes.txt"):
        Path("logs", name).write_text("ms\n10\n11\n")
    column = LogColumn.of("ms", "ms")
    (group, single), _ = find(["logs", "logs/notes.txt"], results, column=column)
    assert paths(group) == [Path("logs/a.csv"), Path("logs/b.csv")]
    assert [run.label for run in single.runs] == ["notes.txt"]
    for name, reason in (
        ("none.csv", "no such file"),
        ("results", "holds no logs"),
        (str(runs(results)[0]), "is a run"),
    ):
        with pytest.raises(RunDirectoryError, match=reason):
            find([name], results, column=column)


def test_a_damaged_log_of_a_group_is_left_out_on_demand(results: Path) -> None:
    Path("logs").mkdir()
    Path("logs/a.csv").write_text("ms\n10\n11\n")
    Path("logs/b.csv").write_text("ms\n10\nx\n")
    column = LogColumn.of("ms", "ms")
    with pytest.raises(RunDirectoryError, match=r"logs/b\.csv:3"):
        find(["logs"], results, column=column)
    (group,), left_out = find(["logs"], results, column=column, skip_invalid=True)
    assert len(group.runs) == len(left_out) == 1


def test_a_log_that_is_not_there_is_not_looked_for_among_experiments(tmp_path: Path) -> None:
    (tmp_path / "unrelated").mkdir()
    with pytest.raises(RunDirectoryError) as refused:
        find([str(tmp_path / "step times.csv")], tmp_path, column=LogColumn.of("ms", "ms"))
    assert refused.value.hint == "--column reads .csv, .tsv, .jsonl"


def failed(results: Path, experiment: str = "exp-a") -> Path:
    """A run that ended before anything was measured."""
    return write_run(results, experiment, repeats=0, status=FAILED)


def test_the_latest_is_the_last_run_in_which_something_was_measured(results: Path) -> None:
    first, second, third = runs(results)
    killed = write_run(results, "exp-b", repeats=1, steps=12, status=RUNNING)
    empty = [failed(results), failed(results, "exp-b")]
    (empty[1] / SUMMARY).unlink()
    (results / "exp-a" / "20991231-235959-999-abcd").mkdir()  # the disk was full
    sides, left_out = find(["latest~2", "latest~1", "latest"], results)
    assert paths(*sides) == [first, second, third]
    names = ["20991231-235959-999-abcd", empty[1].name, empty[0].name, killed.name]
    assert left_out == [f"skipped 4 newer runs without results: {', '.join(names)}"]


def test_an_interrupted_run_with_results_is_the_latest(results: Path) -> None:
    newest = write_run(results, "exp-a", repeats=1, steps=12, status=INTERRUPTED)
    (side,), left_out = find(["latest"], results)
    assert (paths(side), left_out) == ([newest], [])


def test_latest_counts_the_runs_of_one_command(results: Path) -> None:
    first, second, third = runs(results)
    edit(second / RUN, command="profile")
    (before, last), left_out = find(["latest~1", "latest"], results)
    assert paths(before, last) == [first, third]
    assert left_out == [f"skipped 1 newer run of profile where train-bench is compared: {second.name}"]
    edit(third / RUN, command="profile")
    assert paths(*find(["latest~1", "latest"], results)[0]) == [second, third]


def test_latest_follows_the_command_of_a_side_that_is_named_otherwise(results: Path) -> None:
    first, second, third = runs(results)
    edit(third / RUN, command="profile")
    assert paths(*find(["latest", str(first)], results)[0]) == [second, first]
    assert paths(*find(["exp-b/latest"], results)[0]) == [third], "within a folder it is that of the newest run there"


def test_a_refusal_says_which_runs_there_are_not_enough_of(results: Path) -> None:
    *_, third = runs(results)
    edit(third / RUN, command="memory")
    failed(results)
    refused = refusal("latest~1", "latest")
    assert refused.message == "latest~1: there is 1 run of memory with results in results"
    assert refused.hint == "latest:train-bench and latest~1:train-bench are the newest runs of train-bench"


def test_a_damaged_run_is_not_passed_over_as_the_latest(results: Path) -> None:
    *_, third = runs(results)
    (third / SUMMARY).write_text("{")
    assert "is damaged" in refusal("latest").message
    (third / RUN).write_text("{")
    assert str(third / RUN) in refusal("latest").message


def test_failed_runs_do_not_break_the_name_of_an_experiment(results: Path) -> None:
    first, second, _ = runs(results)
    empty = [failed(results), failed(results)]
    (group,), left_out = find(["exp-a"], results)
    assert paths(group) == [first, second]
    assert left_out == [f"skipped 2 runs of exp-a without results: {empty[0].name}, {empty[1].name}"]


def test_an_experiment_of_failed_runs_is_refused_with_what_happened(results: Path) -> None:
    failed(results, "exp-c")
    refused = refusal("exp-c")
    assert refused.message == "exp-c: none of its 1 runs can be read"
    assert "not enough memory" in str(refused.hint)
