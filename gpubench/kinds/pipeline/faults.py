"""The faults that `--inject` causes on purpose: how they are written, and those of a rank itself.

The faults of a hand-off are in `gpubench.kinds.pipeline.worker.link`, at its sender.
"""

import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpubench.errors import SettingsError, did_you_mean
from gpubench.settings.keys import about

FORM = "KIND,rank=R,sample=S[,seconds=T]"
DEFAULT_SECONDS = 1.0


class FaultKind(StrEnum):
    # faults of a hand-off, at its sender
    drop = "drop"
    duplicate = "duplicate"
    late = "late"
    shape = "shape"
    dtype = "dtype"
    corrupt = "corrupt"
    step = "step"
    # faults of a rank
    kill = "kill"
    stop = "stop"
    slow = "slow"


OF_THE_RANK = frozenset({FaultKind.kill, FaultKind.stop, FaultKind.slow})
TIMED = frozenset({FaultKind.late, FaultKind.slow})


@dataclass(frozen=True)
class Fault:
    kind: FaultKind
    rank: int
    """The rank at which it occurs; for a hand-off, its sender."""
    sample: int
    """The sample at which it occurs."""
    seconds: float = 0.0
    """The delay of `late` and `slow` in seconds."""


@about("inject")
def parse_fault(text: str, world_size: int, samples: int) -> Fault:
    """Parses a fault in the form of `FORM`.

    Raises SettingsError for another form, for an unknown kind, and for a fault that cannot happen in a pipeline of
    `world_size` ranks and `samples` samples.
    """
    name, *pairs = (part.strip() for part in text.split(","))
    kind = _kind(name)
    given: dict[str, str] = {}
    for key, value in map(_pair, pairs):
        if key in given:
            raise SettingsError(f"{key} is given twice", f"{given[key]!r} and {value!r}; keep one")
        given[key] = value
    known = ("rank", "sample", "seconds") if kind in TIMED else ("rank", "sample")
    if unknown := [key for key in given if key not in known]:
        raise SettingsError(f"{kind} takes no {unknown[0]!r}", f"{kind} takes {' and '.join(known)}")
    fault = Fault(
        kind,
        _whole(given, "rank"),
        _whole(given, "sample"),
        _seconds(given.get("seconds", str(DEFAULT_SECONDS))) if kind in TIMED else 0.0,
    )
    _refuse_impossible(fault, world_size, samples)
    return fault


def _kind(name: str) -> FaultKind:
    if name in set(FaultKind):
        return FaultKind(name)
    near = did_you_mean(name, FaultKind, cutoff=0)
    raise SettingsError(f"there is no fault {name!r}", f"{near} (one of {', '.join(FaultKind)})")


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"{text!r} is not key=value", f"write {FORM}")
    return key.strip(), value.strip()


def _whole(given: dict[str, str], key: str) -> int:
    value = given.get(key)
    if value is None:
        raise SettingsError(f"no {key} is given", f"write {FORM}")
    if not (value.isascii() and value.isdigit()):
        raise SettingsError(f"{key} is {value!r}, not a whole number from 0", f"write {FORM}")
    return int(value)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SettingsError(f"seconds is {text!r}, not a time", f"write {FORM}")
    return value


def _refuse_impossible(fault: Fault, world_size: int, samples: int) -> None:
    if fault.rank >= world_size:
        raise SettingsError(f"there is no rank {fault.rank} among {world_size}", "ranks count from 0")
    if fault.sample >= samples:
        raise SettingsError(f"there is no sample {fault.sample} among {samples}", "samples count from 0")
    if fault.kind not in OF_THE_RANK and fault.rank == world_size - 1:
        raise SettingsError(
            f"{fault.kind} is a fault of what a rank sends, and rank {fault.rank}, the last, sends nothing",
            f"name a rank below {world_size - 1}" if world_size > 1 else "use two ranks or more",
        )


def before_evaluations(fault: Fault | None, rank: int, samples: Sequence[int]) -> None:
    """Causes a fault of the rank itself. Each rank calls it before it evaluates `samples`."""
    if fault is None or fault.rank != rank or fault.sample not in samples:
        return
    if fault.kind is FaultKind.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind is FaultKind.stop:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind is FaultKind.slow:
        time.sleep(fault.seconds)
