"""Every error a user can be expected to meet.

GpubenchError                 1  something failed, and this says what
├── UsageError                2  the request cannot be carried out as asked
│   ├── SettingsError            a setting is unknown, mistyped, out of range or contradicts another
│   ├── RunDirectoryError        a results path or run directory cannot be used
│   │   └── NothingMeasured      a run holds no results: it ended before there were any
│   │       └── StillRunning     or it goes on
│   ├── DeviceError              the machine lacks what the settings ask for
│   ├── ModelError               the model cannot be found, built or fed
│   └── DataError                the data cannot be found, read or batched
├── RunFailed                 1  a run started and did not finish
│   ├── WorkerLost               a worker died without a word, or stopped making progress
│   ├── HostLost                 a worker on another machine cannot reach the one that writes the run
│   ├── OutOfMemory              the device's memory did not suffice
│   ├── NonFiniteLoss            the loss became NaN or infinite
│   ├── NonFiniteLatent          a sample became NaN or infinite
│   └── HandoverError            what one rank sent another is not what they agreed on
└── Interrupted             130  the user pressed Ctrl-C

The number is the exit code. They are caught in one place, `gpubench.commands`, and shown as `error:` and `hint:`
lines; any other exception is a bug and keeps its traceback.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches


class GpubenchError(Exception):
    """A failure with a message for the user, and if there is one, the next move."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def record(self) -> dict[str, str | None]:
        """As run.json and --json give it."""
        return {"kind": type(self).__name__, "message": self.message, "hint": self.hint}


class UsageError(GpubenchError):
    exit_code = 2


class SettingsError(UsageError):
    pass


class RunDirectoryError(UsageError):
    pass


class NothingMeasured(RunDirectoryError):
    pass


class StillRunning(NothingMeasured):
    pass


class DeviceError(UsageError):
    pass


class ModelError(UsageError):
    pass


class DataError(UsageError):
    pass


class RunFailed(GpubenchError):
    exit_code = 1


class WorkerLost(RunFailed):
    pass


class HostLost(RunFailed):
    pass


class OutOfMemory(RunFailed):
    pass


class NonFiniteLoss(RunFailed):
    pass


class NonFiniteLatent(RunFailed):
    pass


class HandoverError(RunFailed):
    pass


class Interrupted(GpubenchError):
    exit_code = 130


def offer(names: Sequence[str]) -> str:
    """ "did you mean 'a' or 'b'?"; nothing where there is nothing to offer."""
    quoted = " or ".join(f"'{name}'" for name in names)
    return f"did you mean {quoted}?" if names else ""


def did_you_mean(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """A hint that offers the known names nearest to `name`; nothing where none is as near as `cutoff`, 0 to 1."""
    return offer(get_close_matches(name, list(known), n=most, cutoff=cutoff))


def recorded(record: Mapping[str, str | None]) -> GpubenchError:
    """The error that `GpubenchError.record` described."""
    return by_name(record.get("kind") or "")(record.get("message") or "", record.get("hint") or "")


def by_name(name: str) -> type[GpubenchError]:
    """The class called `name` in this module; `RunFailed` for a name from elsewhere."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, GpubenchError) else RunFailed
