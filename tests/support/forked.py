"""Starts Python programs by forking a server that has imported what they need.

Most runs in these tests last a tenth of a second, and the imports of a worker take five: torch, transformers and
diffusers. A server imports them when it is first asked, and forks itself for each program. `Forked` stands in for
subprocess.Popen. The program has its own environment, working directory, open files, session, signals and exit code.
The processes of pytest-xdist are forked from it too.

It differs from a process of its own in what is decided as a process starts: the variables that libraries read as they
are loaded, the hash seed, limits, and /proc/PID/cmdline. A test for which one of these matters to the
host starts `forked.py -m gpubench`: a real host, whose workers are forked. Where it matters to workers, all are real.
What such a program spawns with multiprocessing is forked too. It ends without freeing what the server had imported, and
measures the reference workload only briefly, which would otherwise be most of what a short run computes. A test that
judges how fast something is sets `PRECISE`.
"""

import atexit
import gc
import importlib
import importlib.util
import json
import multiprocessing.popen_spawn_posix
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import IO, Any, NoReturn, Self

FOLDER = "FORK_SERVERS"
"""The variable with the folder of the servers' sockets. Without it all processes are real."""
PROGRAMS = "FORK_PROGRAMS"
"""The variable of a host that is to fork the programs of users, which then only seem to import torch."""
PRECISE = "PRECISE_REFERENCE"
"""The variable of a program that is to measure the reference workload as long as it does for a user."""
SECONDS_EACH = 0.1
"""The time of the steps of a repeat in place of the user's twelve seconds."""
HOST = (
    "gpubench.commands", "gpubench.host.schedule", "gpubench.kinds.pipeline.recorder", "gpubench.kinds.memory.recorder",
    "gpubench.kinds.program.processes", "gpubench.memory.analysis", "gpubench.kinds.memory.defaults",
    "gpubench.kinds.pipeline.defaults", "gpubench.compare.inputs", "gpubench.trials", "gpubench.report.after_run",
    "gpubench.report.markdown", "gpubench.report.page", "gpubench.report.sweep", "gpubench.report.terminal",
    "pydantic_settings", "asyncio", "pynvml", "rich.live", "typer._adapters", "typer._click.decorators",
    "rich._emoji_codes", "tensorboard.summary", "tensorboard.compat", "tensorboard.plugins.hparams.summary_v2",
    "numpy.ma", "numpy.fft", "numpy.random",
)  # fmt: skip
WORKER = (
    "gpubench.kinds.training.worker.rank", "gpubench.kinds.memory.worker.rank", "gpubench.kinds.pipeline.worker.rank",
    "torch.distributed.fsdp", "torch.distributed.run", "torch.distributed.checkpoint", "gpubench.commands",
    "gpubench.host.launch",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "pydantic_settings",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion", "transformers.models.gpt2.modeling_gpt2",
    "hypothesis", "scipy.signal", "torch._inductor.compile_fx",
)  # fmt: skip
PROGRAM = ("torch.optim", "torch.utils.data", "torch.profiler", "torch._dynamo", "torch._inductor.compile_fx")
IMPORTS = {"gpubench": HOST, "worker": WORKER, "program": PROGRAM}
"""What each server imports: that of the command line has no torch, and that of workers has what tests import too."""
MOST = 1 << 18  # bytes of a request
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def configure_nothing() -> None:
    """Gives this process, and those that it starts, a quiet terminal and an environment that configures nothing.

    GITHUB_ACTIONS and FORCE_COLOR would put ANSI codes into the help.
    """
    os.environ.update(_TYPER_FORCE_DISABLE_TERMINAL="1", NO_COLOR="1", COLUMNS="200")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # the threads of several processes share few cores, and need not spin
    for name in list(os.environ):
        if name.startswith("GPUBENCH_") or name in TORCHRUN | {"FORCE_COLOR", "GITHUB_ACTIONS"}:
            del os.environ[name]


