"""What becomes of a run whose directory changes under it, or that is given text which JSON lacks."""

import errno
import json
import os
import sys
from pathlib import Path

import pytest
from places import SUPPORT
from running import gpubench

from gpubench.errors import RunDirectoryLost, RunFailed
from gpubench.runs import directory
from gpubench.runs.directory import STEPS, RunWriter
from gpubench.runs.reader import Run

CLEANER = """
import os, runpy, shutil, sys
how, results, program = sys.argv[1:]
old, new = results + ".old", results + ".new"  # at once, because gpubench may write a file meanwhile
if how == "replace":
    shutil.copytree(results, new)
elif how == "file":
    open(new, "w").close()
os.rename(results, old)
if how in ("replace", "file"):
    os.rename(new, results)
elif how == "remove":
    shutil.rmtree(old)
sys.argv = [program, "500", "0"]
runpy.run_path(program, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("how", "done"), [("remove", "removed"), ("rename", "removed"), ("replace", "replaced"), ("file", "removed")]
)
def test_a_program_that_changes_its_results_folder_is_told_so_and_its_run_has_failed(
    tmp_path: Path, how: str, done: str
) -> None:
    (tmp_path / "cleaner.py").write_text(CLEANER)
    program = str(SUPPORT / "training_program.py")
    results = tmp_path / "results"
    words = [sys.executable, str(tmp_path / "cleaner.py"), how, str(results), program]
    run = gpubench("train-bench", "--repeats", "1", "--steps", "20", "-q", "--", *words, results=results)
    error, hint = (line for line in run.stderr.splitlines() if not line.startswith("warning: "))
    assert (run.code, run.stdout) == (1, "")
    assert error.startswith(f"error: the run directory {results}/program/")
    assert error.endswith(f" was {done} while the program ran")
    assert "--results" in hint


@pytest.mark.parametrize("way", ["unlink", "replace"])
def test_a_file_that_is_taken_from_a_run_is_named_and_the_rest_is_kept(tmp_path: Path, way: str) -> None:
    writer = RunWriter(tmp_path, "made", "", command="train-bench", argv=[], world_size=1, git=None)
    writer.append(STEPS, {"step": 0})
    writer.flush()
    (writer.path / STEPS).unlink()
    if way == "replace":
        (writer.path / STEPS).symlink_to("/dev/null")
    with pytest.raises(RunDirectoryLost, match=rf"^{writer.path}/steps\.jsonl was re(mov|plac)ed while"):
        writer.flush()
    with pytest.raises(RunDirectoryLost):
        writer.finish("failed")
    writer.finish("failed", {"kind": "RunDirectoryLost", "message": "", "hint": None})
    assert Run.open(writer.path).status == "failed"


@pytest.mark.parametrize(("number", "hint"), [(errno.EACCES, "read-only"), (errno.ENOSPC, "disk space")])
def test_a_hint_fits_the_reason_for_which_a_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    writer = RunWriter(tmp_path, "made", "", command="train-bench", argv=[], world_size=1, git=None)

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory, "write_document", fails)
    with pytest.raises(RunFailed, match="cannot write") as caught:
        writer.replace("profile.json", "{}")
    assert hint in (caught.value.hint or "")


def test_a_text_that_json_lacks_is_written_as_an_escape_and_read(tmp_path: Path) -> None:
    argv = ["train.py", "caf\udce9.py", "\N{SLIGHTLY SMILING FACE} \"'\\"]
    writer = RunWriter(tmp_path, "made", "", command="train-bench", argv=argv, world_size=1, git=None)
    writer.append(STEPS, {"step": "\udce9"})
    writer.finish("completed")
    assert Run.open(writer.path).record.argv == ["train.py", "caf\\udce9.py", argv[2]]
    assert json.loads((writer.path / STEPS).read_text()) == {"step": "\\udce9"}
