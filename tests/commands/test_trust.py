"""Code that results name is run only if this user has run it before, or agrees; what is run is what is shown."""

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli import complaint
from recorded_runs import edit, write_run
from running import Finished

from gpubench import permission
from gpubench.errors import UsageError
from gpubench.foreign_files import SEARCH
from gpubench.permission import permit
from gpubench.registry import PROGRAM, PROGRAM_MEMORY
from gpubench.report.terminal import Terminal
from gpubench.runs.directory import CONFIG, RUN
from gpubench.settings import trust
from gpubench.settings.keys import FILLED_IN, flatten
from gpubench.settings.loading import Configuration, load
from gpubench.settings.programs import ProgramSettings
from gpubench.settings.schema import TrainSettings
from gpubench.tuning.result import Tuning
from gpubench.tuning.treatments import Treatment

CommandLine = Callable[..., Finished]
QUIET = Terminal(quiet=True, verbosity=0)
EVIL = "sh -c 'touch taken'"


@pytest.fixture(autouse=True)
def _nothing_run_before(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


def search(folder: Path, command: str = EVIL, **changes: Any) -> Path:
    """Writes a search that is over, of which nothing is left to run."""
    settings = flatten(load(ProgramSettings, None, {"program.command": command}).settings.model_dump(mode="json"))
    made = Tuning(
        status="interrupted",
        command=PROGRAM,
        argv=["gpubench", "tune", "--", "python", "harmless.py"],
        started="2026-01-01T00:00:00.000Z",
        seconds=1.0,
        settings=settings,
        precision=None,
        treatments=[],
        untried=[],
        most_peak=None,
        budget=None,
        most_runs=None,
        look=None,
    )
    folder.mkdir(parents=True)
    content = msgspec.to_builtins(msgspec.structs.replace(made, **changes)) | {"subject": "python harmless.py"}
    (folder / SEARCH).write_bytes(msgspec.json.encode(content))
    return folder


def run_of(results: Path, content: str, command: str = "train-bench", *, recorded: bool = True) -> str:
    """Writes a run with this configuration, and returns the path of its config.yaml.

    One that is not recorded has lost the file by which a run is recognised.
    """
    path = write_run(results, steps=14)
    if recorded:
        edit(path / RUN, command=command)
    else:
        (path / RUN).unlink()
    (path / CONFIG).write_text(content)
    return str(path / CONFIG)


def test_a_search_of_somebody_else_runs_nothing_and_shows_what_it_would_run(
    command_line: CommandLine, tmp_path: Path
) -> None:
    folder = search(tmp_path / "results" / "tune-1")
    said, hint = complaint(command_line("tune", "--resume", "results/tune-1"))
    assert said == f"results/tune-1/{SEARCH} names code that you have not run here before: {EVIL}, in {tmp_path}"
    assert "--trust" in hint
    shown = command_line("runs", "show", str(folder))
    assert shown.stdout.startswith(EVIL)
    assert "harmless.py" not in shown.stdout
    done = command_line("tune", "--resume", "results/tune-1", "--trust")
    assert (done.code, done.stderr.splitlines()[0]) == (0, f"runs {EVIL}, in {tmp_path}")
    assert command_line("tune", "--resume", "results/tune-1").code == 0  # it is known by now
    shutil.copytree(folder, tmp_path / "moved")
    assert command_line("tune", "--resume", "moved").code == 0
    (tmp_path / "elsewhere").mkdir()
    edit(tmp_path / "moved" / SEARCH, settings={"program.command": EVIL, "program.directory": "elsewhere"})
    assert str(tmp_path / "elsewhere") in complaint(command_line("tune", "--resume", "moved"))[0]
    search(tmp_path / "other", f"{EVIL} -x")
    assert "names code" in complaint(command_line("tune", "--resume", "other"))[0]


def test_a_search_cannot_bring_another_command_as_something_to_try(command_line: CommandLine, tmp_path: Path) -> None:
    for number, key in enumerate(["program.command", "program.directory", "program.ref", "results", "experiment"]):
        tried = Treatment(name="data.workers", levels=[{key: "taken"}], numbers="same")
        search(tmp_path / f"tune-{number}", treatments=[tried])
        said, _ = complaint(command_line("tune", "--resume", f"tune-{number}", "--trust"))
        assert said == f"tune-{number}/{SEARCH} changes {key}, which no search tries"


PROGRAMS = f"program:\n  command: {EVIL}\n"
MODEL = "model:\n  name: os:system\n  arguments:\n    command: touch taken\n"
DATA = "data:\n  source: taken:taken\n"


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("command", "writer", "content", "named"),
    [
        ("train-bench", PROGRAM, PROGRAMS, EVIL),
        ("profile", PROGRAM, PROGRAMS, EVIL),
        ("memory", PROGRAM_MEMORY, PROGRAMS, EVIL),
        ("tune", PROGRAM, PROGRAMS, EVIL),
        ("train-bench", "train-bench", MODEL, "os:system, model.arguments.command=touch taken"),
        ("tune", "train-bench", MODEL, "os:system"),
        ("profile", "train-bench", DATA, "taken:taken"),
        ("memory", "memory", DATA, "taken:taken"),
    ],
)
def test_the_configuration_of_a_received_run_runs_nothing(
    command_line: CommandLine,
    tmp_path: Path,
    command: str,
    writer: str,
    content: str,
    named: str,
    recorded: bool,
) -> None:
    config = run_of(tmp_path / "received", content, writer, recorded=recorded)
    options = ("--device", "cpu") if content != PROGRAMS else ()
    (tmp_path / "taken.py").write_text("def taken():\n    pass\n\nopen('taken', 'x')\n")
    said, hint = complaint(command_line(command, "--config", config, *options))
    assert said.startswith(f"{config} names code that you have not run here before: {named}")
    assert said.endswith(f", in {tmp_path}")
    assert "--trust" in hint
    assert not (tmp_path / "taken").exists()
    assert not list((tmp_path / "results").glob("*/2*"))