class Forked:
    """What the host and the tests use of subprocess.Popen."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        server: str | None = None,
        as_it_is: bool = False,
    ) -> None:
        """`args` are [sys.executable, script or "-m" or "-c", ...]. Output goes to this process's own where None.

        `server` is one of IMPORTS; the server of the command line or of workers if it is None. A program that runs
        `as_it_is` starts real processes, and measures the reference workload as long as it does for a user.
        """
        assert args[0] == sys.executable
        self.args = args
        self.returncode: int | None = None
        program = [argument for argument in args[1:2] if argument != "-u"] + list(args[2:])
        host = program[:2] == ["-m", "gpubench"] and "RANK" not in env  # under torchrun the command becomes a worker
        given = {number: number for number in pass_fds}
        nothing = os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else None
        for number, file in ((0, stdin if nothing is None else nothing), (1, stdout), (2, stderr)):
            given[number] = number if file is None else file if isinstance(file, int) else file.fileno()
        request = {
            "program": program,
            "environment": {**env, "PYTHONUNBUFFERED": "1"} if args[1] == "-u" else dict(env),
            "folder": str(Path.cwd() / (cwd or "")),
            "descriptors": list(given),
            "session": start_new_session,
            "as it is": as_it_is,
        }
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket_of_server = Path(os.environ[FOLDER], server or ("gpubench" if host else "worker"))
        self._log = socket_of_server.with_suffix(".log")
        self._server.connect(str(socket_of_server))
        socket.send_fds(self._server, [json.dumps(request).encode()], list(given.values()))
        if nothing is not None:
            os.close(nothing)
        self.pid = self._answer()

    def _answer(self) -> int:
        data = self._server.recv(MOST)
        if not data:
            raise RuntimeError(f"the fork server ended: {self._log.read_text()}")
        return int(data)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                self.returncode = self._answer()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()


def start(command: Sequence[str], **options: Any) -> "Forked | subprocess.Popen[Any]":
    """Starts `command` by a fork server, or as a real process where there is none. The options are those of Forked."""
    return Forked(command, **options) if FOLDER in os.environ else subprocess.Popen(command, **options)


def run(command: Sequence[str], timeout: float, **options: Any) -> "subprocess.CompletedProcess[str]":
    """The same as subprocess.run with capture_output and text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with start(command, stdout=out, stderr=err, **options) as process:
            try:
                code = process.wait(timeout)
            except BaseException:
                process.kill()
                raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


SPAWNED: dict[int, Forked] = {}
"""What multiprocessing has started here, by process id."""


def fork_spawned(replace: Callable[[Any, str, object], None] = setattr) -> None:
    """Has the processes that multiprocessing spawns in this one forked by the server that has torch."""
    real = multiprocessing.util.spawnv_passfds

    def spawn(path: Any, args: Any, descriptors: Any) -> int:
        if "--multiprocessing-fork" not in args:  # a helper of multiprocessing itself
            return real(path, args, descriptors)
        process = Forked([sys.executable, *args[-3:]], env=os.environ, pass_fds=descriptors)
        SPAWNED[process.pid] = process
        return process.pid

    def poll(popen: Any, flag: int = os.WNOHANG) -> int | None:
        return SPAWNED[popen.pid].poll() if flag else SPAWNED[popen.pid].wait()

    replace(multiprocessing.util, "spawnv_passfds", spawn)
    replace(multiprocessing.popen_spawn_posix.Popen, "poll", poll)


@contextmanager
def servers() -> Iterator[None]:
    """Has the servers listen, and ends them. They take no time before they are first asked."""
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        running = []
        for name in IMPORTS:
            with (
                Path(folder, f"{name}.log").open("w") as log,
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
            ):
                listening.bind(str(Path(folder, name)))
                listening.listen(64)
                number = listening.fileno()
                # These libraries read their number of threads as they load; a worker sets that of torch by itself.
                clean = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                clean["OMP_WAIT_POLICY"] = "PASSIVE"  # threads of several ranks share two cores, and need not spin
                clean |= {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
                command = [sys.executable, __file__, "serve", name, str(number)]
                running.append(
                    subprocess.Popen(
                        command, env=clean, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[number]
                    )
                )
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]
            for server in running:
                server.communicate()  # it ends with its standard input


