"""`gpubench runs`: which runs it lists, how it shows, opens and tags them, and which ones it never removes."""

import fcntl
import io
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli import complaint
from machines import wait_until
from recorded_runs import edit, write_run
from running import Finished

from gpubench.commands import options
from gpubench.runs import directory
from gpubench.runs.directory import COMPLETED, FAILED, INTERRUPTED, REPORT, RUN, RUNNING, RunWriter
from gpubench.settings.defaults import complete
from gpubench.settings.loading import Labels, completed, load
from gpubench.settings.schema import TrainSettings

CommandLine = Callable[..., Finished]
OLD = "2020-01-01T00:00:00.000Z"


def made(results: Path, experiment: str = "made", *, settings: str = "", **changes: Any) -> Path:
    """A run with a few steps. `settings` are its config.yaml, and `changes` those of its run.json."""
    path = write_run(results, experiment, repeats=1, steps=12, pace=changes.pop("pace", 1.0))
    if settings:
        (path / "config.yaml").write_text(settings)
    edit(path / RUN, **changes)
    return path


def searched(results: Path, name: str, *, runs: int = 1, **changes: Any) -> tuple[Path, list[Path]]:
    """The folder of a search that has proved a gain, and its runs."""
    paths = [made(results, name) for _ in range(runs)]
    found = {
        "status": COMPLETED,
        "argv": ["gpubench", "tune", "--", "python", "train.py"],
        "started": json.loads((paths[-1] / RUN).read_text())["started"],
        "settings": {"program.command": "python train.py", "precision": "fp32"},
        "device": "a CPU",
        "conclusion": {"gain": [2.0, 1.9, 2.1]},
        "keep": {"data.workers": 2},
    }
    (results / name / "tune.json").write_text(json.dumps(found | changes))
    return results / name, paths


@pytest.fixture
def listed(command_line: CommandLine) -> Callable[..., list[Path]]:
    """The runs that a listing with these options has, in its order."""

    def call(*options: str) -> list[Path]:
        done = command_line("runs", "--json", *options)
        assert done.code == 0, done.stderr
        return [Path(run["path"]) for run in json.loads(done.stdout)["runs"]]

    return call


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("results")


def config(batch_size: int, precision: str) -> str:
    return f"precision: {precision}\nmodel:\n  name: resnet18\ntraining:\n  batch_size: {batch_size}\n"


def test_runs_are_filtered_by_what_they_are_and_how_they_were_set(
    results: Path, listed: Callable[..., list[Path]]
) -> None:
    first = made(results, settings=config(8, "fp32"), started=OLD, tags=["a", "b"])
    second = made(results, settings=config(16, "bf16"), status=FAILED, host="elsewhere", tags=["a"])
    third = made(results, "profile", settings=config(32, "bf16"), command="profile")
    assert listed() == [third, second, first]
    assert listed("--command", "profile") == [third]
    assert listed("--experiment", "ma*") == [second, first]
    assert listed("--tag", "a") == [second, first]
    assert listed("--tag", "a", "--tag", "b") == [first]
    assert listed("--status", "failed") == [second]
    assert listed("--host", "elsewhere") == [second]
    assert listed("--since", "2d") == listed("--since", "2021-01-01") == [third, second]
    assert listed("--model", "RESNET") == [third, second, first]
    assert listed("--model", "gpt2") == []
    assert listed("--where", "precision=bf16") == [third, second]
    assert listed("--where", "training.batch_size>8", "--where", "batch_size<=16") == [second]
    assert listed("--where", "precision!=bf16") == [first]
    assert listed("--sort", "batch_size") == [first, second, third]
    assert listed("--limit", "2") == [third, second]


def test_sorting_by_a_column_that_is_listed_anyway_adds_none(results: Path, command_line: CommandLine) -> None:
    write_run(results)
    heads = {command_line("runs", "--sort", key).stdout.splitlines()[2] for key in ("started", "model", "host")}
    assert len(heads) == 1


def test_a_listing_sorted_by_a_metric_begins_with_the_best(results: Path, listed: Callable[..., list[Path]]) -> None:
    slow, fast = made(results, pace=2.0), made(results)
    none = write_run(results, repeats=0, status=FAILED)
    assert listed("--sort", "throughput") == listed("--sort", "step_time") == [fast, slow, none]


