"""The errors that gpubench reports to the user.

GpubenchError                 1  the base class
├── UsageError                2  the request cannot be carried out as asked
│   ├── SettingsError            a setting is unknown, mistyped, out of range or contradicts another
│   ├── RunDirectoryError        a results path or run directory cannot be used
│   │   └── NothingMeasured      a run holds no results because it ended before there were any
│   │       └── StillRunning     a run has not ended yet
│   ├── DeviceError              the machine lacks what the settings ask for
│   ├── ModelError               the model cannot be found or built, or no batches can be made for it
│   └── DataError                the data cannot be found, read or batched
├── RunFailed                 1  a run started and did not finish
│   ├── RunDirectoryLost         a run directory was removed or replaced while its run went on
│   ├── ProgramFailed            a program of the user failed, or takes no optimizer step
│   ├── WorkerLost               a worker died without a report, or stopped making progress
│   │   └── InvalidEvent         a rank sent something that cannot be right
│   ├── HostLost                 a worker on another machine cannot reach the host
│   ├── OutOfMemory              the device has not enough memory
│   ├── NonFiniteLoss            the loss became NaN or infinite
│   ├── NonFiniteLatent          a sample became NaN or infinite
│   └── HandoffError             a rank received other data than agreed on
└── Interrupted             130  the user pressed Ctrl-C

The number is the exit code. `gpubench.commands` catches these errors and prints them as `error:` and `hint:` lines.
Without memory or a current directory any program fails, which `gpubench.__main__` explains. Any other exception is a
bug and keeps its traceback.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher


class GpubenchError(Exception):
    """A failure with a message for the user, and optionally a hint on what to do."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def record(self) -> dict[str, str | None]:
        """The error in the form of run.json and --json."""
        return {"kind": type(self).__name__, "message": self.message, "hint": self.hint}


class UsageError(GpubenchError):
    """A request that cannot be carried out as asked. `keys` are the dot-keys of the settings that the message names."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None, *, keys: Iterable[str] = ()) -> None:
        super().__init__(message, hint)
        self.keys = tuple(keys)


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


class RunDirectoryLost(RunFailed):
    pass


class WorkerLost(RunFailed):
    pass


class InvalidEvent(WorkerLost):
    @classmethod
    def of(cls, rank: object, wrong: object) -> "InvalidEvent":
        """The error for a rank that sent an event which no rank sends; `wrong` says what cannot be right."""
        who = f"rank {rank}" if isinstance(rank, int) else rank
        return cls(
            f"{who} sent an event that cannot be right: {' '.join(str(wrong).split())[:300]}",
            "something else than gpubench has written to its connection, or its gpubench is of another version",
        )


class ProgramFailed(RunFailed):
    pass


class HostLost(RunFailed):
    pass


class OutOfMemory(RunFailed):
    pass


class NonFiniteLoss(RunFailed):
    pass


class NonFiniteLatent(RunFailed):
    pass


class HandoffError(RunFailed):
    pass


class Interrupted(GpubenchError):
    exit_code = 130


FEW = 8
"""The number of names that a hint lists without leaving any out."""
BEGINS, CONTAINS = 0.3, 0.15
"""What is added to the similarity of a name that begins with what is looked for, or has it as one of its words."""


def offer(names: Sequence[str]) -> str:
    """Asks "did you mean 'a', 'b' or 'c'?"; "" without names."""
    if not names:
        return ""
    *most, last = (f"'{name}'" for name in names)
    return f"did you mean {', '.join(most)} or {last}?" if most else f"did you mean {last}?"


def alike(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names that `name` may stand for, the closest first.

    They have a similarity of `cutoff` (0 to 1). Case and separators do not count. A name that begins with what is
    looked for, or has it as a word, is closer.
    """
    wanted, found = _plain(name), dict[str, float]()
    for one in known:
        other = _plain(one)
        found[one] = SequenceMatcher(None, other, wanted).ratio()
        if len(wanted) > 2 and other.startswith(wanted):
            found[one] += BEGINS
        elif len(wanted) > 2 and f"-{wanted}-" in f"-{other}-":
            found[one] += CONTAINS
    closest = sorted(found, key=lambda one: (found[one], one), reverse=True)
    return [one for one in closest if found[one] >= cutoff][:most]


def _plain(name: str) -> str:
    return name.casefold().replace("_", "-").replace(" ", "-")


def did_you_mean(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """A hint with the known names closest to `name`, or "" if none has a similarity of `cutoff` (0 to 1)."""
    return offer(alike(name, known, most, cutoff))


def one_of(name: str, known: Iterable[str], shown_by: str, *, what: str = "it is one of", cutoff: float = 0.6) -> str:
    """A hint for an unknown name: all known ones, or the closest if there are more than FEW.

    `shown_by` says where all of them are shown, as in "gpubench memory --help lists all 66".
    """
    names = list(known)
    near = did_you_mean(name, names, most=1 if len(names) <= FEW else 3, cutoff=cutoff)
    if len(names) <= FEW:
        return f"{near} {what} {', '.join(names)}".lstrip() if names else shown_by
    return f"{near} {shown_by}" if near else f"for example {', '.join(names[:3])}; {shown_by}"


NO_MESSAGE = "it failed, and its error has no message"


def recorded(record: Mapping[str, str | None]) -> GpubenchError:
    """Makes an error of the result of `GpubenchError.record`."""
    return by_name(record.get("kind") or "")(record.get("message") or NO_MESSAGE, record.get("hint") or "")


def by_name(name: str) -> type[GpubenchError]:
    """The error class `name` of this module, or `RunFailed` for any other name."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, GpubenchError) else RunFailed
