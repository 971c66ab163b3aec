"""A quiet terminal, an environment that configures nothing, and one finished run for all who want to look at one."""

import fcntl
import gc
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import forked
import hypothesis
import pytest
from running import Finished, gpubench, simulated

gc.disable()  # until all is collected: imports leave little garbage, and the search for it takes a tenth of their time

forked.configure_nothing()  # before the application is imported

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job, whose children would not hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A simulated GPU's memory is this machine's: a garbage size must end one process with an error, not fill the machine.
LIMIT = 8 * 2**30  # bytes of data of one process; what device memory counts is in tests/fake_cuda/README.md
LIBRARIES = os.environ.get("LD_LIBRARY_PATH", "").split(":")
SIMULATED = any(Path(folder, "fake_cuda_arithmetic.so").exists() for folder in LIBRARIES)
if SIMULATED:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, resource.getrlimit(resource.RLIMIT_DATA)[1]))


# How long an example takes tells of the machine only. `make stress` tries ten times as many of each property.
hypothesis.settings.register_profile("gpubench", deadline=None, max_examples=50)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=500)
hypothesis.settings.load_profile("gpubench")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the fork servers, once for all processes of pytest, unless there are some. With a GPU all processes are
    real.

    What the tests run is not noted in the state of the user.
    """
    if not hasattr(config, "workerinput"):
        state = tempfile.TemporaryDirectory(prefix="gpubench-state-", ignore_cleanup_errors=True)
        os.environ["XDG_STATE_HOME"] = state.name
        config.add_cleanup(state.cleanup)
    real = SIMULATED or Path("/dev/nvidiactl").exists()
    if real:
        os.environ.pop(forked.FOLDER, None)
    elif not hasattr(config, "workerinput"):
        running = ExitStack()
        if forked.FOLDER not in os.environ:
            running.enter_context(forked.servers())
        forked.fork_tests()
        config.add_cleanup(running.close)


LONGEST = (
    "test_steady", "test_bad_luck", "test_pipe_bad_luck", "test_launch", "test_program", "test_edits", "test_tune",
    "test_train_bench", "test_memory", "test_pipeline_identity", "test_tracker", "test_schedulers",
    "test_tracker_sharding", "test_pipe_infer", "test_simulations", "test_directory", "test_machines",
    "test_tune_search", "test_denoisers", "test_loader", "test_probe_process", "test_packaging", "test_profile",
    "test_stress", "test_feed", "test_page", "test_memory_check", "test_train_worker",
)  # fmt: skip
"""A file stays with one process, since its tests share runs; these come first, or one would be left with them alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ with what the program shows")
    parser.addoption("--without-longest", action="store_true", help="leave out the files with the longest runs")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of that name in tests/golden/, or writes it there with --update-golden."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), "pytest --update-golden accepts what has changed"

    return compare


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Has one process of pytest-xdist after another collect a file: the first compiles it, and the others read that."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--without-longest"):
        items[:] = [item for item in items if item.path.stem not in LONGEST]
    for item in items:
        told = {mark.name for mark in item.iter_markers()} & {"simulated", "device"}
        if item.get_closest_marker("gpu") and len(told) != 1:
            raise pytest.UsageError(f"{item.nodeid}: a test for a GPU is marked as `simulated` or as `device`")
        if "device" in told and simulated():
            item.add_marker(pytest.mark.skip(reason="only a real device can judge it"))
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # the workers of xdist are as many as the cores
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))
    gc.enable()
    gc.freeze()  # what is imported is no garbage, and need not be searched again


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts all servers before the first test that judges how fast something is, which their imports would disturb."""
    alone = bool(session.items) and all(item.get_closest_marker("alone") for item in session.items)
    if alone and forked.FOLDER in os.environ and not session.config.option.collectonly:
        forked.prepare_all()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Has the runs of a test that judges how fast something is measure this machine as precisely as for a user."""
    if item.get_closest_marker("alone"):
        os.environ[forked.PRECISE] = "1"
    else:
        os.environ.pop(forked.PRECISE, None)


@pytest.fixture
def command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Finished]:
    """Calls the command line in this process and in `tmp_path`: for what ends before a run begins."""
    from gpubench.commands import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["gpubench", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        return Finished(int(exited.value.code or 0), *capsys.readouterr(), tmp_path / "results")

    return call


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a real, short run on the CPU. Not to be written to."""
    arguments = ("--config", "tiny", "--device", "cpu", "--steps", "4", "--training.warmup_steps=1", "--repeats", "1")
    folder = tmp_path_factory.mktemp("finished")
    labels = ("--name", "tiny-run", "--tag", "b", "--tag", "a")
    done = gpubench("train-bench", *arguments, "--experiment", "short", *labels, results=folder)
    assert done.code == 0, done.stderr
    return done.run
