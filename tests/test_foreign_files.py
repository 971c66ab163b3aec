"""Files that others can have placed: whatever lies in their place, a command ends at once and harms nothing."""

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from cli import complaint
from recorded_runs import write_run
from running import Finished

from gpubench import foreign_files
from gpubench.commands import output
from gpubench.errors import RunDirectoryError, RunFailed
from gpubench.foreign_files import SEARCH, SEARCH_LOCK
from gpubench.kinds.pipeline.folders import INDEX
from gpubench.report import index
from gpubench.runs import directory
from gpubench.runs.catalogue import CACHE, is_searching
from gpubench.runs.directory import CONFIG, ENVIRONMENT, NOISE, REPORT, RUN, STEPS, SUMMARY, TELEMETRY
from gpubench.settings.loading import find_config, read_settings
from gpubench.tuning import result

CommandLine = Callable[..., Finished]
Plant = Callable[[Path, Path], object]
SECRET = b"the content of a file of somebody else"


def _socket(place: Path, _: Path) -> None:
    here = Path.cwd()
    os.chdir(place.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(place.name)
    finally:
        os.chdir(here)


PLANTED: dict[str, Plant] = {
    "pipe": lambda place, _: os.mkfifo(place),
    "socket": _socket,
    "device": lambda place, _: place.symlink_to("/dev/zero"),
    "folder": lambda place, _: place.mkdir(),
    "dangling link": lambda place, victim: place.symlink_to(victim.with_name("missing")),
    "loop": lambda place, _: place.symlink_to(place.name),
    "link": lambda place, victim: place.symlink_to(victim),
}
"""What can lie in the place of a file. The last one leads to a file of somebody else."""
OTHERS = tuple(kind for kind in PLANTED if kind != "pipe")
READ = ("compare", "results/made/{run}", "results/made/{other}")
COMMANDS: dict[str, tuple[str, ...]] = {
    **{f"results/made/{{run}}/{name}": READ for name in (RUN, SUMMARY, CONFIG, ENVIRONMENT, STEPS, TELEMETRY, NOISE)},
    f"results/made/{{run}}/{REPORT}": ("runs", "open", "results/made/{run}"),
    f"results/made/{{run}}/.{RUN}.labels": ("runs", "tag", "results/made/{run}", "tagged"),
    f"results/{CACHE}": ("runs",),
    "results/index.html": ("history",),
    "results/history.html": ("history",),
    f"results/tune-1/{SEARCH}": ("tune", "--resume", "results/tune-1"),
    "trace.json": ("profile", "--trace", "trace.json"),
    "trace.json.gz": ("memory", "--trace", "trace.json.gz"),
    "snapshot.pickle": ("memory", "--snapshot", "snapshot.pickle"),
    "log.csv": ("compare", "log.csv", "log.csv", "--column", "step", "--unit", "ms"),
    "log.jsonl": ("compare", "log.jsonl", "log.jsonl", "--column", "step", "--unit", "ms"),
    "mine.yaml": ("train-bench", "--config", "mine.yaml", "--print-config"),
    f"pipeline/{INDEX}": ("pipe-infer", "--model", "pipeline", "--print-config"),
    "prompts.txt": ("pipe-infer", "--prompts", "prompts.txt", "--print-config"),
    "gpt/config.json": ("train-bench", "--model", "gpt", "--print-config"),
}
"""The files that the command line opens, each with a command that does."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends a test that blocks. The time is no measure of anything: what is right does not wait at all."""
    monkeypatch.setattr(foreign_files, "OTHER_END_SECONDS", 0.01)
    signal.alarm(30)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with results and with each file that a command names."""
    folder = tmp_path_factory.mktemp("source")
    for _ in range(2):
        write_run(folder / "results", steps=14)
    for name in COMMANDS:
        if "{run}" not in name:
            (folder / name).parent.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("kind", ["pipe", *(pytest.param(kind, marks=pytest.mark.stress) for kind in OTHERS)])
@pytest.mark.parametrize("name", COMMANDS, ids=lambda name: name.rpartition("/")[2])
def test_a_command_ends_at_once_and_leaves_what_is_not_its_own(
    command_line: CommandLine, folder: Path, name: str, kind: str
) -> None:
    (folder / "own").mkdir()
    victim = folder / "own" / "victim"
    victim.write_bytes(SECRET)
    run, other = sorted(path.name for path in (folder / "results" / "made").iterdir())
    place = folder / name.format(run=run)
    place.unlink(missing_ok=True)
    PLANTED[kind](place, victim)
    done = command_line(*(word.format(run=run, other=other) for word in COMMANDS[name]))
    assert (victim.read_bytes(), [path.name for path in victim.parent.iterdir()]) == (SECRET, ["victim"])
    assert SECRET.decode() not in done.stdout
    assert "Traceback" not in done.stderr
    if done.code == RunFailed.exit_code:
        assert re.fullmatch(r"error: cannot write .*: .+\nhint: .+\n", done.stderr)
    elif done.code:
        assert all(complaint(done))
    if kind == "pipe" and COMMANDS[name] == READ and not name.endswith(NOISE):
        assert "cannot be read: it is not a regular file" in complaint(done)[0]


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("opening", [foreign_files.opened, foreign_files.given, foreign_files.content])
def test_only_a_regular_file_is_opened_and_at_once(
    tmp_path: Path, kind: str, opening: Callable[[Path], object]
) -> None:
    (tmp_path / "other").write_bytes(SECRET)
    PLANTED[kind](tmp_path / "file", tmp_path / "other")
    if kind == "link":  # which is followed for reading
        assert foreign_files.content(tmp_path / "file") == SECRET
        return
    with pytest.raises(OSError, match=str(tmp_path)) as refused:
        opening(tmp_path / "file")
    assert refused.value.strerror


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_file_is_neither_locked_nor_written(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(SECRET)
    PLANTED[kind](tmp_path / SEARCH_LOCK, victim)
    with pytest.raises(RunDirectoryError, match=r"cannot lock .*/\.lock: ") as refused:
        result.claim(tmp_path)
    assert refused.value.hint
    assert not is_searching(str(tmp_path))
    for opening in (foreign_files.appended, foreign_files.overwritten, foreign_files.lock):
        with pytest.raises(OSError, match=str(tmp_path)):
            opening(tmp_path / SEARCH_LOCK)
    assert victim.read_bytes() == SECRET
    assert not (tmp_path / "missing").exists()


def test_a_lock_keeps_the_content_of_its_file_and_others_out(tmp_path: Path) -> None:
    (tmp_path / SEARCH_LOCK).write_bytes(SECRET)
    with result.claim(tmp_path):
        assert is_searching(str(tmp_path))
        with pytest.raises(RunDirectoryError, match="another process searches"):
            result.claim(tmp_path)
    assert not is_searching(str(tmp_path))
    assert (tmp_path / SEARCH_LOCK).read_bytes() == SECRET


@pytest.mark.parametrize("kind", PLANTED)
def test_a_document_and_a_page_take_the_place_of_what_is_no_file(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "own" / "victim"
    victim.parent.mkdir()
    victim.write_bytes(SECRET)
    for name in (RUN, f".{SUMMARY}.tmp"):
        PLANTED[kind](tmp_path / name, victim)
    for name in (RUN, SUMMARY):
        if kind == "folder":
            with pytest.raises(OSError, match="directory"):
                directory.write_document(tmp_path / name, {})
        else:
            directory.write_document(tmp_path / name, {})
            assert (tmp_path / name).lstat().st_size == len("{}\n")
    PLANTED[kind](tmp_path / index.INDEX, victim)
    assert index.refresh(tmp_path) is None
    assert [path.name for path in victim.parent.iterdir()] == ["victim"]
    assert victim.read_bytes() == SECRET


def test_a_pipe_that_the_user_names_is_read_as_soon_as_a_program_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no program writes into it"):
        foreign_files.given(tmp_path / "pipe")
    writing = Thread(target=(tmp_path / "pipe").write_bytes, args=[SECRET * 10_000])
    monkeypatch.setattr(foreign_files, "OTHER_END_SECONDS", 30)
    writing.start()
    with foreign_files.given(tmp_path / "pipe") as pipe:
        assert pipe.read() == SECRET * 10_000
    writing.join()


def test_a_page_is_not_written_into_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunFailed, match="cannot write"):
        output.write_file(tmp_path / "pipe", "page")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    output.write_file(tmp_path / "pipe", "page")
    assert os.read(reading, 10) == b"page"
    os.close(reading)


def test_a_writer_may_take_its_time() -> None:
    reading, writing = os.pipe()
    with foreign_files.given(Path(f"/dev/fd/{reading}")) as pipe:  # a program has it open, and has written nothing yet
        os.write(writing, SECRET)
        os.close(writing)
        assert pipe.read() == SECRET
    os.close(reading)


def test_a_configuration_is_read_through_a_link_that_the_user_names(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 7\n")
    (tmp_path / "link.yaml").symlink_to("mine.yaml")
    assert read_settings(find_config(str(tmp_path / "link.yaml"))) == {"seed": 7}


SOURCES = Path(foreign_files.__file__).parent
OPENING = re.compile(
    r"(?<![\w.])(?<!def )open\(|(?<!Run)(?<!Image)(?<!RunDirectory)(?<!os)\.open\("
    r"|\.(read|write)_(text|bytes)\(|\bflock\(|\bos\.open\("
)
OWN = {
    "__main__.py": "/dev/null",
    "commands/output.py": "/dev/null",
    "devices.py": "files of the kernel and of the installed torch",
    "foreign_files.py": "the one way",
    "git.py": "new files in a new folder",
    "kinds/pipeline/schedulers.py": "files of the installed diffusers",
    "kinds/program/endings.py": "files of the kernel",
    "kinds/program/standard_input.py": "what is standard input already",
    "ranks.py": "files of the kernel",
    "report/page.py": "files of gpubench",
    "runs/catalogue.py": "a new file",
    "settings/callables.py": "the source of a module that the user names and that is imported next",
    "host/sampler.py": "files of the kernel",
    "temporary.py": "folders and locks of gpubench, each checked as it is opened",
}
"""The modules that open files in another way, and which files these are."""


def test_no_other_module_opens_a_file_that_others_can_have_placed() -> None:
    found = {
        str(path.relative_to(SOURCES))
        for path in (*SOURCES.rglob("*.py"), *(SOURCES / "commands").glob("*.py"))
        if {"probe", "worker"}.isdisjoint(path.relative_to(SOURCES).parts)  # they open files that they have made
        if OPENING.search(path.read_text())
    }
    assert found == set(OWN)