def during(command: Sequence[str]) -> int:
    """Runs `command`, all of whose processes of pytest share the servers, and returns its exit code."""
    configure_nothing()
    with servers():
        return subprocess.run(command, close_fds=False).returncode  # make gives its own processes open files


def prepare_all() -> None:
    """Has all servers import what they need, side by side."""
    with ThreadPoolExecutor(len(IMPORTS)) as pool:
        command = [sys.executable, "-c", ""]
        for started in pool.map(lambda name: Forked(command, env=os.environ, server=name, as_it_is=True), IMPORTS):
            started.wait()


def serve(name: str, listening: socket.socket) -> dict[str, Any]:
    """Forks this process for each request until standard input ends. Returns only in the children: their request."""
    ready = selectors.DefaultSelector()
    ready.register(listening, selectors.EVENT_READ)
    ready.register(0, selectors.EVENT_READ)
    if all(key.fd == 0 for key, _ in ready.select()):  # nobody ever asked
        os._exit(0)
    prepare(name)
    clients: dict[int, tuple[int, socket.socket]] = {}  # by the pidfd of the child
    while True:
        for key, _ in ready.select():
            if key.fd == 0:
                os._exit(0)
            if key.fd in clients:
                ready.unregister(key.fd)
                pid, client = clients.pop(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError), client:  # who asked may be gone
                    client.send(str(code).encode())
                continue
            client, _ = listening.accept()
            data, given, _, _ = socket.recv_fds(client, MOST, 16)
            request: dict[str, Any] = json.loads(data)
            if (pid := os.fork()) == 0:
                ready.close()
                for ours in (listening, client, *(other for _, other in clients.values())):
                    ours.detach()  # place() closes them
                place(dict(zip(request["descriptors"], given, strict=True)))
                return request
            for number in given:
                os.close(number)
            with suppress(OSError):
                client.send(str(pid).encode())
            there = os.pidfd_open(pid)
            clients[there] = pid, client
            ready.register(there, selectors.EVENT_READ)


def prepare(name: str) -> None:
    """Imports what the programs need, and leaves as little as possible that each of them would have to do or copy."""
    gc.disable()  # imports leave little garbage, and the search for it takes a tenth of their time
    for module in IMPORTS[name]:
        importlib.import_module(module)
    if name == "gpubench":  # has the template compiled, which takes as long as all else that a short run does
        importlib.import_module("gpubench.report.page").__dict__["_environment"]().get_template("page.html")
    if name == "program":
        sys.meta_path.insert(0, Hidden())
    for known in weakref.finalize.__dict__["_registry"]:
        known.atexit = False  # a child need not take apart what was set up here
    gc.enable()
    gc.collect()
    gc.freeze()  # or the first collection in each child would copy all their memory


class Hidden(MetaPathFinder, Loader):
    """Hides torch, which is imported, until a program imports it."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
        self._modules = {name: sys.modules.pop(name) for name in names}

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, is_package=True) if name == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        sys.modules.update(self._modules)
        return self._modules["torch"]

    def exec_module(self, module: ModuleType) -> None:
        module.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def place(given: Mapping[int, int]) -> None:
    """Makes `given` (number: the descriptor that belongs there) and no others the open files of this process."""
    above = max([*given, *given.values(), 2]) + 1
    parked = {number: os.dup2(there, above + place) for place, (number, there) in enumerate(given.items())}
    for number, there in parked.items():
        os.dup2(there, number)
    last = 2
    for number in [*sorted(given.keys() - {0, 1, 2}), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(last + 1, number)
        last = number


def become(request: Mapping[str, Any]) -> None:
    """Runs the program of `request` as if this process had been started for it."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own is seeded anew after a fork
    known = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    program = request["program"]
    module = program[0] == "-m"
    script = program[0] not in ("-m", "-c")
    sys.path[0:1] = [str(Path.cwd().joinpath(program[0]).parent) if script else request["folder"], *known]
    sys.argv = program[1:] if module else program if program[0] != "-c" else ["-c", *program[2:]]
    importlib.invalidate_caches()
    for customize in (Path(entry, "sitecustomize.py") for entry in known):
        if customize.exists():
            runpy.run_path(str(customize))
            break
    if not request["as it is"]:
        fork_children(program[:2])
        if WORKER[0] in sys.modules and PRECISE not in os.environ:
            measure_reference_workload_briefly()
    execute(program)


