"""Asks before code is run that results of somebody else name; see `gpubench.settings.trust`."""

import sys
from collections.abc import Iterable
from typing import Any

from gpubench.errors import UsageError
from gpubench.ranks import is_rank_zero, launched_by_torchrun
from gpubench.report.terminal import Terminal
from gpubench.settings.keys import COMMAND_LINE, FILLED_IN, flatten
from gpubench.settings.loading import Configuration
from gpubench.settings.trust import Code, code_in, has_run, remember
from gpubench.text import clean

MODEL = "model.name"
_SHOWN = set[str]()
"""The digests of the code, and the names of the models, that this process has shown."""


def permit(runs: Iterable[Configuration[Any]], terminal: Terminal) -> None:
    """Shows what the runs start that is not on the command line, and notes that the user runs it.

    Raises UsageError if received results name code that this user has not run before, unless the user agrees to it.
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
        if run.received in origins - {None} and not has_run(code):
            _ask(code, str(run.received))
        if origins != {COMMAND_LINE} and code.digest not in _SHOWN:
            _SHOWN.add(code.digest)
            terminal.say(f"runs {code.said}")
    if is_rank_zero():
        remember(codes.values())


def _say_model(run: Configuration[Any], terminal: Terminal) -> None:
    """Says which built-in model is run by a command that names neither a model nor a program."""
    chosen = str(run.origins.get(MODEL, "")).startswith(FILLED_IN)
    name = flatten(run.settings.model_dump()).get(MODEL) if chosen else None
    if name and name not in _SHOWN:
        _SHOWN.add(name)
        terminal.say(f"runs {name}, a built-in model, as none is named; a program of your own goes after --")


def _ask(code: Code, source: str) -> None:
    """Raises UsageError unless the user agrees on the terminal that the code is run."""
    if sys.stdin and sys.stderr and sys.stdin.isatty() and sys.stderr.isatty() and not launched_by_torchrun():
        print(f"{clean(source)} names code that you have not run here before:", file=sys.stderr)
        print(f"  {clean(code.said)}", file=sys.stderr)
        print("run it? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise UsageError(
        f"{source} names code that you have not run here before: {code.said}",
        "read that code, and add --trust if it may run; results of others are safe to show and to compare",
    )
