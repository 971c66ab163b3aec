"""A setting as a field of a model: its default, what it means, and what a difference in it means to a comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from typing_extensions import TypeVar

from gpubench.settings.options import Option
from gpubench.settings.roles import Role

Open = TypeVar("Open", default=None, covariant=True)
"""The additional type of a setting that gpubench fills in: None until it does, and then Never, which has no values.

`TrainSettings` is the same as `TrainSettings[None]`.
"""

Place = Literal["loader", "optimizer", "model", "ddp", "start"]
"""Where a program does what a setting changes: it makes a DataLoader, an optimizer or a DistributedDataParallel, or
calls an outermost module; or "start", anywhere before the training loop."""


@dataclass(frozen=True)
class FromOutside:
    """How the probe changes a program of the user by a setting, without an edit."""

    code: str | Mapping[Any, str]
    """The code that does the same, by value or with the value as {}."""
    place: Place
    """Where in the program the code belongs."""
    numbers: Literal["same", "rounding", "type", "data"]
    """What it changes about the computed numbers: nothing, their last digits, the type that they are computed in, or
    the data that they are computed from, after which the losses mean nothing."""
    meaning: str | None = None
    """What the setting means for a program; None if its description says so."""

    def in_code(self, value: Any) -> str:
        return self.code.format(value) if isinstance(self.code, str) else self.code[value]


@dataclass(frozen=True)
class Setting:
    """What is declared about a setting besides its type, its default and its description."""

    role: Role
    """What a difference in it is to the comparison of two runs."""
    alias: str | None = None
    """A short name of it on the command line, in overrides and in files."""
    option: Option | None = None
    """How --help lists it; None for one that is an option by its dotted name only."""
    depends_on: Sequence[str] = ()
    """The settings from which gpubench derives the value that the user leaves open, the closest first."""
    environment: Sequence[str] = ()
    """The facts of environment.json that it decides."""
    superseded_by: str | None = None
    """A fact of the built model that is compared instead of it, where both runs have recorded the fact."""
    from_outside: FromOutside | None = None
    """How it changes a program of the user; None for a setting that does not."""
    training_only: bool = False
    """Whether it changes nothing where a forward pass is all that is computed."""
    idle_with: Mapping[str, Sequence[Any]] | None = None
    """The values of other settings, by dot-key, with any of which it has no effect."""
    stays_inside: bool | None = None
    """Whether it reads, writes and sends nothing outside of the folder in which a program runs, whatever its value.

    If None, its type decides: a number, a switch or one of several words names no place, but a text can.
    """


def _declare(role: Role, default: Any, description: str, **more: Any) -> Any:
    """`more` are the other attributes of `Setting`."""
    extra: Any = {"setting": Setting(role, **more)}
    return Field(default, description=description, json_schema_extra=extra)


workload = partial(_declare, "workload")
"""A setting that decides what is computed. Runs in which it differs did not do the same work, and get no verdict."""
scale = partial(_declare, "scale")
"""A setting that decides how much is computed at a time. The figures of runs in which it differs are normalised."""
treatment = partial(_declare, "treatment")
"""A setting that decides how the work is done. Its effect is what a comparison is there to show."""
protocol = partial(_declare, "protocol")
"""A setting that decides how long and how often is measured. It is listed, and changes nothing about the verdicts."""
uncompared = partial(_declare, "uncompared")
"""A setting without an influence on the measured figures. A difference in it is not listed."""


DEFAULT = "; default: "
"""What a description has before the default that is chosen for the model and the device, or that a program has."""
AS_THE_PROGRAM = f"{DEFAULT}as the program does"


def of_program(cls: "type[Section]", name: str) -> Any:
    """Declares the setting `name` of `cls` again for a user's program. If it is not set, the program decides.

    Its type leaves out the values that the probe cannot set. Raises TypeError for a setting that it never sets.
    """
    field = cls.model_fields[name]
    declared = setting(field)
    if declared.from_outside is None:
        raise TypeError(f"{cls.__name__}.{name}: declare how the probe sets it in a program")
    meaning = declared.from_outside.meaning or (field.description or "").partition(DEFAULT)[0]
    return _declare(default=None, description=f"{meaning}{AS_THE_PROGRAM}", **vars(replace(declared, depends_on=())))


def untaken(default: Any) -> Any:
    """Declares that a command does not take a setting of the base class."""
    return Field(default, exclude=True)


class Conflict(ValueError):
    """A contradiction between the settings `keys`. Validators raise it."""

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys


class Section(BaseModel):
    """Immutable, and strict about names: a misspelt key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Raises TypeError for a field with a default that no function of this module declared, unless it is a
        section."""
        for name, field in cls.model_fields.items():
            if not (field.is_required() or is_section(field) or field.exclude or field.json_schema_extra):
                raise TypeError(f"{cls.__name__}.{name}: declare it with the role that it has in a comparison")


def is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


@cache  # called for every key of a run's file; the models do not change
def fields(cls: type[Section], prefix: str = "") -> Mapping[str, FieldInfo]:
    """The leaves of a settings model by dot-key, without those that the command does not take."""
    found: dict[str, FieldInfo] = {}
    for name, field in cls.model_fields.items():
        if field.exclude:
            continue
        if is_section(field):
            found |= fields(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            found[prefix + name] = field
    return found


@cache
def declared_key(cls: type[Section], key: str) -> str | None:
    """The dot-key of the setting that `key` sets: itself, or the mapping that it names an entry of.

    None if there is no such setting. A mapping is set by its entries only.
    """
    known = fields(cls)
    mapping, _, name = key.rpartition(".")
    if mapping in known and get_origin(known[mapping].annotation) is dict:
        return mapping if name.isidentifier() else None
    return key if key in known and get_origin(known[key].annotation) is not dict else None


def setting(field: FieldInfo) -> Setting:
    extra: Any = field.json_schema_extra
    declared: Setting = extra["setting"]
    return declared


@cache
def aliases(cls: type[Section]) -> Mapping[str, str]:
    """Each alias with its dot-key. Where two settings have the same alias, it is that of the later one."""
    return {alias: key for key, field in fields(cls).items() if (alias := setting(field).alias)}


def declared_options(cls: type[Section]) -> dict[str, Option]:
    """The declared options by name, completed with the type and the description of their settings."""
    found: dict[str, Option] = {}
    for key, field in fields(cls).items():
        declared = setting(field)
        if option := declared.option:
            sentence = (field.description or "").partition(DEFAULT)[0]
            found[declared.alias or key] = option._replace(
                metavar=option.metavar or "|".join(words(field.annotation)),
                help=option.help or f"{sentence[0].upper()}{sentence[1:]}.",
                is_open=is_switch(field) and field.get_default() is None,
            )
    return found


def words(kind: Any) -> list[str]:
    """The words that are values of a type; empty for a type with other values only."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return [*kind]
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [word for part in get_args(kind) for word in words(part)]


def stays_inside(field: FieldInfo) -> bool:
    """Whether a setting reads, writes and sends nothing outside of the folder in which a program runs."""
    declared = setting(field).stays_inside
    return _is_closed(field.annotation) if declared is None else declared


def _is_closed(kind: Any) -> bool:
    """Whether a type has no values but numbers, switches, declared words and None."""
    if isinstance(kind, TypeVar):
        return _is_closed(kind.__default__)
    if isinstance(kind, type):
        return issubclass(kind, int | float | StrEnum | type(None))
    parts = get_args(kind)
    if get_origin(kind) is Literal or kind is None:
        return True
    if get_origin(kind) is Annotated:
        return _is_closed(parts[0])
    return get_origin(kind) in (Union, UnionType) and all(map(_is_closed, parts))


def is_switch(field: FieldInfo) -> bool:
    """Whether a setting can be true or false."""
    return bool in (field.annotation, *get_args(field.annotation))
