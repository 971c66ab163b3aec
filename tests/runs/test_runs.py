import errno
import json
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from places import DOCS
from recorded_runs import edit, write_run
from running import disk

from gpubench import foreign_files
from gpubench.errors import RunDirectoryError, RunFailed
from gpubench.runs import configuration, directory
from gpubench.runs.directory import (
    COMPLETED,
    CONFIG,
    FAILED,
    INTERRUPTED,
    RESERVED,
    RESERVED_BYTES,
    RUN,
    RUNNING,
    SCHEMA_VERSION,
    STEPS,
    SUMMARY,
    TELEMETRY,
    RunWriter,
    create_directory,
    sample_file,
)
from gpubench.runs.entries import read
from gpubench.runs.reader import Run
from gpubench.schema import schema


class Line(msgspec.Struct):
    number: int


def writer(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path, "trial", "seed: 0\n", command="train-bench", argv=[], world_size=1, git=None)


def test_run_ids_sort_by_time_and_never_collide(tmp_path: Path) -> None:
    made = [create_directory(tmp_path) for _ in range(50)]
    assert len(set(made)) == 50
    stamps = [path.name.rpartition("-")[0] for path in made]
    assert stamps == sorted(stamps)


def test_a_run_is_running_until_it_is_finished(tmp_path: Path) -> None:
    run = writer(tmp_path)
    assert Run.open(run.path).status == RUNNING
    run.append(STEPS, Line(1))
    run.finish(COMPLETED)
    found = Run.open(run.path)
    assert found.status == COMPLETED
    assert found.record.command == "train-bench"
    assert list(found.lines(STEPS, Line)) == [Line(1)]
    assert (run.path / "config.yaml").read_text() == "seed: 0\n"
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


def test_a_run_whose_host_is_gone_was_interrupted(tmp_path: Path) -> None:
    run = writer(tmp_path)
    run.update(pid=2**22 + 1)  # beyond the largest pid
    assert Run.open(run.path).status == INTERRUPTED


def test_a_process_that_inherited_the_pid_is_not_the_host(tmp_path: Path) -> None:
    run = writer(tmp_path)
    run.update(pid=os.getppid(), pid_created=psutil.Process(os.getppid()).create_time() - 3600)
    assert Run.open(run.path).status == INTERRUPTED


def test_a_torn_last_line_is_passed_over_and_named(tmp_path: Path) -> None:
    run = writer(tmp_path)
    (run.path / STEPS).write_bytes(b'{"number":1}\n{"number":2}\n{"num')
    found = Run.open(run.path)
    assert list(found.lines(STEPS, Line)) == [Line(1), Line(2)]
    (problem,) = found.problems
    assert problem.startswith(f"{run.path / STEPS}:3: ")


def test_a_newer_schema_is_refused_with_its_version(tmp_path: Path) -> None:
    run = writer(tmp_path)
    run.update(schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(RunDirectoryError, match=f"schema version {SCHEMA_VERSION + 1}"):
        Run.open(run.path)


@pytest.mark.parametrize("content", ["", "[]", "{}", "nonsense", '{"schema_version": "one"}', "\udcff"])
def test_what_is_no_run_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / RUN).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(RunDirectoryError):
        Run.open(tmp_path)
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        Run.open(tmp_path / RUN)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    with pytest.raises(RunDirectoryError, match="results"):
        writer(tmp_path / "results")


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = writer(tmp_path)
    (run.path / STEPS).symlink_to("/dev/full")
    monkeypatch.setattr(foreign_files, "appended", lambda path: path.open("ab"))  # which follows a link
    run.append(STEPS, Line(1))
    with pytest.raises(RunFailed, match=r"cannot write .*steps\.jsonl: No space left on device"):
        run.flush()
    with suppress(RunFailed):
        run.finish(COMPLETED)
    run.finish(FAILED)
    assert Run.open(run.path).status == FAILED


def fill(run: RunWriter) -> None:
    for number in range(100_000):
        run.append(STEPS, Line(number))
        run.append(TELEMETRY, Line(number))


