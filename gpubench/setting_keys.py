"""The dot-keys of settings, and the commands that have them."""

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import get_args

from pydantic.fields import FieldInfo

from gpubench.diffusion.settings import PipeSettings
from gpubench.errors import did_you_mean, offer
from gpubench.settings import MemorySettings, ProfileSettings, RunSettings, Section, TrainSettings

COMMANDS: Mapping[str, type[RunSettings]] = {
    "train-bench": TrainSettings,
    "profile": ProfileSettings,
    "memory": MemorySettings,
    "pipe-infer": PipeSettings,
}
NEGATION = re.compile(r"(^|\.)no")
SHOWN_BY = "--print-config shows every setting"


def canonical(cls: type[RunSettings], key: str) -> str:
    """The dot-key behind an alias."""
    return cls.aliases.get(key, key)


@cache  # a run's file is looked through key by key, and the models do not change
def fields(cls: type[Section], prefix: str = "") -> Mapping[str, FieldInfo]:
    """Every leaf of a settings model by dot-key, but for those that the command does not take."""
    found: dict[str, FieldInfo] = {}
    for name, field in cls.model_fields.items():
        if field.exclude:
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found |= fields(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


@cache
def negations(cls: type[RunSettings]) -> Mapping[str, str]:
    """What turns a setting that is true or false off, and its dot-key: {"profiling.no_modules": "profiling.modules"}.

    The `no_` stands before the last name or before the section; before the last name or an alias alone where no other
    such setting has it. What is a name of its own is no negation.
    """
    switches = [key for key, field in fields(cls).items() if bool in (field.annotation, *get_args(field.annotation))]
    short = Counter(key.rpartition(".")[2] for key in switches)
    found: dict[str, str] = {}
    for key in switches:
        head, dot, leaf = key.rpartition(".")
        names = [f"{head}{dot}no_{leaf}", f"no_{key}", *[f"no_{leaf}"] * (short[leaf] == 1)]
        found |= dict.fromkeys(names, key)
    found |= {f"no_{alias}": key for alias, key in cls.aliases.items() if key in switches}
    return {name: key for name, key in found.items() if name not in fields(cls) and name not in cls.aliases}


def section(cls: type[RunSettings], name: str) -> list[str]:
    """The dot-keys below the section of this name; none where the command has no such section."""
    return [key for key in fields(cls) if key.startswith(f"{name}.")]


def owners(key: str) -> list[str]:
    """The commands that have a setting of this dot-key or alias."""
    return [command for command, cls in COMMANDS.items() if canonical(cls, key) in fields(cls)]


def command_of(cls: type[RunSettings]) -> str:
    return next(command for command, settings in COMMANDS.items() if settings is cls)


def alike(cls: type[RunSettings], other: type[RunSettings]) -> bool:
    """Whether the commands behind them run the same thing: three train a model, and one samples from one."""
    return issubclass(cls, TrainSettings) == issubclass(other, TrainSettings)


def nearest(cls: type[RunSettings], key: str, *, negated: bool = False) -> str:
    """A hint that offers the valid key closest to `key`; in a section that only other commands have, closest there.

    `negated` offers negations too, to a key that looks like one.
    """
    name, dot, _ = key.rpartition(".")
    if dot and not section(cls, name):
        cls = next((other for other in COMMANDS.values() if section(other, name)), cls)
    known = [*fields(cls), *cls.aliases, *(negations(cls) if negated and NEGATION.search(key) else ())]
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    if near := did_you_mean(key, known):
        return near
    close = difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1)
    return offer([leaves[name] for name in close]) or f"{SHOWN_BY}; --help the common ones"
