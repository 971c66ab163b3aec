"""The variants that a command runs: the run that is asked for, another version beside it, or one for each value."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from gpubench import git
from gpubench.commands.program_words import PYTHON
from gpubench.commands.wrong_words import STARTED_WITH
from gpubench.errors import UsageError
from gpubench.ranks import launched_by_torchrun

if TYPE_CHECKING:
    from gpubench.settings.loading import Configuration

Complete = Callable[[Any], tuple[Any, dict[str, str]]]
VS_REF = "--vs-ref"


class Versus(NamedTuple):
    """The version to compare with: other settings, more arguments, or another commit."""

    settings: list[str] | None = None
    arguments: str | None = None
    ref: str | None = None

    def refuse_without_program(self, ctx: typer.Context) -> None:
        """Raises UsageError for what only a program has."""
        for name, given in (("--vs-args", self.arguments), (VS_REF, self.ref)):
            if given is not None:
                command = f"gpubench {ctx.info_name} {name} {shlex.quote(given)} -- python train.py"
                raise UsageError(f"{name} needs a program", command)

    @property
    def own(self) -> int:
        """The place of the requested run among the variants: with --vs-ref, the commit comes before it."""
        return 1 if self.ref else 0

    def variants(self, base: "Configuration[Any]", complete: Complete) -> "list[Configuration[Any]]":
        """The requested run, and the other version if there is one, both complete.

        Raises an error for what cannot be run, before a run directory is created.
        """
        from gpubench.settings.loading import VS, complete_all, parse_assignments

        for name, text in (("--vs-args", self.arguments), (VS_REF, self.ref)):
            if text is not None and not text.strip():
                raise UsageError(f"{name} is empty", "leave it out, or say what to compare with")
        if sum(map(bool, self)) > 1:
            raise UsageError("--vs, --vs-args and --vs-ref are different comparisons", "give one of them")
        if self.settings:
            if launched_by_torchrun():
                raise UsageError("--vs starts fresh processes, which torchrun does not", "run it without torchrun")
            other = base.with_overrides(parse_assignments(type(base.settings), self.settings), VS)
            return complete_all([base, other], complete)
        if self.arguments:
            _refuse_command(base.settings.program.words, self.arguments)
            more = {"program.command": f"{base.settings.program.command} {self.arguments}"}
            return complete_all([base, base.with_overrides(more, "--vs-args")], complete)
        if self.ref:
            _refuse_outside(base.settings.program)
            git.commit(base.settings.program.directory or Path(), self.ref)
            return complete_all([base.with_overrides({"program.ref": self.ref}, VS_REF), base], complete)
        return complete_all([base], complete)


def _refuse_command(program: Sequence[str], arguments: str) -> None:
    """Raises UsageError for arguments that begin with the command of the program that they would be added to."""
    try:
        words = shlex.split(arguments)
    except ValueError:  # which the settings refuse
        return
    is_python = all(PYTHON.fullmatch(Path(one[0]).name) for one in (words, program))
    is_script = words[0] in program and Path(words[0]).suffix in STARTED_WITH
    if not (words[0] == program[0] or is_python or is_script):
        return
    begin = program.index(words[0]) if words[0] in program else 0
    command = program[begin:]
    added = words[len(command) :] if words[: len(command)] == [*command] else []
    instead = f": --vs-args={shlex.quote(shlex.join(added))}" if added else ""
    raise UsageError(
        f"--vs-args {arguments!r} begins with the program, to which these words would be added",
        f"give only what is added{instead}",
    )


def _refuse_outside(program: Any) -> None:
    """Raises UsageError for a program that is in a repository, and is to be started outside of it."""
    folder = program.directory or Path()
    if git.repository(folder):
        return
    for word in shlex.split(program.command):
        file = (folder / word).absolute()
        if file.suffix == ".py" and file.is_file() and (top := git.repository(file.parent)):
            inside = program.command.replace(shlex.quote(word), shlex.quote(str(file.relative_to(top))))
            raise UsageError(
                f"{VS_REF} checks out the repository of the folder that the program starts in, and "
                f"{folder.absolute()} is in none",
                f"cd {shlex.quote(str(top))}, and give the program as {inside}",
            )


def of_values(
    base: "Configuration[Any]", key: str, values: Sequence[str], complete: Complete
) -> "list[Configuration[Any]]":
    """A variant for each value of the setting `key`, complete. Raises the errors of `variants`."""
    from gpubench.settings.keys import COMMAND_LINE
    from gpubench.settings.loading import complete_all

    return complete_all([base.with_overrides({key: value}, COMMAND_LINE) for value in values], complete)


def without_change(variants: "Sequence[Configuration[Any]]") -> str | None:
    """What --vs or --vs-ref asks for that is already so; None if all of it is a change, or nothing is asked."""
    from gpubench import git
    from gpubench.settings.keys import flatten, in_words
    from gpubench.settings.loading import VS

    if variants[0].origins.get("program.ref") == VS_REF:
        program = variants[0].settings.program
        if not git.is_at(program.ref, program.directory or Path()):
            return None
        found = f"{VS_REF} {program.ref} is what is checked out, and no tracked file differs"
        return f"{found}: two equal versions are compared"
    (first, *others), asked = variants, [key for key, origin in variants[-1].origins.items() if origin == VS]
    if not (others and asked):
        return None
    before, after = (flatten(one.settings.model_dump(mode="json")) for one in (first, others[0]))
    same = [f"{key}={in_words(after.get(key))}" for key in asked if before.get(key) == after.get(key)]
    if not same:
        return None
    said = f"--vs {' '.join(same)} is what is set already"
    return f"{said}: two equal runs are compared" if len(same) == len(asked) else said
