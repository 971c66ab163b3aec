"""Records of each benchmark's last run, with the machine it ran on.

Each benchmark has a JSON file of its own, so that it can be repeated alone.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from bars import CODES, FAILED, MET, MISSED, STOPPED, UNDECIDED, Bar
from processes import observe

from gpubench import __version__, git, units

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "diffusers", "transformers", "numpy", "scipy")
PYTHON = ".venv/bin/python"  # as a reader types it
CAPTURE = (
    "import json, torch; from gpubench.worker.environment import capture_env_metadata; "
    "torch.cuda.is_available() and torch.cuda.init(); "  # as only torch knows the GPUs of AMD
    "print(json.dumps(capture_env_metadata()))"
)
LIBRARIES = {"cuda": "CUDA", "rocm": "ROCm", "cudnn": "cuDNN", "nccl": "NCCL"}
"""What torch tells of its libraries; on ROCm, cudnn is MIOpen and nccl is RCCL."""
NOT_JUDGED = "not judged"
WORST_FIRST = (MISSED, UNDECIDED, MET)


class Machine(msgspec.Struct, frozen=True):
    """The machine, one line of text per field."""

    processor: str
    memory: str
    gpu: str
    system: str
    versions: str
    gpubench: str
    """The version and commit of gpubench."""
    driver: str = ""
    """The versions of the driver of the GPU, and of the libraries that torch uses on it."""

    @classmethod
    def here(cls) -> "Machine":
        """Return the facts of this machine. Raises subprocess.CalledProcessError if torch does not load."""
        # In a separate process, so that the suite itself stays small.
        said, _ = observe([sys.executable, "-c", CAPTURE])
        found = json.loads(said)
        cpu, host, packages = found["cpu"], found["host"], found["packages"]
        known = [f"{name} {packages[name]}" for name in PACKAGES if name in packages]
        python = f"Python {found['python']['version']}"
        return cls(
            f"{cpu.get('model', 'unknown')}, {units.counted(cpu['usable_cores'], 'core')} usable",
            units.size(found["memory"]["total_bytes"]),
            _gpus([gpu["name"] for gpu in found["gpus"]]) or "none",
            f"{host['os']}, kernel {host['kernel']}{', virtual' * bool(host.get('virtual'))}",
            ", ".join((python, *known)),
            f"{__version__}, {_commit()}",
            _driver(found) if found["gpus"] else "",
        )


def _gpus(names: Sequence[str]) -> str:
    counts = Counter(names)
    return ", ".join(f"{counts[name]} x {name}" if counts[name] > 1 else name for name in counts)


def _driver(found: Mapping[str, Any]) -> str:
    driver = {"driver": found.get("driver", {}).get("version")}
    libraries = {LIBRARIES[name]: version for name, version in found["torch"].items() if name in LIBRARIES}
    return ", ".join(f"{name} {version}" for name, version in (driver | libraries).items() if version)


def _commit() -> str:
    state = git.state(ROOT) or {}
    commit = state.get("commit")
    if commit is None:
        return "not from a repository"
    return f"commit {commit[:12]}{' with changes' * state['dirty']}"


class Record(msgspec.Struct, frozen=True):
    name: str
    command: list[str]
    """The command as a reader would type it."""
    machine: Machine
    finished: str
    """Date and time, UTC."""
    seconds: float
    code: int | None
    """The exit code; None if it ran out of time."""
    bars: list[Bar]
    printed: str
    trouble: str
    """The last output of a benchmark that did not finish."""

    @property
    def verdict(self) -> str:
        """met, missed, undecided, not judged (no bar holds here), failed or stopped."""
        if self.code is None:
            return STOPPED
        verdict = next((one for one in WORST_FIRST if any(bar.verdict == one for bar in self.bars)), NOT_JUDGED)
        return verdict if self.code == CODES.get(verdict, 0) else FAILED

    @property
    def ran(self) -> bool:
        return self.verdict not in {FAILED, STOPPED}


def keep(record: Record, folder: Path) -> None:
    """Replace the record atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{record.name}.json"
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    aside.replace(_path(folder, record.name))


def recall(folder: Path, name: str) -> Record | None:
    path = _path(folder, name)
    return msgspec.json.decode(path.read_bytes(), type=Record) if path.is_file() else None


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"
