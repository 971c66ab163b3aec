"""The catalogue of a results folder: it says what the files say, whatever became of the folders and the cache."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from recorded_runs import edit, write_run

from gpubench.runs.catalogue import CACHE, catalogue
from gpubench.runs.directory import CONFIG, FAILED, INTERRUPTED, RUN, RUNNING, SUMMARY
from gpubench.runs.entries import DAMAGED, Entry, common_variables, read, without
from gpubench.runs.reader import Run

REALISTIC = """experiment: made                     # default
device: cpu                              # default: no GPU found
performance:
  compile: false                         # default
  matmul_precision: null                 # default
model:
  name: resnet18                         # command line
  arguments: {}                          # default
training:
  learning_rate: 0.001                   # default
  betas: [0.9, 0.999]                    # default
  note: 'a # b'                          # command line
"""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that were read from their folders."""
    found = list[str]()

    def noted(folder: str) -> Entry:
        found.append(Path(folder).name)
        return read(folder)

    monkeypatch.setattr("gpubench.runs.catalogue.read", noted)
    return found


@pytest.mark.parametrize(
    ("variant", "asked", "others", "said"),
    [
        ("baseline", {"OMP_NUM_THREADS": "1"}, ["other"], "baseline, OMP_NUM_THREADS=1"),
        ("workers=2", {"data.workers": 2, "precision": "bf16"}, ["other"], "workers=2, precision=bf16"),
        ("workers=2", {"program.command": "python train.py", "data.workers": 2}, ["other"], "workers=2"),
        ("OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1"}, [], "OMP_NUM_THREADS=1"),
        ("baseline", {}, ["other"], "baseline"),
        ("baseline", None, ["other"], "baseline"),
    ],
)
def test_a_listing_tells_what_was_asked_of_both_sides_of_a_comparison(
    tmp_path: Path, variant: str, asked: dict[str, object] | None, others: list[str], said: str
) -> None:
    edit(write_run(tmp_path) / RUN, variant=variant, asked=asked, interleaved_with=others)
    (entry,) = catalogue(tmp_path)
    assert entry.variant == said


