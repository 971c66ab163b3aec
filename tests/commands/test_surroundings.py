"""What stands in the way of every command is one error with a hint: no current directory, no memory, no thread."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from running import environment

from gpubench import __main__

COMMANDS = [
    "runs", "runs list", "runs show latest", "runs open latest", "runs tag latest a", "runs remove latest",
    "runs prune --failed", "compare latest latest~1", "history", "mcp", "judge -- python train.py",
    "judge --ledger edits.jsonl", "tune -- python train.py", "tune --apply folder", "loader -- python train.py",
    "profile --trace trace.json", "profile -- python train.py", "memory --snapshot snapshot.pickle",
    "memory -- python train.py", "train-bench", "train-bench -- python train.py", "train-bench --print-config",
    "pipe-infer", "train-bench --results /tmp/results",
]  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS)
def test_a_removed_directory_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.setattr(sys, "argv", ["gpubench", *words.split()])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: the current directory does not exist any more",
        'hint: change to one that does: cd "$PWD", or cd ~',
    ]


@pytest.mark.parametrize("mebibytes", [24, 60, 110, 160, 200])
@pytest.mark.parametrize("words", ["runs show latest", "train-bench -- python train.py"])
def test_little_memory_is_one_error(tmp_path: Path, words: str, mebibytes: int) -> None:
    limited = ["bash", "-c", f'ulimit -v {mebibytes << 10}; exec "$@"', "bash", sys.executable, "-m", "gpubench"]
    done = subprocess.run(
        [*limited, *words.split()], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    said = done.stderr.splitlines()
    assert done.returncode in (1, 2)
    assert [line.split(":")[0] for line in said] == ["error", "hint"]
    if mebibytes < 50:  # in which no command fits
        assert said[0] == "error: there is not enough memory for gpubench"
    assert list(tmp_path.iterdir()) == []


def _chained(cause: Exception, error: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (MemoryError(), __main__.NO_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), __main__.NO_MEMORY),
        (ImportError("libx.so: failed to map segment from shared object"), __main__.NO_MEMORY),
        (_chained(ImportError("libx.so: failed to map segment"), ImportError("numpy is broken")), __main__.NO_MEMORY),
        (RuntimeError("can't start new thread"), __main__.NO_THREAD),
        (ImportError("libx.so: cannot open shared object file"), None),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "train.py"), None),
        (ModuleNotFoundError("No module named 'numpy'", name="numpy"), None),
        (RuntimeError("a bug"), None),
    ],
    ids=repr,
)
def test_other_errors_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, explained: tuple[str, str]
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr("gpubench.commands.main", fails)
    with pytest.raises(SystemExit if explained else type(error)) as ended:
        __main__.main()
    if explained:
        assert isinstance(ended.value, SystemExit)
        assert ended.value.code == 1
        assert capsys.readouterr().err == f"error: {explained[0]}\nhint: {explained[1]}\n"
