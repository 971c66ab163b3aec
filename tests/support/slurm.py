"""A Slurm cluster of the two machines of `machines.py`, which lasts as long as a test."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from machines import INTERFACE, Machine
from running import PATIENCE, environment

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={first.name}({first.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """What is missing for a cluster; None if nothing is."""
    missing = [name for name in DAEMONS if not shutil.which(name)]
    return f"Slurm is not installed: no {missing[0]}" if missing else None


class Cluster:
    def __init__(self, pair: Sequence[Machine], folder: Path) -> None:
        self.pair = pair
        self.folder = folder
        self.variables = environment() | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def ask(self, *command: str) -> str:
        """Returns what a command of Slurm prints on the first machine."""
        done = subprocess.run(
            self.pair[0].command(*command), env=self.variables, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def finish(self, script: str, *arguments: str, options: Sequence[str]) -> tuple[str, str]:
        """Submits a job and waits for its end. Returns its state and what it printed."""
        output = self.folder / "job.out"
        job = self.ask("sbatch", "--parsable", f"--output={output}", *options, script, *arguments).strip()
        deadline = time.monotonic() + PATIENCE
        while True:
            known = dict(word.split("=", 1) for word in self.ask("scontrol", "show", "job", job).split() if "=" in word)
            if known["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return known["JobState"], output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.5)


@contextmanager
def cluster(pair: Sequence[Machine], folder: Path) -> Iterator[Cluster]:
    """A cluster whose nodes are the two machines. Its processes are killed with those of the machines."""
    made = Cluster(pair, folder)
    nodes = "\n".join(f"NodeName={one.name} NodeAddr={one.address} CPUs=2 RealMemory=1000" for one in pair)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(first=pair[0], folder=folder, nodes=nodes))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # it finds out by itself only if one is mounted
    (folder / "munge.key").write_bytes(bytes(range(128)))
    (folder / "munge.key").chmod(0o400)
    for name in ("state", *(one.name for one in pair)):
        (folder / name).mkdir()
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        (pair[0], ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]),
        (pair[0], ["slurmctld", "-D"]),
        *((one, ["slurmd", "-D", "-N", one.name]) for one in pair),
    ]
    with ExitStack() as stack:
        for number, (machine, command) in enumerate(daemons):
            log = stack.enter_context((folder / f"daemon{number}.log").open("w"))
            process = stack.enter_context(
                subprocess.Popen(machine.command(*command), env=made.variables, stdout=log, stderr=log)
            )
            stack.callback(process.kill)
            if command[0] == "munged":
                while not (folder / "munge.socket").exists():
                    assert process.poll() is None, (folder / "daemon0.log").read_text()
                    time.sleep(0.05)
        yield made
