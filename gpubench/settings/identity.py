"""What the user asked of a run beyond the defaults, and the label that distinguishes it from other runs of the same
work.

A label is made once, when the run is opened. Listings, pages, progress and comparisons use it: "workers=2", "HEAD~1",
"+ --compile", or "baseline" for a side of a comparison of which nothing more was asked.
"""

import os
import re
import shlex
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from gpubench.settings.field import fields, setting
from gpubench.settings.keys import COMMAND, FILLED_IN, REF, THE_RUN, TRIAL, VARIABLES, flatten, label
from gpubench.settings.loading import Configuration
from gpubench.settings.schema import RunSettings

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
BASELINE, WORKING_TREE = "baseline", "working tree"


def asked(configuration: Configuration[Any]) -> dict[str, Any]:
    """Settings by dot-key, and VARIABLES by name, that the user gave and that can change the result.

    How long and how often is measured, and where results go, does not count.
    """
    values = flatten(configuration.settings.model_dump(mode="json"))
    found = {}
    cls: type[RunSettings] = type(configuration.settings)
    for key, field in fields(cls).items():
        origin, value = configuration.origins.get(key, FILLED_IN), values.get(key)
        counts = setting(field).role in ("workload", "scale", "treatment")
        given = origin not in (THE_RUN, TRIAL) and not origin.startswith(FILLED_IN)
        if counts and given and value is not None and value != field.get_default():
            found[key] = value
    own = _own_variables(str(found.get(COMMAND, "")))
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ and name not in own}


def _own_variables(command: str) -> set[str]:
    """The variables that a command such as `env A=1 python train.py` sets itself, whatever gpubench's own are."""
    first, *rest = shlex.split(command) or [""]
    return {word.partition("=")[0] for word in takewhile(ASSIGNMENT.match, rest)} if first == "env" else set()


def label_of(configuration: Configuration[Any]) -> str:
    """The label of a run: that among the runs of its command, or else what was asked of it."""
    given = configuration.labels.variant
    return label(asked(configuration)) if given is None else given


def variants(runs: Sequence[Configuration[Any]]) -> list[str | None]:
    """Labels the runs of one command by what distinguishes them; None for a run alone.

    A label that a run already has stays.
    """
    if len(runs) == 1:
        return [runs[0].labels.variant]
    every = [asked(run) for run in runs]
    keys = dict.fromkeys(key for known in every for key in known)
    differing = [key for key in keys if len({str(known.get(key)) for known in every}) > 1]
    plain = WORKING_TREE if any(REF in known for known in every) else BASELINE
    commands = [str(known.get(COMMAND, "")) for known in every]
    found: list[str | None] = []
    for run, known, command in zip(runs, every, commands, strict=True):
        more = command.removeprefix(commands[0]).strip() if command.startswith(commands[0]) else ""
        own = label({key: known[key] for key in differing if key in known})
        words = " ".join(filter(None, [own, f"+ {more}" if more else ""])) or plain
        found.append(words if run.labels.variant is None else run.labels.variant)
    return found
