"""Settings by dot-key: nested values as {dot-key: value}, and the origin of each value, which errors name."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpubench.errors import UsageError

ENVIRONMENT_PREFIX = "GPUBENCH_"
"""What the names of the environment variables begin with that set a setting."""
RESULTS_VARIABLE = f"{ENVIRONMENT_PREFIX}RESULTS"
"""The variable that sets the folder of the results, which every command has."""
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""Variables of the environment that change how fast PyTorch does the same work, whichever program it is."""
COMMAND, REF, PATCH = "program.command", "program.ref", "program.patch"
"""The settings that name a program of the user, and the commit of it or the patch that it is run with."""
CACHED = "data.cached"
"""The setting by which training gets its first batches again and again: other data, and losses that mean nothing."""
MACHINE = "host.name"
"""The fact of the environment that is the name of the machine."""
UNNAMED = frozenset({COMMAND, "device", "program.directory", "model.name", "model.unet", "data.source", "seed"})
"""Settings that listings show elsewhere, or that do not distinguish runs."""
MOST_NAMED = 4


def in_words(value: Any) -> str:
    """Formats the value of a setting for a sentence."""
    if is_empty(value):
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)


def assignment(key: str, value: Any) -> str:
    """A setting with its value, as in "workers=2"; of a ref or a machine its name alone."""
    return str(value) if key in (REF, MACHINE) else f"{key.rpartition('.')[2]}={in_words(value)}"


def label(asked: Mapping[str, Any]) -> str:
    """Names what was asked of a run in a few words; "" if nothing was."""
    words = [assignment(key, value) for key, value in asked.items() if key not in UNNAMED]
    more = [f"and {len(words) - MOST_NAMED} more"] if len(words) > MOST_NAMED else []
    return " ".join(words[:MOST_NAMED] + more)


def is_empty(value: Any) -> bool:
    """Whether the value of a setting would leave a gap in a sentence."""
    return value is None or value in ("", [], {})


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns nested mappings into {dot-key: leaf}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turns {dot-key: leaf} into nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, leaf = key.split(".")
        branch = tree
        for name in path:
            branch = branch.setdefault(name, {})
        branch[leaf] = value
    return tree


COMMAND_LINE = "command line"
FILLED_IN = "default: "
"""The prefix of the origin of a setting that gpubench chose, before the reason."""

THE_RUN, FIX, TRIAL = "the run", "the fix of a finding", "a trial"
"""Origins in a run that tries a fix: of unchanged settings, of the fix, and of the changes of every such run."""


def with_origins(message: str, keys: Iterable[str], origins: Mapping[str, str]) -> str:
    """Adds the origins of the settings `keys` to a message, as in "seed = 'x': not a number (from mine.yaml)".

    Origins that the message already names, the command line, chosen settings and the changes of every trial are left
    out.
    """
    found = {key: origins[key] for key in dict.fromkeys(keys) if key in origins}
    mentioned = {key: origin for key, origin in found.items() if is_elsewhere(origin)}
    mentioned = {key: origin for key, origin in mentioned.items() if f"(from {origin})" not in message}
    if not mentioned:
        return message
    if len(set(found.values())) == 1:
        return f"{message} (from {next(iter(mentioned.values()))})"
    return f"{message} ({', '.join(f'{key} from {origin}' for key, origin in mentioned.items())})"


def is_elsewhere(origin: str) -> bool:
    """Whether a setting is from a file or a variable, and neither from the command line nor chosen."""
    return origin not in (COMMAND_LINE, THE_RUN, FIX, TRIAL) and not origin.startswith(FILLED_IN)


@contextmanager
def naming_origins(origins: Mapping[str, str]) -> Iterator[None]:
    """Adds to the messages of errors the origins of the settings that the errors are about."""
    try:
        yield
    except UsageError as error:
        raise type(error)(with_origins(error.message, error.keys, origins), error.hint, keys=error.keys) from None


@contextmanager
def about(key: str) -> Iterator[None]:
    """Makes errors be about the setting `key`, and their messages begin with it."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{key}: {error.message}", error.hint, keys=(key, *error.keys)) from None
