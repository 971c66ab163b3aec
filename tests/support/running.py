"""Runs the command as a user does."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import forked
import psutil
import pytest

from gpubench.compare.verdicts import TOO_FAR_APART

TINY = ("--model", "gpt2-tiny", "--performance.cpu_threads=1", "--logging.graph=false")
SMALL = ("--model", "small_model:build", "--performance.cpu_threads=1", "--logging.graph=false")
"""Of our own, without transformers: half as long to start."""
HOST = (sys.executable, forked.__file__)
"""Before `-m gpubench`: a real host, whose workers are forked."""
PATIENCE = 600.0  # of tests that run beside others on a small machine; what should end sooner says so itself


def simulated() -> bool:
    """Whether the GPU here is the simulated one of tests/fake_cuda."""
    import torch

    return torch.cuda.is_available() and "simulated" in torch.cuda.get_device_name()


@dataclass(frozen=True)
class Finished:
    code: int
    stdout: str
    stderr: str
    results: Path

    @property
    def runs(self) -> list[Path]:
        """Run directories, oldest first."""
        return sorted(path.parent for path in self.results.glob("*/*/run.json"))

    @property
    def run(self) -> Path:
        (only,) = self.runs
        return only

    def document(self, name: str) -> Any:
        return json.loads((self.run / name).read_text())

    def lines(self, name: str) -> list[Any]:
        return [json.loads(line) for line in (self.run / name).read_text().splitlines()]


def metrics(run: Finished) -> dict[str, Any]:
    """Those of its summary, by name."""
    return {metric["name"]: metric for metric in run.document("summary.json")["metrics"]}


def gpubench(
    command: str,
    *arguments: str,
    results: Path,
    cwd: Path | None = None,
    launcher: Sequence[str] = (sys.executable,),
) -> Finished:
    """Runs `gpubench COMMAND --results RESULTS ARGUMENTS` to its end.

    The processes of Python are forked unless a launcher starts them.
    """
    command_line = [*launcher, "-m", "gpubench", command, "--results", str(results), *arguments]
    if launcher[0] != sys.executable or launcher == HOST:
        done = subprocess.run(
            command_line, capture_output=True, text=True, timeout=PATIENCE, cwd=cwd, env=environment()
        )
    else:
        done = forked.run(command_line, PATIENCE, cwd=cwd, env=environment())
    return Finished(done.returncode, done.stdout, done.stderr, results)


def ended(commands: Iterable[Sequence[str]], patience: float = PATIENCE) -> list[int]:
    """The exit codes of Python programs that run side by side, as ranks do."""
    processes = [forked.start(command, env=environment()) for command in commands]
    try:
        return [process.wait(patience) for process in processes]
    finally:
        for process in processes:
            process.kill()


@dataclass(frozen=True)
class Started:
    """A run that goes on."""

    process: "forked.Forked | subprocess.Popen[Any]"
    output: IO[str]
    errors: IO[str]
    results: Path
    folder: Path

    @property
    def workers(self) -> list[psutil.Process]:
        """By their working directory, which is the host's: a forked worker is no child of it."""
        return [
            one
            for one in psutil.process_iter(["cwd"])
            if one.info["cwd"] == str(self.folder) and one.pid != self.process.pid
        ]

    def wait_for(self, pattern: str) -> None:
        """Until a file under its results has such a name."""
        deadline = time.monotonic() + PATIENCE
        while not list(self.results.glob(pattern)):
            assert self.process.poll() is None, self.finish(0)
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def finish(self, timeout: float) -> Finished:
        code = self.process.wait(timeout)
        for file in (self.output, self.errors):
            file.seek(0)
        return Finished(code, self.output.read(), self.errors.read(), self.results)


@contextmanager
def started(*arguments: str, results: Path, cwd: Path | None = None) -> Iterator[Started]:
    """`gpubench ARGUMENTS --results RESULTS` in `cwd` or else RESULTS, killed at the end if it still runs."""
    folder = cwd or results
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gpubench", *arguments[:1], "--results", str(results), *arguments[1:]]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = forked.start(command, stdout=output, stderr=errors, cwd=folder, env=environment())
        with process:
            try:
                yield Started(process, output, errors, results, folder)
            finally:
                process.kill()


def wait_for_steps(results: Path, count: int = 1) -> Path:
    """The run directory under `results`, once its steps.jsonl has `count` lines."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for steps in results.glob("*/*/steps.jsonl"):
            if steps.read_bytes().count(b"\n") >= count:
                return steps.parent
        time.sleep(0.05)
    raise TimeoutError(f"no {count} steps under {results}")


def processes_of(words: Sequence[str]) -> list[psutil.Process]:
    """Returns the processes with this command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == [*words]:
                found.append(process)
    return found


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in `folder`, `size` large; skips the test where mounting is not permitted."""
    place = folder / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def decided(verdict: str, reason: str | None, measured: object) -> None:
    """Skips the rest of a test whose runs were too noisy to tell: on a machine that others use, that is the right
    verdict and no failure. Every other verdict is the test's to judge, and so is one that has another reason."""
    if verdict == "inconclusive" and reason in (None, TOO_FAR_APART):
        pytest.skip(f"other work on this machine left it undecided: {measured}")


def environment() -> dict[str, str]:
    """This one without what would colour, widen or configure the output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GPUBENCH_", "PYTEST_"))}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), clean.get("PYTHONPATH")]))
    return clean | {"NO_COLOR": "1", "COLUMNS": "200", "_TYPER_FORCE_DISABLE_TERMINAL": "1"}