def test_runs_of_searches_and_trials_are_listed_on_request(results: Path, listed: Callable[..., list[Path]]) -> None:
    whole, trial = made(results), made(results, "made-verify")
    folder, (run,) = searched(results, "tune-1")
    assert listed() == [folder, whole]
    assert set(listed("--all")) == {folder, run, trial, whole}
    assert listed("--experiment", "tune-*") == [folder, run]


def test_a_search_is_one_row_with_its_speedup_and_is_found_as_any_run(
    results: Path, command_line: CommandLine, listed: Callable[..., list[Path]]
) -> None:
    made(results)
    folder, paths = searched(results, "tune-20261123-120054-127-7d0e", runs=2)
    assert listed("--command", "tune") == listed("--model", "train.py") == [folder]
    row = json.loads(command_line("runs", "--json").stdout)["runs"][0]
    assert (row["command"], row["status"], row["experiment"]) == ("tune", "completed", "tune")
    assert row["metrics"]["speedup"]["estimate"] == 2.0
    assert "2.00 x" in command_line("runs").stdout
    for name in (folder.name, "tune-2026", "latest:tune", "latest"):
        assert command_line("runs", "tag", name).stdout == f"{folder.name}: no tags\n"
    assert command_line("runs", "tag", "latest:tune", "keep").stdout == f"{folder.name}: keep\n"
    assert [json.loads((path / RUN).read_text())["tags"] for path in paths] == [["keep"], ["keep"]]
    assert listed("--tag", "keep") == [folder]
    refused, hint = complaint(command_line("runs", "remove", "latest:tune", "--yes"))
    assert "tagged keep" in refused
    assert command_line(*hint.removeprefix("gpubench ").split()).code == 0
    assert command_line("runs", "remove", "latest:tune", "--yes").code == 0
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "status", "result"),
    [
        ({"keep": {}}, "completed", "nothing proved"),
        ({"keep": {}, "status": "interrupted"}, "interrupted", ""),
        ({"status": "running"}, "interrupted", "2.00 x"),
        ({"started": 1}, "damaged", ""),
    ],
)
def test_a_search_says_how_it_ended(
    results: Path, command_line: CommandLine, changes: dict[str, Any], status: str, result: str
) -> None:
    searched(results, "tune-1", **changes)
    assert json.loads(command_line("runs", "--json").stdout)["runs"][0]["status"] == status
    line = next(line for line in command_line("runs").stdout.splitlines() if line.startswith("tune-1"))
    assert status in line
    assert result in line


def test_a_search_is_pruned_by_what_the_search_was(results: Path, command_line: CommandLine) -> None:
    folder, _ = searched(results, "tune-1")
    path = made(results)
    command_line("runs", "prune", "--keep", "0", "--command", "tune", "--yes")
    assert (folder.exists(), path.exists()) == (False, True)


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("torch>=2.9", True),
        ("torch>2.13", False),
        ("torch<=2.13", True),
        ("torch<2.13.1", True),
        ("torch=2.13.0", True),
        ("torch=2.13", True),
        ("torch=2.1", False),
        ("torch=2.13.1", False),
        ("commit=abc", False),
        ("commit=abcd", True),
        ("git.commit=abcde", True),
        ("torch=2.13*", True),
    ],
)
def test_versions_are_compared_as_versions(
    results: Path, listed: Callable[..., list[Path]], condition: str, found: bool
) -> None:
    path = made(results)
    summary = json.loads((path / "summary.json").read_text())
    summary["environment"] = {"torch": "2.13.0+cpu", "commit": "abcde" * 8}
    (path / "summary.json").write_text(json.dumps(summary))
    assert listed("--where", condition) == ([path] if found else [])


def test_tags_that_are_given_at_once_are_all_kept(results: Path) -> None:
    path = made(results)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: directory.relabel(path, add=[f"t{number}"]), range(24)))
    assert len(json.loads((path / RUN).read_text())["tags"]) == 24


