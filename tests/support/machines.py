"""Two machines on one: network namespaces joined by a cable, each with its own address, loopback and host name."""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from running import PATIENCE, Finished, environment

PORT = 29400
INTERFACE = "eth0"


@dataclass(frozen=True)
class Machine:
    name: str
    """Of its host and of its namespace, so that parallel tests do not meet."""
    address: str
    hosts: Path
    """What it has for /etc/hosts."""

    def command(self, *command: str) -> list[str]:
        """`command`, to be run there."""
        named = 'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        entered = ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", "sh", "-c", named]
        return [*entered, self.name, str(self.hosts), *command]

    @property
    def pids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def pull_the_plug(self) -> None:
        """From here on nothing arrives and nothing leaves, and nobody is told."""
        ip("-n", self.name, "link", "set", INTERFACE, "down")

    @property
    def ranks(self) -> list[int]:
        """Pids of gpubench's own processes: torchrun is not one of them."""
        return [pid for pid in self.pids if b"torch.distributed.run" not in (line := _proc(pid, "cmdline")) and line]

    @property
    def port(self) -> int | None:
        """The TCP port of a run's host, or None until it listens."""
        for pid in self.pids:
            if found := re.search(rb"_GPUBENCH_HOST=tcp:[^#]*:(\d+)#", _proc(pid, "environ")):
                return int(found[1])
        return None


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def why_not() -> str | None:
    """What keeps machines from being made here; None where nothing does."""
    try:
        with machines() as pair:
            subprocess.run(pair[0].command("true"), capture_output=True, text=True, check=True)
            return None
    except OSError as error:
        return f"no iproute2: {error}"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def machines() -> Iterator[tuple[Machine, Machine]]:
    """A pair of them. Whatever still runs there at the end is killed."""
    token = secrets.token_hex(3)
    with ExitStack() as stack:
        hosts = Path(stack.enter_context(TemporaryDirectory())) / "hosts"
        pair = Machine(f"alpha-{token}", "10.77.0.1", hosts), Machine(f"beta-{token}", "10.77.0.2", hosts)
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{one.address} {one.name}\n" for one in pair))
        for machine in pair:
            ip("netns", "add", machine.name)
            stack.callback(_remove, machine)
        cable = ["type", "veth", "peer", "name", INTERFACE, "netns", pair[1].name]
        ip("link", "add", INTERFACE, "netns", pair[0].name, *cable)
        for machine in pair:
            ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", INTERFACE)
            ip("-n", machine.name, "link", "set", "lo", "up")
            ip("-n", machine.name, "link", "set", INTERFACE, "up")
        yield pair


def _remove(machine: Machine) -> None:
    wait_until(lambda: not _kill(machine.pids), 30)
    ip("netns", "delete", machine.name)


def _kill(pids: list[int]) -> list[int]:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _proc(pid: int, name: str) -> bytes:
    """Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@dataclass(frozen=True)
class Side:
    """The command of one machine, and where it was told to put results."""

    machine: Machine
    process: "subprocess.Popen[str]"
    results: Path

    def finish(self, seconds: float = PATIENCE) -> Finished:
        out, err = self.process.communicate(timeout=seconds)
        return Finished(self.process.returncode, out, err, self.results)

    def interrupt(self) -> None:
        """Presses Ctrl-C on gpubench, which the entered namespaces have replaced."""
        self.process.send_signal(signal.SIGINT)


def launcher(pair: Sequence[Machine], ranks: int) -> list[str]:
    """Returns torchrun for RANKS ranks on each of the machines."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(pair)), "--nproc-per-node", str(ranks)]
    return [*launch, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{pair[0].name}:{PORT}"]


def torchrun(
    pair: Sequence[Machine], *arguments: str, results: Path, ranks: int = 1
) -> AbstractContextManager[list[Side]]:
    """`gpubench ARGUMENTS` by torchrun on every machine, with results in a folder of its own on each."""
    command = [*launcher(pair, ranks), "-m", "gpubench", *arguments]
    return sides(pair, lambda own: [*command, "--results", str(own)], results)


def ranks(pair: Sequence[Machine], *arguments: str, results: Path) -> AbstractContextManager[list[Side]]:
    """The same with one rank on each machine and without torchrun, which takes seconds to start."""

    def command(own: Path) -> list[str]:
        rank = [f"RANK={own.name}", "LOCAL_RANK=0", f"WORLD_SIZE={len(pair)}", "LOCAL_WORLD_SIZE=1"]
        store = [f"MASTER_ADDR={pair[0].name}", f"MASTER_PORT={PORT}"]
        return ["env", *rank, *store, sys.executable, "-m", "gpubench", *arguments, "--results", str(own)]

    return sides(pair, command, results)


def program(
    pair: Sequence[Machine], *arguments: str, options: Sequence[str], results: Path, ranks: int = 1
) -> AbstractContextManager[list[Side]]:
    """`gpubench train-bench OPTIONS -- torchrun distributed_program.py ARGUMENTS` on every machine."""
    words = ["--", *launcher(pair, ranks), str(Path(__file__).with_name("distributed_program.py")), *arguments]
    command = [sys.executable, "-m", "gpubench", "train-bench", *options, "--results"]
    return sides(pair, lambda own: [*command, str(own), *words], results)


@contextmanager
def sides(pair: Sequence[Machine], command: Callable[[Path], Sequence[str]], results: Path) -> Iterator[list[Side]]:
    """The command on every machine, which gets the folder for its results."""
    with ExitStack() as stack:
        started = []
        for number, machine in enumerate(pair):
            own = results / str(number)
            process = stack.enter_context(
                subprocess.Popen(
                    machine.command(*command(own)),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment() | {"GLOO_SOCKET_IFNAME": INTERFACE},
                )
            )
            stack.callback(process.kill)
            started.append(Side(machine, process, own))
        yield started
