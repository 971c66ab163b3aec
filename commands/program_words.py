"""Why the command of a program after `--` cannot be started, and how to write it so that it can.

A command that can be started is left as it is: what looks like a mistake in it may be meant for the program.
"""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

from gpubench.commands import wrong_words
from gpubench.commands.wrong_words import OPERATORS, STARTED_WITH, as_program, line, near_file
from gpubench.errors import GpubenchError, UsageError, alike
from gpubench.registry import STARTERS

PYTHON = re.compile(r"(pypy|python)[\d.]*")
EXAMPLE = ("python", "train.py")
OF_SHELLS = frozenset(
    {"cd", "pushd", "source", ".", "export", "set", "unset", "ulimit", "alias", "eval", "exec", "module", "umask"}
)
"""What a shell does itself, and no program does."""
ENVIRONMENTS = ("conda", "mamba", "micromamba", "workon", "pyenv")
"""Commands that change the shell that they are typed in."""


def refuse(name: str, own: Sequence[str], words: Sequence[str]) -> None:
    """Raises UsageError if there are no words after `--`, or if they begin with an option of gpubench.

    `own` are the words between the command `name` and `--`.
    """
    if not words:
        raise UsageError("no program stands behind --", line([name, *own, "--", *EXAMPLE]))
    if not words[0].startswith("-") or which(words[0]):
        return
    begin = (at for at, word in enumerate(words) if word in STARTERS or Path(word).suffix in STARTED_WITH)
    at = next(begin, len(words))
    program = as_program(words[at:]) if words[at:] else EXAMPLE
    fixed = line([name, *own, *words[:at], "--", *(program or EXAMPLE)])
    raise UsageError(f"{words[0]} stands behind --, where the program begins", fixed)


class ProgramWords(NamedTuple):
    """A command as the user gave it after `--`."""

    name: str
    """The command of gpubench."""
    own: Sequence[str]
    """The words between it and `--`."""
    words: Sequence[str]
    directory: Path
    """The directory in which the program is started."""

    def instead(self, program: Iterable[str], *more: str) -> str:
        """The whole command line with another program, and with more options of gpubench."""
        return line([self.name, *self.own, *more, "--", *program])


def refuse_unstartable(given: ProgramWords, *, at_commit: bool = False) -> None:
    """Raises UsageError for a command that cannot be started, if there is a way to write it that can.

    With `at_commit` the program has the files of another commit, which are not looked at.
    """
    if not given.directory.is_dir():
        return
    first, *rest = given.words
    fixed = as_program(given.words)
    otherwise = given.instead(fixed) if fixed and list(fixed) != list(given.words) else None
    if not which(first if os.sep not in first else str(given.directory.absolute() / first)):
        _refuse_missing(given, otherwise)
    elif Path(first).suffix in STARTED_WITH and otherwise:
        raise UsageError(f"cannot start the program: no line with #! in {first} says what runs it", otherwise)
    elif PYTHON.fullmatch(Path(first).name) and rest and not rest[0].startswith("-"):
        _refuse_script(given, Path(rest[0]), at_commit=at_commit)


def _refuse_missing(given: ProgramWords, otherwise: str | None) -> None:
    """Raises UsageError for a first word that is not a command; `otherwise` is a command line that it may stand for."""
    first, *rest = given.words
    message = f"cannot start the program: there is no command {first!r}"
    if first in OF_SHELLS or first in ENVIRONMENTS:
        raise UsageError(f"{message}, which belongs to a shell", _of_shell(given))
    if (given.directory / first).is_file():
        message = f"cannot start the program: {first} is not executable"
    if otherwise:
        raise UsageError(message, otherwise)
    if near := alike(first, filter(which, STARTERS), cutoff=0.7):
        raise UsageError(message, given.instead([near[0], *rest]))
    if first in STARTERS:
        raise UsageError(message, f"install {first}, or start gpubench in the environment that has it")


def _of_shell(given: ProgramWords) -> str:
    """How to write a command that begins with a word of the shell."""
    first, *rest = given.words
    if OPERATORS.search(" ".join(rest)):
        return given.instead(["bash", "-c", _in_shell(given.words)])
    if first in ("cd", "pushd") and len(rest) == 1:
        return given.instead(EXAMPLE, f"--program.directory={rest[0]}")
    if rest and rest[-1].endswith("bin/activate"):
        return given.instead([str(Path(rest[-1]).with_name("python")), EXAMPLE[1]])
    if first in ENVIRONMENTS:
        return f"name the Python of the environment: {given.instead(['ENVIRONMENT/bin/python', EXAMPLE[1]])}"
    return given.instead(["bash", "-c", f"{_in_shell(given.words)} && {shlex.join(EXAMPLE)}"])


def _refuse_script(given: ProgramWords, script: Path, *, at_commit: bool) -> None:
    """Raises UsageError for a script that python cannot run: a notebook, or a file that does not exist."""
    first, _, *rest = given.words
    if script.suffix == ".ipynb":
        fixed = given.instead([*STARTED_WITH[".ipynb"], str(script), *rest])
        raise UsageError(f"{script} is a notebook, which python does not run", fixed)
    if at_commit or script.suffix != ".py" or os.path.exists(given.directory / script):  # noqa: PTH110 - too long a name
        return
    expanded = os.path.expandvars(script.expanduser())
    found = expanded if os.path.isfile(expanded) else near_file(str(script), given.directory)  # noqa: PTH113
    where = "" if script.is_absolute() else f" in {given.directory.absolute()}"
    hint = given.instead([first, found, *rest]) if found else "give its path from there, or --program.directory=DIR"
    raise UsageError(f"there is no file {script}{where}", hint)


def _in_shell(words: Sequence[str]) -> str:
    """Quotes the words for a shell, but not the operators among them."""
    return " ".join(word if OPERATORS.fullmatch(word) else shlex.quote(word) for word in words)


def explained(error: GpubenchError, command: Any, name: str, own: Sequence[str], words: Sequence[str]) -> str | None:
    """The hint for a program that failed because of its arguments; None if that is not what it printed.

    The last line that the program printed is in the hint of the error.
    """
    said, given = error.hint or "", ProgramWords(name, own, words, Path())
    for at, word in enumerate(words[1:], 1):
        if wrong_words.typed([word]) != [word] and word in said:
            return wrong_words.typography([name, *own, "--", *words])
        if not re.search(rf"(?<![\w-]){re.escape(word.partition('=')[0])}(?![\w-])", said):
            continue
        if OPERATORS.fullmatch(word):
            return f"{word} is for a shell: {given.instead(['bash', '-c', _in_shell(words)])}"
        if option := wrong_words.own_options(command).get(word.partition("=")[0]):
            end = at + (1 if "=" in word or option.is_flag or option.count else 2)
            fixed = line([name, *own, *words[at:end], "--", *words[:at], *words[end:]])
            return f"options of gpubench come before --: {fixed}"
    return None