def test_an_entry_says_what_the_files_say(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    edit(path / RUN, name="base", tags=["b", "a"], observed={"performance.matmul_precision": "high"})
    (path / CONFIG).write_text(REALISTIC)
    (entry,) = catalogue(tmp_path)
    run = Run.open(path)
    assert run.summary
    assert (entry.path, entry.run_id, entry.record.started) == (path, run.record.run_id, run.record.started)
    assert (entry.name, entry.tags, entry.model, entry.device) == ("base", ("b", "a"), "resnet18", "cpu")
    assert (entry.command, entry.record.status, entry.measured, entry.problem) == (
        "train-bench",
        run.status,
        True,
        None,
    )
    assert entry.settings == run.settings
    assert entry.settings["performance.matmul_precision"] == "high"
    assert {name: one.estimate for name, one in entry.metrics.items()} == {
        one.name: one.estimate for one in run.summary.metrics
    }


@pytest.mark.parametrize(
    "text",
    [
        REALISTIC,
        "a: 1\nb:\n  c: 2\n  d:\n    e: yes\nf: null\n",
        "a:\nb: 1\n",
        "a:\n- 1\n- 2\nb: x\n",
        "a: >\n  folded\n  text\nb: 1\n",
        "a: 'one\n  two: 3'\nb: 1\n",
        "a: &x 1\nb: *x\n",
        "yes: 1\nb: 2026-11-01\n",
        "a: 1\na: 2\n",
        "a: 1\n   b: 2\n",
        "a: b: c\n",
        "a: .nan\nb: 0x10\nc: -3\nd: - 3\n",
        "--- \na: 1\n...\n",
        "a: {b: 1, c: {d: 2}}\n",
        "a: 1\r\nb: 2\r\n",
        "\tb: 1\n",
        "# nothing\n",
        "",
    ],
)
def test_settings_are_read_as_the_reader_of_a_run_reads_them(tmp_path: Path, text: str) -> None:
    path = write_run(tmp_path, repeats=1, steps=12)
    (path / CONFIG).write_text(text)
    (entry,) = catalogue(tmp_path)
    assert entry.settings == Run.open(path).settings


def test_runs_that_are_added_copied_in_edited_and_deleted_are_noticed_and_no_others_are_read(
    tmp_path: Path, reads: list[str]
) -> None:
    def listed() -> set[Path]:
        reads.clear()
        return {entry.path for entry in catalogue(tmp_path)}

    first = write_run(tmp_path, repeats=1, steps=12)
    assert (listed(), reads) == ({first}, [first.name])
    assert (listed(), reads) == ({first}, [])
    second = write_run(tmp_path, "other", repeats=1, steps=12)
    assert (listed(), reads) == ({first, second}, [second.name])
    copied = tmp_path / "copy" / first.name
    shutil.copytree(first, copied)
    assert (listed(), reads) == ({first, second, copied}, [first.name])
    edit(second / RUN, tags=["x"])
    assert (listed(), reads) == ({first, second, copied}, [second.name])
    (first / SUMMARY).unlink()
    assert (listed(), reads) == ({first, second, copied}, [first.name])
    shutil.rmtree(first)
    assert (listed(), reads) == ({second, copied}, [])


def test_a_growing_run_is_read_again_and_one_that_was_killed_is_interrupted(tmp_path: Path) -> None:
    path = write_run(tmp_path, repeats=1, steps=12, status=RUNNING)
    assert [entry.record.status for entry in catalogue(tmp_path)] == [RUNNING]
    edit(path / RUN, pid_created=1.0)
    assert [entry.record.status for entry in catalogue(tmp_path)] == [INTERRUPTED]
    assert [entry.record.status for entry in catalogue(tmp_path)] == [INTERRUPTED]


def as_a_pipe(cache: Path) -> None:
    cache.unlink()
    os.mkfifo(cache)


def as_a_folder(cache: Path) -> None:
    cache.unlink()
    cache.mkdir()


def cut_short(cache: Path) -> None:
    cache.write_bytes(cache.read_bytes()[:-20])


def of_something_else(cache: Path) -> None:
    cache.write_bytes(b'{"version": 1}')


def with_other_details(cache: Path) -> None:
    content = cache.read_bytes()
    assert content.count(b"samples/s")
    cache.write_bytes(content.replace(b"samples/s", b"\xc1amples/s"))


@pytest.mark.parametrize("spoil", [as_a_pipe, as_a_folder, cut_short, of_something_else, with_other_details])
def test_a_cache_that_cannot_be_used_is_no_obstacle(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    write_run(tmp_path, repeats=1, steps=12)
    (before,) = catalogue(tmp_path)
    spoil(tmp_path / CACHE)
    (after,) = catalogue(tmp_path)
    assert (after.metrics, after.settings, after.record) == (before.metrics, before.settings, before.record)


def test_the_cache_moves_with_the_folder_and_from_one_working_directory_to_another(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "old", repeats=1, steps=12)
    catalogue(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    (entry,) = catalogue(Path("new"))
    assert len(reads) == 1
    assert entry.path.is_relative_to("new")
    assert entry.path.is_dir()


def test_what_cannot_be_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    broken = write_run(tmp_path, repeats=1, steps=12)
    (broken / RUN).write_text("{")
    newer = write_run(tmp_path, repeats=1, steps=12)
    edit(newer / RUN, schema_version=99)
    gone = write_run(tmp_path, repeats=1, steps=12)
    (gone / SUMMARY).unlink()
    failed = write_run(tmp_path, repeats=1, steps=12, status=FAILED)
    (failed / SUMMARY).unlink()
    (tmp_path / "made" / "notes").mkdir()
    found = {entry.path: entry for entry in catalogue(tmp_path)}
    assert list(found) == [failed, gone, newer, broken]
    assert [entry.record.status for entry in found.values()] == ["failed", "completed", DAMAGED, DAMAGED]
    assert [entry.measured for entry in found.values()] == [False, False, True, True]
    problems = [entry.problem or "" for entry in found.values()]
    assert problems[0] == ""
    assert problems[1] == f"{gone / SUMMARY} is missing"
    assert "99" in problems[2]
    assert str(broken / RUN) in problems[3]


def test_runs_of_searches_and_trials_are_known_as_such(tmp_path: Path) -> None:
    kinds = {"search": "tune-1", "trial": "profile-verify", None: "made"}
    paths = {kind: write_run(tmp_path, name, repeats=1, steps=12) for kind, name in kinds.items()}
    (paths["search"].parent / "tune.json").write_text("{}")
    found = catalogue(tmp_path)
    assert {entry.part_of: entry.path for entry in found if not entry.is_search} == paths
    assert [entry.path for entry in found if entry.is_search] == [paths["search"].parent]


def test_a_program_is_called_by_its_command_line(tmp_path: Path) -> None:
    path = write_run(tmp_path, "program", repeats=1, steps=12)
    edit(path / RUN, command="program-profile")
    (path / CONFIG).write_text("program:\n  command: /usr/bin/python3 train.py\n")
    (entry,) = catalogue(tmp_path)
    assert (entry.model, entry.command, entry.record.command) == ("python3 train.py", "profile", "program-profile")


def test_no_folder_is_no_runs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert catalogue(tmp_path / "results") == []
    assert list(tmp_path.iterdir()) == []


def test_the_reference_workload_and_the_environment_are_those_of_the_summary(tmp_path: Path) -> None:
    path = write_run(tmp_path, repeats=1, steps=12)
    summary = json.loads((path / SUMMARY).read_text())
    known = summary["metrics"][0] | {"name": "yardstick_time", "unit": "s", "better": None, "estimate": 0.25}
    edit(path / SUMMARY, metrics=[*summary["metrics"], known], environment={"device": "a GPU", "torch": "2.13.0"})
    (entry,) = catalogue(tmp_path)
    assert (entry.reference, entry.device, entry.environment["torch"]) == (4.0, "a GPU", "2.13.0")


def test_a_variable_that_all_runs_have_tells_none_of_them_apart() -> None:
    def named(*variants: str) -> list[str]:
        found = [cast("Entry", SimpleNamespace(variant=one, is_search=False)) for one in variants]
        shared = common_variables(found)
        return [without(one, shared) for one in variants]

    assert named("OMP_NUM_THREADS=1", "workers=2, OMP_NUM_THREADS=1", "compile=true OMP_NUM_THREADS=1") == [
        "", "workers=2", "compile=true"
    ]  # fmt: skip
    assert named("OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2") == ["OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2"]
    assert named("workers=2", "workers=2") == ["workers=2", "workers=2"]
    assert named() == []


def test_an_integer_that_no_word_of_a_machine_holds_is_listed_as_text(tmp_path: Path) -> None:
    path = write_run(tmp_path, "run")
    edit(path / RUN, settings={"training": {"batch_size": 2**70}})
    assert read(str(path)).settings["training.batch_size"] == str(2**70)