def test_a_disk_that_fills_up_still_takes_what_was_measured_and_how_the_run_ended(tmp_path: Path) -> None:
    with disk(tmp_path, "256k") as folder:
        run = writer(folder)
        with pytest.raises(RunFailed, match=r"cannot write .*(steps|telemetry)\.jsonl: No space left on device"):
            fill(run)
        run.replace(SUMMARY, {"metrics": ["x" * 20_000]})
        with suppress(RunFailed):
            run.finish(COMPLETED)
        run.finish(FAILED, {"kind": "RunFailed", "message": "no room"})
        found = Run.open(run.path)
        assert found.status == FAILED
        assert found.record.error == {"kind": "RunFailed", "message": "no room"}
        assert json.loads((run.path / SUMMARY).read_text())["metrics"]
        assert not (run.path / RESERVED).exists()


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_sample_does_not_take_the_room_that_is_kept_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = writer(tmp_path)
    monkeypatch.setattr(directory, "write_document", no_room)
    with pytest.raises(RunFailed, match=r"cannot write .*00000\.safetensors: No space left on device"):
        run.replace(sample_file(0, "safetensors"), b"latent")
    assert (run.path / RESERVED).stat().st_size == RESERVED_BYTES


def test_a_disk_that_others_fill_to_the_last_byte_still_says_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = writer(tmp_path)
    monkeypatch.setattr(directory, "write_document", no_room)
    run.finish(FAILED, {"kind": "RunFailed", "message": "no room", "hint": None})
    found = Run.open(run.path)
    assert (found.record.status, found.record.error) == (
        FAILED,
        {"kind": "RunFailed", "message": "no room", "hint": None},
    )


def test_a_run_without_room_for_its_end_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "write_document", no_room)
    with pytest.raises(RunDirectoryError, match=r"no space for a run under .*trial: No space left on device"):
        writer(tmp_path)
    assert not list((tmp_path / "trial").iterdir())


def test_a_file_that_comes_in_pieces_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    run = writer(tmp_path)
    run.append_piece("traces/one.gz", b"first, ", last=False)
    assert [path.name for path in (run.path / "traces").iterdir()] == [".one.gz.part"]
    run.append_piece("traces/one.gz", b"second", last=True)
    assert [path.read_bytes() for path in (run.path / "traces").iterdir()] == [b"first, second"]


def test_a_piece_that_finds_no_room_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = writer(tmp_path)
    run.append_piece("one.gz", b"first", last=False)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(foreign_files, "appended", full)
    with pytest.raises(RunFailed, match=r"one\.gz: No space left"):
        run.append_piece("one.gz", b"second", last=True)
    assert not list(run.path.glob("*one.gz*"))


def test_documents_hold_no_nan(tmp_path: Path) -> None:
    run = writer(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        run.replace("summary.json", {"value": float("nan")})
    run.replace("summary.json", {"value": None})
    assert json.loads((run.path / "summary.json").read_text()) == {"value": None}


def test_the_published_schema_is_that_of_the_code() -> None:
    published = DOCS / "run-directory.schema.json"
    assert json.loads(published.read_text()) == schema()


def test_settings_are_read_from_run_json_and_of_older_runs_from_config_yaml(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (path / CONFIG).write_text("training:\n  batch_size: 8  # default: the model's own\nseed: 3\n")
    older = {"training.batch_size": 8, "seed": 3}
    assert (Run.open(path).given, Run.open(path).chosen) == (older, frozenset({"training.batch_size"}))
    assert read(str(path)).settings == older
    edit(path / RUN, settings={"training.batch_size": 16, "model": {"name": "gpt2"}}, chosen=["model.name"])
    (path / CONFIG).unlink()
    later = {"training.batch_size": 16, "model.name": "gpt2"}
    assert (Run.open(path).given, Run.open(path).chosen) == (later, frozenset({"model.name"}))
    assert (read(str(path)).settings, read(str(path)).model) == (later, "gpt2")
    assert Run.open(path).problems == []


def test_the_settings_in_run_json_are_those_in_config_yaml(finished_run: Path) -> None:
    text, run = (finished_run / CONFIG).read_bytes(), Run.open(finished_run)
    assert run.record.settings == configuration.settings(text)
    assert run.chosen == configuration.chosen(text)
    assert {"model.name", "precision"} & run.chosen == {"precision"}
