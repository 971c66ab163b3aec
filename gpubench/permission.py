"""Asks before code is run or applied that a file of somebody else names; see `gpubench.settings.trust`."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpubench.errors import UsageError
from gpubench.patches.apply import applied, shown
from gpubench.ranks import is_rank_zero, launched_by_torchrun
from gpubench.report.terminal import Terminal
from gpubench.settings.keys import COMMAND_LINE, FILLED_IN, PATCH, REF, flatten
from gpubench.settings.loading import Configuration
from gpubench.settings.trust import Code, code_in, has_run, remember
from gpubench.text import clean

MODEL = "model.name"
READ = "read that code, and add --trust if it may run; results of others are safe to show and to compare"
_SHOWN = set[str]()
"""The digests of the code, and the names of the models, that this process has shown."""
_AGREED = set[str]()
"""The digests of the code that the user has agreed to in this process, also where that cannot be noted."""


def permit(
    runs: Iterable[Configuration[Any]], terminal: Terminal, question: str = "run it?", advice: str = READ
) -> list[Code]:
    """Shows what the runs start that is not on the command line, notes that the user runs it, and returns it.

    Raises UsageError with the advice if a received file names code that this user has not run before, unless the user
    answers the question on a terminal with yes.
    """
    codes: dict[str, Code] = {}
    for run in runs:
        code = code_in(run.settings)
        if code is None:
            _say_model(run, terminal)
        if code is None or code.digest in codes:
            continue
        codes[code.digest] = code
        origins = {run.origins.get(key) for key in code.parts}
        if run.received in origins - {None}:
            own = [key for key in (REF, PATCH) if run.origins.get(key) != run.received]
            _refuse_unknown(code, code.without(own), str(run.received), question, advice)
        if origins != {COMMAND_LINE} and code.digest not in _SHOWN:
            _SHOWN.add(code.digest)
            terminal.say(f"runs {code.said}")
    if is_rank_zero():
        remember(codes.values())
    return [*codes.values()]


def _say_model(run: Configuration[Any], terminal: Terminal) -> None:
    """Says which built-in model is run by a command that names neither a model nor a program."""
    chosen = str(run.origins.get(MODEL, "")).startswith(FILLED_IN)
    name = flatten(run.settings.model_dump()).get(MODEL) if chosen else None
    if name and name not in _SHOWN:
        _SHOWN.add(name)
        terminal.say(f"runs {name}, a built-in model, as none is named; a program of your own goes after --")


def _refuse_unknown(code: Code, received: Code, source: str, question: str, advice: str) -> None:
    """Raises UsageError unless the user has run the code before, or agrees on the terminal that it is run.

    `received` is the code without the commit or the patch that the user or gpubench has chosen for it.
    """
    if has_run(code) or has_run(received) or _AGREED & {code.digest, received.digest}:
        return
    if sys.stdin and sys.stderr and sys.stdin.isatty() and sys.stderr.isatty() and not launched_by_torchrun():
        print(f"{clean(source)} names code that you have not run here before:", file=sys.stderr)
        print(f"  {clean(code.said)}", file=sys.stderr)
        if code.patch:
            print(shown(applied(Path(code.parts[PATCH]), code.directory, code.patch)), end="", file=sys.stderr)
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            _AGREED.add(code.digest)
            return
    raise UsageError(
        f"{source} names code that you have not run here before: {code.said}",
        advice,
    )