def fork_children(program: Sequence[str]) -> None:
    """Has the processes that `program` starts forked."""
    if FOLDER in os.environ:
        fork_spawned()
    if program == ["-m", "gpubench"]:
        fork_workers()
        if PROGRAMS in os.environ:
            fork_programs()
    elif program == ["-m", "torch.distributed.run"]:
        package = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        importlib.import_module(package).__dict__["Popen"] = Forked


def measure_reference_workload_briefly(replace: Callable[[Any, str, object], None] = setattr) -> None:
    """Has the reference workload of this process copy little, and measured for a twentieth of the usual time."""
    rates = importlib.import_module("gpubench.worker.compute_rates")
    assert rates.COPIED
    replace(rates, "COPIED", 1000)
    replace(rates.time_reference_workload, "__defaults__", (0.005,))


def execute(program: Sequence[str]) -> None:
    """Runs a module, code or a script: ["-m", name, ...], ["-c", code, ...] or [path, ...]."""
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # of what is imported already
    if program[0] == "-m":
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program[0] == "-c":
        exec(program[1], {"__name__": "__main__"})
    else:
        runpy.run_path(str(Path.cwd() / program[0]), run_name="__main__")


def carry_out(request: Mapping[str, Any]) -> NoReturn:
    """Becomes the program of `request`, and ends with its exit code without freeing what the server has imported."""
    code = 0
    try:
        become(request)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading.__dict__["_shutdown"]()  # waits for the threads, as the interpreter does before its exit handlers
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a reader that left
            stream.flush()
    os._exit(code & 0xFF)


def fork_workers() -> None:
    """Has the host in this process fork its workers where there is a server.

    It then measures for less time where no number of steps is given.
    """
    if FOLDER not in os.environ:
        return
    importlib.import_module("gpubench.host.schedule").__dict__["MOST_EACH"] = SECONDS_EACH
    launch = importlib.import_module("gpubench.host.launch")
    launch.__dict__["subprocess"] = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)


def fork_programs() -> None:
    """Has the host in this process fork the programs of users, each of which is `python SCRIPT ...`."""

    def start(words: Sequence[str], **options: Any) -> Forked:
        assert words[0] in ("python", sys.executable)
        return Forked([sys.executable, *words[1:]], server="program", **options)

    importlib.import_module("gpubench.kinds.program.processes").__dict__["subprocess"] = SimpleNamespace(
        Popen=start, DEVNULL=subprocess.DEVNULL
    )


def fork_tests() -> None:
    """Has the processes of pytest-xdist forked by the server that has torch, which most of the tests import."""
    io = importlib.import_module("execnet.gateway_io")

    def start(gateway: Any, args: Sequence[str], execmodel: Any) -> None:
        (read, ours), (answers, write) = os.pipe(), os.pipe()
        code = f"import os; os.dup2({read}, 0); os.close({read}); {args[-1]}"  # a forked program has no standard input
        program = [sys.executable, "-c", code]
        gateway.popen = Forked(program, env=os.environ, stdout=write, pass_fds=[read], as_it_is=True)
        os.close(read)
        os.close(write)
        io.Popen2IO.__init__(gateway, os.fdopen(ours, "wb"), os.fdopen(answers, "rb"), execmodel)

    io.Popen2IOMaster.__init__ = start


def host() -> None:
    """Runs `-m gpubench ...` in this process, with forked workers where there is a server."""
    fork_workers()
    sys.argv[:3] = ["gpubench"]
    runpy.run_module("gpubench", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        carry_out(serve(sys.argv[2], socket.socket(fileno=int(sys.argv[3]))))
    elif sys.argv[1] == "during":
        sys.exit(during(sys.argv[2:]))
    else:
        host()