def test_a_command_that_names_no_model_says_once_which_built_in_one_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(quiet=False, verbosity=0)
    named = load(TrainSettings, None, {"model.name": "resnet50"})
    unnamed = named.with_overrides({"model.name": "resnet-tiny"}, f"{FILLED_IN}made")
    permit([named], terminal)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        permit([unnamed], terminal)
    said = capsys.readouterr().err.splitlines()
    assert said == ["runs resnet-tiny, a built-in model, as none is named; a program of your own goes after --"]


def of_file(file: str, **more: Any) -> "Configuration[Any]":
    return load(ProgramSettings, file, more)


def test_what_the_user_gives_is_the_users_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(PROGRAMS)
    with pytest.raises(UsageError, match="names code"):  # whether a user wrote a file cannot be seen in it
        permit([of_file(str(mine))], QUIET)
    permit([load(ProgramSettings, None, {"program.command": EVIL})], QUIET)
    config = run_of(tmp_path, PROGRAMS, PROGRAM)
    for file in (str(mine), config):
        permit([of_file(file)], QUIET)  # it is the command that the user has given
    own = {"program.command": "true"}
    permit([of_file(config, **own)], QUIET)
    elsewhere = run_of(tmp_path, f"{PROGRAMS}  directory: {tmp_path}/received\n", PROGRAM)
    with pytest.raises(UsageError, match=r"names code .*: true, in .*/received"):
        permit([of_file(elsewhere, **own)], QUIET)
    permit([load(TrainSettings, run_of(tmp_path, "model:\n  name: resnet18\n"))], QUIET)


def test_code_that_is_known_is_not_asked_about_again_for_a_commit_or_a_patch_that_the_user_chooses(
    tmp_path: Path,
) -> None:
    file, sent = tmp_path / "mine.yaml", tmp_path / "sent.yaml"
    file.write_text(PROGRAMS)
    (tmp_path / "best.patch").write_text("# a patch\n")
    versions = {"program.ref": "HEAD~1"}, {"program.patch": str(tmp_path / "best.patch")}
    for chosen in versions:
        with pytest.raises(UsageError, match="names code"):
            permit([of_file(str(file), **chosen)], QUIET)
    permit([load(ProgramSettings, None, {"program.command": EVIL})], QUIET)
    for chosen in versions:
        ((key, value),) = chosen.items()
        sent.write_text(f"{PROGRAMS}  {key.removeprefix('program.')}: {value}\n")
        with pytest.raises(UsageError, match="names code"):
            permit([of_file(str(sent))], QUIET)
        permit([of_file(str(file), **chosen)], QUIET)


@pytest.mark.parametrize(
    ("answer", "agreed"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_on_a_terminal_there_is_a_question(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    agreed: bool,
) -> None:
    config = run_of(tmp_path, PROGRAMS.replace("taken", r"\x1b[2Jtaken"), PROGRAM)
    monkeypatch.setattr(permission, "_AGREED", set())
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run = of_file(config)
    code = trust.code_in(run.settings)
    assert code
    if agreed:
        permit([run], QUIET)
    else:
        with pytest.raises(UsageError, match="names code"):
            permit([run], QUIET)
    assert trust.has_run(code) == agreed
    asked = capsys.readouterr().err
    if agreed:
        monkeypatch.setenv("XDG_STATE_HOME", "/proc/no/such")
        permit([run], QUIET)  # nothing is noted, and nothing is asked twice
    assert f"  {code.said}\n" in asked
    assert "\x1b" not in asked


def test_the_list_of_what_was_run_is_believed_only_if_it_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = trust.Code({"program.command": "true"}, tmp_path)
    folder = tmp_path / "state" / "gpubench"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder.parent))
    assert not trust.has_run(code)
    trust.remember([code, code])
    trust.remember([code])
    assert (folder / trust.FILE).read_text() == f"{code.digest}\n"
    assert trust.has_run(code)
    assert not trust.has_run(trust.Code({"program.command": "true"}, tmp_path / "other"))
    for path in (folder, folder / trust.FILE):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        assert not trust.has_run(code)
        path.chmod(mode)
    (folder / trust.FILE).rename(tmp_path / "planted")
    (folder / trust.FILE).symlink_to(tmp_path / "planted")
    assert not trust.has_run(code)
    trust.remember([trust.Code({"program.command": "other"}, tmp_path)])
    assert (tmp_path / "planted").read_text() == f"{code.digest}\n"


def test_without_a_home_all_results_are_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(*_: Any) -> Path:
        raise RuntimeError("Could not determine home directory.")

    code = trust.Code({"program.command": "true"}, tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setattr(Path, "home", homeless)
    trust.remember([code])
    assert not trust.has_run(code)
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no/such")
    trust.remember([code])
    assert not trust.has_run(code)