def test_what_somebody_else_removes_at_the_same_time_is_no_error(
    results: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(results)
    remove = shutil.rmtree

    def beaten(folder: Path) -> None:
        remove(folder)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("shutil.rmtree", beaten)
    assert command_line("runs", "remove", "latest", "--yes").code == 0
    assert not path.exists()


def test_pruning_says_how_many_runs_it_spares(results: Path, command_line: CommandLine) -> None:
    made(results, tags=["keep"])
    assert "spared: 1 run" in command_line("runs", "prune", "--keep", "0", "--yes").stdout


def test_a_name_by_which_the_run_could_not_be_found_is_refused(results: Path, command_line: CommandLine) -> None:
    path = made(results)
    Path("elsewhere").mkdir()
    for taken in ("made", "elsewhere"):
        assert f"{taken} exists" in complaint(command_line("runs", "tag", "latest", "--name", taken))[0]
    command_line("runs", "tag", "latest", "--name", "base")
    made(results, "base")
    refused, hint = complaint(command_line("runs", "remove", "base", "--yes"))
    assert "base is the name of a run, and also results/base" in refused
    assert path.name in hint
    assert command_line("runs", "tag", path.name, "--name", "").stdout == f"{path.name}: no tags\n"
    assert "removed 1 run" in command_line("runs", "remove", "base", "--yes").stdout
    assert path.exists()


@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        (["--where", "precision"], "--where 'precision' is not a condition", "KEY=VALUE"),
        (["--where", "precison=bf16"], "no run has a setting 'precison'", "did you mean 'precision'?"),
        (["--where", "precision>bf16"], "'bf16' is not a number", "> compares numbers"),
        (["--where", "precision>1"], "precision is neither a number nor a version", "precision=VALUE"),
        (["--command", "train"], "--command 'train' is not a command of a run", "train-bench"),
        (["--sort", "troughput"], "no run has a metric or setting 'troughput'", "did you mean 'throughput'?"),
        (["--since", "soon"], "--since 'soon' is neither an age nor a date", "30d"),
        (["--status", "done"], "--status 'done' is not a status", "completed"),
        (["--limit", "-1"], "--limit '-1' is not a number of runs", "--limit 20"),
        (["--results", "nowhere"], "the results folder nowhere does not exist", "--results DIR"),
        (["--tag", "x", "show", "latest"], "--tag before show is an option of the listing", "runs show --help"),
        (["show", "nothing"], "nothing: no such run", "experiments under results are made"),
        (["tag", "latest", "a b"], "'a b' is not a tag", "letters"),
        (["tag", "latest", "--remove", "x"], "has no tag 'x'", "it has none"),
        (["tag", "latest", "--name", "1"], "--name '1' is not a name for a run", "begin it with a letter"),
        (["prune"], "prune needs to know what to remove", "--keep N"),
        (["prune", "--keep", "x"], "--keep 'x' is not a number of runs", "--keep 20"),
        (["prune", "--keep", "0"], "a removal has to be confirmed", "--yes"),
        (["remove", "latest"], "a removal has to be confirmed", "--yes"),
    ],
)
def test_what_cannot_be_done_is_refused(
    results: Path, command_line: CommandLine, options: list[str], error: str, hint: str
) -> None:
    path = made(results, settings=config(8, "fp32"))
    said = complaint(command_line("runs", *options))
    assert error in said[0]
    assert hint in said[1]
    assert path.is_dir()


def test_a_listing_says_whether_there_are_no_runs_or_none_that_fit(results: Path, command_line: CommandLine) -> None:
    results.mkdir()
    assert command_line("runs").stdout == "no runs in results\n"
    made(results)
    assert command_line("runs", "--model", "gpt2").stdout == "none of 1 run in results fits\n"


def test_a_screen_leads_with_the_counts_and_shows_the_newest_twenty(results: Path, command_line: CommandLine) -> None:
    paths = [write_run(results, repeats=0, status=FAILED) for _ in range(21)]
    newest = made(results, name="base", tags=["weekly"])
    done = command_line("runs")
    lines = done.stdout.splitlines()
    assert lines[0] == "22 runs in results: 1 completed, 21 failed"
    shown = [line.split()[0] for line in lines if line[:2] == "20"]
    assert shown == [newest.name, *(path.name for path in paths[:1:-1])]
    assert {"base", "weekly", "samples/s"} <= set(next(line for line in lines if newest.name in line).split())
    assert "2 more" in done.stdout


