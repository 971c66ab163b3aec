"""What train-bench leaves beside its measurements when it is over."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import edit, write_run
from running import TINY, Finished, gpubench

from gpubench.compare.evidence import open_run
from gpubench.report import after_run
from gpubench.report.document import Paragraph
from gpubench.report.phrases import headline
from gpubench.report.run import document, to_json
from gpubench.runs import directory
from gpubench.runs.catalogue import catalogue
from gpubench.runs.reader import Run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    options = ("--steps", "6", "--training.warmup_steps=2", "--repeats", "2", "--vs", "precision=bf16")
    done = gpubench("train-bench", *TINY, *options, "--experiment", "notes", results=tmp_path_factory.mktemp("pair"))
    assert done.code == 0, done.stderr
    return done


def test_two_runs_in_turn_are_judged_by_their_pairs(pair: Finished) -> None:
    found = after_run.judge_pair(pair.runs)
    assert found is not None
    assert any(verdict.paired for verdict in found.comparisons[0].verdicts)
    first, second = (Run.open(path).record for path in pair.runs)
    assert first.interleaved_with == [second.run_id]
    assert second.interleaved_with == [first.run_id]


def test_the_comparison_of_two_runs_precedes_where_they_are(pair: Finished) -> None:
    found = after_run.judge_pair(pair.runs)
    assert found is not None
    answer = headline(found.comparisons[0])
    assert pair.stdout.startswith(answer)
    places = [pair.stdout.index(f"completed: {path}") for path in pair.runs]
    assert len(answer) < places[0] < places[1]
    assert list(json.loads(to_json(pair.runs, found)))[-1] == "runs"


def test_without_a_comparison_the_report_of_two_runs_says_so_first(pair: Finished) -> None:
    first = document(pair.runs).blocks[0]
    assert isinstance(first, Paragraph)
    assert first.texts == ["no comparison, because a run has no complete repeat"]


def test_every_run_records_what_the_model_turned_out_to_be(pair: Finished) -> None:
    workload = Run.open(pair.runs[0]).record.workload
    assert workload
    assert workload["parameters"] > 10_000
    assert workload["tokens_per_sample"] == 32


def test_the_noise_of_the_repeats_is_on_record(pair: Finished) -> None:
    noise = json.loads((pair.runs[0] / directory.NOISE).read_text())
    assert noise["runs"] == [pair.runs[0].name]
    assert noise["machine"]["host.name"]
    step_time = next(entry for entry in noise["metrics"] if entry["metric"] == "step_time")
    assert step_time["units"] == 2
    assert step_time["spread"] > 0
    assert step_time["noise_floor"] is None or 1 >= step_time["noise_floor"] > step_time["spread"]


def test_the_candidate_has_the_comparison_and_its_page(pair: Finished) -> None:
    baseline, candidate = pair.runs
    kept = json.loads((candidate / directory.COMPARISON).read_text())
    assert kept["baseline"] == baseline.name
    assert kept["labels"] == [Run.open(path).record.variant for path in pair.runs]
    assert kept["verdict"] == kept["result"]["comparisons"][0]["verdicts"][0]["verdict"]
    assert baseline.name in (candidate / directory.COMPARISON_PAGE).read_text()
    assert not (baseline / directory.COMPARISON).exists()
    entry, _ = catalogue(candidate.parent.parent)
    assert "precision=bf16" in entry.variant
    assert entry.compared is not None
    assert entry.compared.baseline == baseline.name


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ({}, {}, False),
        ({"status": "interrupted"}, {}, True),
        ({"asked": {"data.workers": 2}}, {"asked": {}}, True),
        ({"asked": {}}, {"asked": {"OMP_NUM_THREADS": "1"}}, True),
        ({"asked": {"data.workers": 2}}, {"asked": {"data.workers": 2}}, False),
    ],
)
def test_a_report_compares_with_a_completed_run_that_was_asked_for_alike(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], differs: bool
) -> None:
    older, newer = (write_run(tmp_path, "made") for _ in range(2))
    edit(older / directory.RUN, **first)
    edit(newer / directory.RUN, **second)
    after_run.write_up(newer)
    assert (older.name not in (newer / directory.REPORT).read_text()) == differs


def test_a_run_that_measured_nothing_gets_no_report(pair: Finished, tmp_path: Path) -> None:
    path = tmp_path / "empty"
    shutil.copytree(pair.runs[0], path)
    for name in (directory.SUMMARY, directory.NOISE, directory.REPORT):
        (path / name).unlink()
    after_run.write_up(path)
    assert not (path / directory.REPORT).exists()


def test_a_report_that_cannot_be_written_does_not_end_the_run(
    pair: Finished, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / pair.runs[0].name
    shutil.copytree(pair.runs[0], path)
    (path / directory.REPORT).unlink()
    (path / directory.REPORT).mkdir()
    after_run.write_up(path)
    assert "no report" in caplog.text


def test_equal_runs_of_an_experiment_teach_each_other_how_runs_differ(tmp_path: Path) -> None:
    paths = [write_run(tmp_path, "same", repeats=2) for _ in range(4)]
    after_run.write_up(paths[2])
    after_run.write_up(paths[3])
    third, fourth = (json.loads((path / directory.NOISE).read_text()) for path in paths[2:])
    assert fourth["runs"] == [path.name for path in (paths[3], *reversed(paths[:3]))]
    levels = [
        [entry["level"] for entry in noise["metrics"] if entry["metric"] == "step_time"] for noise in (third, fourth)
    ]
    assert levels == [["repeat"], ["run"]]


def test_the_page_of_a_program_says_what_changed_since_a_run_of_the_same_program(tmp_path: Path) -> None:
    paths = [write_run(tmp_path, "program") for _ in range(3)]
    for path, command in zip(paths, ("python a.py", "python b.py", "python a.py"), strict=True):
        config = path / directory.CONFIG
        config.write_text(f"{config.read_text()}\nprogram: {{command: {command}}}\n")
    earlier = [run.path for run in after_run.before(open_run(paths[2]))]
    assert earlier == [paths[0]]