def test_a_run_is_shown_again_as_it_was_at_its_end(finished_run: Path, command_line: CommandLine) -> None:
    results = ("--results", str(finished_run.parents[1]))
    shown = command_line("runs", "show", finished_run.name, *results)
    assert (shown.code, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[-2:] == [f"completed: {finished_run}", f"page: {finished_run / REPORT}"]
    document = json.loads(command_line("runs", *results, "show", "latest", "--json").stdout)
    assert [run["path"] for run in document["runs"]] == [str(finished_run)]


def test_a_run_has_the_name_and_the_tags_that_it_is_started_with(finished_run: Path, command_line: CommandLine) -> None:
    record = json.loads((finished_run / RUN).read_text())
    assert (record["name"], record["tags"]) == ("tiny-run", ["a", "b"])
    assert "tiny-run" not in (finished_run / "config.yaml").read_text()
    shown = command_line("runs", "show", "tiny-run", "--results", str(finished_run.parents[1]))
    assert shown.stdout.splitlines()[-2] == f"completed: {finished_run}"


@pytest.mark.parametrize(("own", "names"), [(0, ["base", "base-2", "base-3"]), (1, ["base-2", "base", "base-3"])])
def test_the_runs_of_one_command_share_a_name_and_all_tags(results: Path, own: int, names: list[str]) -> None:
    given: Any = SimpleNamespace(params={"name": "base", "tag": ["x", "x"]})
    base = load(TrainSettings, "tiny", {"results": str(results)})
    runs = [completed(base.with_overrides({"seed": seed}, "--vs"), complete) for seed in range(3)]
    found = options.labelled(given, runs, own)
    assert [run.labels[:2] for run in found] == [(name, ("x",)) for name in names]
    assert len({run.labels.variant for run in found}) == 1  # a seed tells no variant
    assert found[0].with_overrides({"seed": 9}, "a trial").labels == Labels()


@pytest.mark.parametrize("name", ["1st", "a/b", "latest~1", "", "made"])
def test_a_name_that_no_run_can_have_is_refused_before_the_run(
    results: Path, command_line: CommandLine, name: str
) -> None:
    (results / "made").mkdir(parents=True)
    said, _ = complaint(command_line("memory", "--config", "tiny", "--device", "cpu", "--name", name))
    assert f"--name {name}" in said.replace("'", "")
    assert list(results.glob("*/*")) == []


def test_a_page_is_opened_in_the_browser_and_its_path_is_printed_in_any_case(
    results: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = made(results).resolve() / REPORT
    complaint(command_line("runs", "open", "latest"))  # there is no page yet
    page.write_text("a page")
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert command_line("runs", "open", "latest").stdout == f"{page}\n"
    script, opened = tmp_path / "browser.sh", tmp_path / "opened"
    script.write_text(f'printf %s "$1" > {opened}.part && mv {opened}.part {opened}')
    monkeypatch.setenv("BROWSER", f"sh {script}")
    assert command_line("runs", "open", "latest").stdout == f"{page}\n"
    assert wait_until(opened.exists)
    assert opened.read_text() == page.as_uri()
    monkeypatch.setenv("BROWSER", "no-such-browser")
    assert command_line("runs", "open", "latest").stdout == f"{page}\n"


def test_tags_and_names_are_changed_and_nothing_else(results: Path, command_line: CommandLine) -> None:
    path = made(results)
    before = json.loads((path / RUN).read_text())
    assert command_line("runs", "tag", "latest", "b", "a", "--name", "base").stdout == f"{path.name} base: a, b\n"
    assert json.loads((path / RUN).read_text()) == before | {"name": "base", "tags": ["a", "b"]}
    assert command_line("runs", "tag", "base", "--remove", "a").stdout == f"{path.name} base: b\n"
    assert command_line("runs", "tag", "base").stdout == f"{path.name} base: b\n"


def test_a_run_in_progress_keeps_the_tags_that_it_is_given(results: Path, command_line: CommandLine) -> None:
    writer = RunWriter(results, "made", "{}", command="train-bench", argv=[], world_size=1, git=None, tags=["first"])
    command_line("runs", "tag", "latest", "second", "--name", "base")
    writer.finish(COMPLETED)
    record = json.loads((writer.path / RUN).read_text())
    assert (record["status"], record["name"], record["tags"]) == ("completed", "base", ["first", "second"])


def test_pruning_spares_what_is_new_running_tagged_named_or_behind_a_link(
    results: Path, command_line: CommandLine, tmp_path: Path
) -> None:
    failed = made(results, started=OLD, status=FAILED)
    interrupted = made(results, started=OLD, status=INTERRUPTED)
    outside = made(tmp_path / "elsewhere", started=OLD, status=FAILED)
    kept = [
        made(results, status=FAILED),
        made(results, started=OLD),
        made(results, started=OLD, status=RUNNING),
        made(results, started=OLD, status=FAILED, tags=["x"]),
        made(results, started=OLD, status=FAILED, name="base"),
    ]
    (results / "linked").symlink_to(outside.parent)
    (results / "made" / "20200101-000000-000-aaaa").symlink_to(outside)
    (results / "made" / "mine").mkdir()
    (results / "made" / "mine" / RUN).write_text('{"run": "of another tool"}')
    done = command_line("runs", "prune", "--failed", "--older", "30d", "--yes")
    assert done.code == 0, done.stderr
    assert "removed 2 runs" in done.stdout
    assert not failed.exists()
    assert not interrupted.exists()
    assert all(path.is_dir() for path in (*kept, outside, results / "linked", results / "made" / "mine"))


def test_pruning_keeps_the_newest_runs_of_each_experiment(results: Path, command_line: CommandLine) -> None:
    paths = {name: [made(results, name) for _ in range(3)] for name in ("one", "two")}
    command_line("runs", "prune", "--keep", "2", "--experiment", "one", "--yes")
    assert [path.exists() for path in (*paths["one"], *paths["two"])] == [False, True, True, True, True, True]
    command_line("runs", "prune", "--keep", "0", "--yes")
    assert not (results / "one").exists()


def test_a_run_that_begins_or_is_tagged_before_the_answer_is_not_removed(
    results: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = made(results), made(results)

    def answer(*_: Any, **__: Any) -> bool:
        edit(first / RUN, tags=["x"])
        return True

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", answer)
    done = command_line("runs", "prune", "--keep", "0")
    assert "tagged x" in complaint_of(done)
    assert (first.exists(), second.exists()) == (True, False)


def complaint_of(done: Finished) -> str:
    assert done.code == 2, done
    return done.stderr


def test_nothing_is_removed_after_a_no(
    results: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(results)
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    done = command_line("runs", "remove", "latest")
    assert done.code == 130
    assert path.name in done.stdout
    assert path.exists()


def test_a_search_is_removed_as_a_whole_but_not_while_it_runs(results: Path, command_line: CommandLine) -> None:
    folder, paths = searched(results, "tune-1", runs=2)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "the search is running" in complaint_of(command_line("runs", "remove", "tune-1", "--yes"))
    assert all(path.exists() for path in paths)
    assert "removed 2 runs" in command_line("runs", "remove", "tune-1", "--yes").stdout
    assert not folder.exists()


def test_one_run_of_a_search_is_not_removed_with_the_others(results: Path, command_line: CommandLine) -> None:
    _, paths = searched(results, "tune-1", runs=2)
    assert "as a whole" in complaint_of(command_line("runs", "remove", str(paths[0]), "--yes"))
    assert all(path.exists() for path in paths)


def test_pruning_spares_what_cannot_be_read(results: Path, command_line: CommandLine) -> None:
    unreadable, newer = made(results), made(results)
    (unreadable / RUN).write_text('{"tags": ["ke')
    edit(newer / RUN, schema_version=99, tags=["keep"])
    assert "removed" not in command_line("runs", "prune", "--keep", "0", "--yes").stdout
    assert unreadable.is_dir()
    assert newer.is_dir()


def test_a_tag_never_undoes_what_the_host_of_the_run_writes_meanwhile(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(results, "made", "{}", command="train-bench", argv=[], world_size=1, git=None)
    write = directory.write_document

    def finishing(path: Path, document: Any) -> None:
        write(path, document)
        if path.name != RUN and writer.path.joinpath(RUN).exists():
            monkeypatch.setattr(directory, "write_document", write)
            writer.finish(COMPLETED)

    monkeypatch.setattr(directory, "write_document", finishing)
    directory.relabel(writer.path, add=["x"])
    record = json.loads((writer.path / RUN).read_text())
    assert (record["status"], record["tags"]) == ("completed", ["x"])


@pytest.mark.parametrize("protection", [{"tags": ["x"]}, {"status": RUNNING}])
def test_a_protected_run_is_not_removed_even_if_it_is_named(
    results: Path, command_line: CommandLine, protection: dict[str, Any]
) -> None:
    path = made(results, **protection)
    assert "is not removed: it is " in complaint_of(command_line("runs", "remove", path.name, "--yes"))
    assert path.exists()


def test_a_run_outside_of_the_results_folder_is_not_removed(
    results: Path, command_line: CommandLine, tmp_path: Path
) -> None:
    made(results)
    outside = made(tmp_path / "elsewhere")
    assert "is not a run of results" in complaint(command_line("runs", "remove", str(outside), "--yes"))[0]
    assert outside.exists()


def test_ages_are_counted_back_from_now() -> None:
    from gpubench.runs.selection import moment, stamp

    now = datetime(2026, 11, 23, 12, tzinfo=UTC)
    assert moment("90min", "--since", now) == now - timedelta(minutes=90)
    assert stamp(moment("2w", "--since", now)) == "2026-11-09T12:00:00.000Z"
