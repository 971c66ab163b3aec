"""Loads settings from their sources: defaults < preset or file < `GPUBENCH_*` environment < command line.

Every source is flattened to dot-keys and overrides the one before it. The result is validated once into a frozen
model that does not read the environment again.
"""

import difflib
import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, get_args

import yaml
from pydantic import ValidationError

from gpubench import foreign_files
from gpubench.configs import presets
from gpubench.errors import SettingsError, UsageError, alike, did_you_mean, offer
from gpubench.foreign_files import RUN, TRIALS
from gpubench.ranks import launched_by_torchrun
from gpubench.registry import NOT_OF_PROGRAMS, OF_PROGRAMS, kind_of
from gpubench.settings import yaml_text
from gpubench.settings.callables import ARGUMENTS
from gpubench.settings.commands import COMMANDS
from gpubench.settings.field import Conflict, aliases, declared_key, fields, is_switch, setting
from gpubench.settings.keys import (
    COMMAND_LINE,
    ENVIRONMENT_PREFIX,
    FILLED_IN,
    flatten,
    in_words,
    naming_origins,
    nest,
    with_origins,
)
from gpubench.settings.schema import CompletedSettings, RunSettings
from gpubench.surrogates import is_text, without_surrogates
from gpubench.units import listed

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


NEGATION = re.compile(r"(^|\.)no")
SHOWN_BY = "--print-config shows every setting"
LIMITS = {"greater_than_equal": "ge", "less_than_equal": "le"}
"""The errors of pydantic about a number beyond a limit that is itself allowed, and what they call the limit."""
KINDS_OF_VALUES = {
    "int_parsing": ("it is a whole number", "20"),
    "float_parsing": ("it is a number", "0.5"),
    "bool_parsing": ("it is true or false", "true"),
}
"""The errors of pydantic about text that is no value of its type: what it is, and an example without a default."""


def canonical(cls: type[RunSettings], key: str) -> str:
    """The dot-key of an alias; any other key is returned unchanged."""
    return aliases(cls).get(key, key)


@cache
def negations(cls: type[RunSettings]) -> Mapping[str, str]:
    """Maps the negations of boolean settings to dot-keys: {"profiling.no_modules": "profiling.modules"}.

    The `no_` precedes the last name or the section. It may precede the last name alone, or an alias, where no other
    such setting has that name. A setting's own name is not a negation.
    """
    switches = [key for key, field in fields(cls).items() if is_switch(field)]
    short = Counter(key.rpartition(".")[2] for key in switches)
    found: dict[str, str] = {}
    for key in switches:
        head, dot, leaf = key.rpartition(".")
        names = [f"{head}{dot}no_{leaf}", f"no_{key}", *[f"no_{leaf}"] * (short[leaf] == 1)]
        found |= dict.fromkeys(names, key)
    found |= {f"no_{alias}": key for alias, key in aliases(cls).items() if key in switches}
    return {name: key for name, key in found.items() if name not in fields(cls) and name not in aliases(cls)}


def section(cls: type[RunSettings], name: str) -> list[str]:
    """The dot-keys in the section of this name; empty if the command has no such section."""
    return [key for key in fields(cls) if key.startswith(f"{name}.")]


def inside(cls: type[RunSettings], key: str) -> list[str]:
    """The dot-keys in a section, or an example of an entry of a mapping; empty for a setting with a value."""
    return [f"{key}.NAME=VALUE"] if key in fields(cls) and declared_key(cls, key) is None else section(cls, key)


def owners(key: str) -> list[str]:
    """The commands that have a setting with this dot-key or alias."""
    return [command for command, cls in COMMANDS.items() if declared_key(cls, canonical(cls, key))]


def same_work(cls: type[RunSettings], other: type[RunSettings]) -> bool:
    """Whether two commands run the same kind of work: training, sampling, or a program of the user."""
    return kind_of(cls.command).work == kind_of(other.command).work


ALIKE = (
    0.5  # the likeness of two names of settings, without their section, from which on one may be a slip for the other
)


def nearest(cls: type[RunSettings], key: str, *, negated: bool = False) -> str | None:
    """The valid key or alias closest to `key`; in a section that only other commands have, closest there.

    `negated` includes negations, if `key` looks like one.
    """
    name, dot, leaf = key.rpartition(".")
    if dot and not section(cls, name):
        cls = next((other for other in COMMANDS.values() if section(other, name)), cls)
    known = [*fields(cls), *aliases(cls), *(negations(cls) if negated and NEGATION.search(key) else ())]
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    close: list[str] = difflib.get_close_matches(key, known, n=1)
    if dot:  # what two names share may be their section alone, as in training.lr and training.steps
        close = [one for one in close if _likeness(leaf, one) >= ALIKE or key.startswith(f"{one}.")]
    alike = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1)]
    if close and alike and _likeness(leaf, alike[0]) > _likeness(leaf, close[0]):
        close = alike  # the same section with another name is further from what was meant: work.seeds, work.samples
    return next(iter(close + alike), None)


def _likeness(leaf: str, key: str) -> float:
    return difflib.SequenceMatcher(None, leaf, key.rpartition(".")[2]).ratio()


def suggestion(offered: str | None) -> str:
    return offer([offered]) if offered else f"{SHOWN_BY}; --help the common ones"


def is_of_a_run(path: Path) -> bool:
    return path.with_name(RUN).exists()


def writer_of(path: Path) -> str | None:
    """The command of the run that a file belongs to; None for other files, or if it is not recorded."""
    try:
        record = json.loads(foreign_files.content(path.with_name(RUN)))
    except (OSError, ValueError, RecursionError):
        return None
    written = record.get("command") if isinstance(record, dict) else None
    return written if isinstance(written, str) and written in COMMANDS else None


def reproduces(cls: type[RunSettings], path: Path) -> bool:
    """Whether the file is of a run of the same command, or of an unknown one, so that it is reproduced."""
    return is_of_a_run(path) and (writer_of(path) or cls.command) == cls.command


def applicable(cls: type[RunSettings], values: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    """The settings in the file `path`, called `name` by the user, that concern the command of `cls`.

    It leaves out settings that only a similar command has, and the defaults of another command where they differ from
    this command's. Raises SettingsError for a run that this command cannot run.
    """
    writer = COMMANDS[writer_of(path) or cls.command]
    if not same_work(cls, writer):
        message = f"{name} is of a run of {writer.command}, which {cls.command} cannot run"
        command = kind_of(writer.command).run_by
        raise SettingsError(message, f"gpubench {command} --config {name}")
    own = {key: value for key, value in values.items() if not _is_of_another(cls, key, value)}
    if writer.command == cls.command:
        return own
    if "experiment" in own:
        own["experiment"] = _untried(writer, str(own["experiment"]))
    return {key: value for key, value in own.items() if not _is_default(writer, cls, key, value)}


def _untried(writer: type[RunSettings], experiment: str) -> str:
    """The experiment whose fixes this one tried, or the writer's default if that is a command's default."""
    base = experiment.removesuffix(TRIALS) or experiment
    defaults = {cls: fields(cls)["experiment"].get_default() for cls in COMMANDS.values()}
    return str(defaults[writer]) if base != experiment and base in defaults.values() else base


def _is_of_another(cls: type[RunSettings], key: str, value: Any) -> bool:
    """Whether only a similar command has the key, which is a setting or an empty section."""
    empty = value is None and not section(cls, key)
    having = owners(key) or [command for command, other in COMMANDS.items() if empty and section(other, key)]
    return cls.command not in having and any(same_work(cls, COMMANDS[command]) for command in having)


def _is_default(writer: type[RunSettings], reader: type[RunSettings], key: str, value: Any) -> bool:
    """Whether the value is the writer's default but not the reader's."""
    theirs, ours = (fields(cls).get(canonical(cls, key)) for cls in (writer, reader))
    if theirs is None or ours is None:
        return False
    return bool(value == theirs.get_default() != ours.get_default())


VS = "--vs"
OPPOSITE = {"true": "false", "false": "true"}
MOST_BYTES = 2**20  # largest size of a file of settings

S = TypeVar("S", bound=RunSettings)


class Labels(NamedTuple):
    """What a run is called. These are not settings, because a run that is repeated from its config.yaml is another
    one."""

    name: str | None = None
    tags: tuple[str, ...] = ()
    variant: str | None = None
    """What distinguishes the run from the others of its command, if that is not only what was asked of it."""


UNLABELLED = Labels()

C = TypeVar("C", bound=CompletedSettings)


@dataclass(frozen=True)
class Configuration(Generic[S]):
    """Settings, and for each dot-key the source of its value."""

    settings: S
    origins: dict[str, str]
    labels: Labels = UNLABELLED
    """Of the run itself: a configuration derived from this one does not have them."""
    received: str | None = None
    """The origin that is a file, which somebody else may have made; None if there is none, or if the user trusts it.
    See `gpubench.settings.trust`."""

    def with_overrides(self, overrides: Mapping[str, Any], origin: str) -> "Configuration[S]":
        """Changes some keys in a copy. Raises SettingsError as `load` does."""
        given = {key: value for key, value in flatten(self.settings.model_dump()).items() if key in self.origins}
        cls = type(self.settings)
        keys = {canonical(cls, key): value for key, value in overrides.items()}
        origins = self.origins | dict.fromkeys(keys, origin)
        values = given | keys
        settings = validate(cls, values | _recording(cls, keys, values, origins), origins)
        return Configuration(settings, origins, received=self.received)

    def called(self, **labels: Any) -> "Configuration[S]":
        """Changes some of the labels in a copy."""
        return replace(self, labels=self.labels._replace(**labels))

    def takes(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The changes, by dot-key, that concern settings of this command."""
        known = fields(type(self.settings))
        return {key: value for key, value in changes.items() if key in known}

    def to_yaml(self) -> str:
        """Every setting as YAML, with its source as a comment."""
        lines: list[str] = []
        for name, value in without_surrogates(self.settings.model_dump(mode="json")).items():
            if isinstance(value, dict):
                lines.append(f"{name}:")
                lines += [self._line(f"{name}.{key}", key, field, "  ") for key, field in value.items()]
            else:
                lines.append(self._line(name, name, value, ""))
        return "\n".join(lines) + "\n"

    def _line(self, key: str, name: str, value: Any, indent: str) -> str:
        one_line = yaml.safe_dump({name: value}, default_flow_style=False, allow_unicode=True, width=math.inf)
        if isinstance(value, dict):
            one_line = f"{name}: {yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)}"
        entry = indent + one_line.removesuffix("\n")
        keys = [f"{key}.{each}" for each in value] if isinstance(value, dict) else [key]
        origins = dict.fromkeys(self.origins.get(each, "default") for each in keys) or {"default": None}
        return f"{entry:<43} # {', '.join(origins)}"


def load(cls: type[S], config: str | None = None, overrides: Mapping[str, Any] | None = None) -> Configuration[S]:
    """Loads the settings from all sources.

    `config` names a preset or a YAML file; `overrides` are the command line's, by dot-key or alias. A finished run's
    config.yaml is complete, so the environment is left out and the run is reproduced. For another command the file only
    says what was run (see `applicable`), and the environment may set the rest.

    Raises SettingsError for an unknown key at any depth (naming the nearest valid one), a value of the wrong type or
    out of range, and a file that is missing or not YAML.
    """
    layers: list[tuple[str, Mapping[str, Any]]] = []
    path = None if config is None else find_config(config, kind_of(cls.command).run_by)
    if path:
        layers.append((str(config), applicable(cls, read_settings(path), str(config), path)))
    if not (path and reproduces(cls, path)):
        fixed = {canonical(cls, key) for _, layer in layers for key in layer} if path and is_of_a_run(path) else set()
        layers += [(name, layer) for name, layer in environment(cls).items() if fixed.isdisjoint(layer)]
    layers.append((COMMAND_LINE, overrides or {}))

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        keys = _by_key(cls, layer, origin)
        emptied = tuple(f"{key}." for key, value in keys.items() if value is None and inside(cls, key))
        values = {key: value for key, value in values.items() if not key.startswith(emptied)} | keys
        origins |= dict.fromkeys(keys, origin)
    values = _without_nulls(cls, values)
    # What a run recorded is not asked of the run of another command that repeats its work.
    asked = {key: value for key, value in values.items() if not (path and is_of_a_run(path) and origins[key] == config)}
    values |= _recording(cls, asked, values, origins)
    received = config if path and config not in presets() else None
    return Configuration(validate(cls, values, origins), {key: origins[key] for key in values}, received=received)


RECORDED = "profiling.enabled"


def _recording(
    cls: type[RunSettings], asked: Mapping[str, Any], values: Mapping[str, Any], origins: dict[str, str]
) -> dict[str, bool]:
    """Turns the recording on if `asked` says how to record and `values` does not say whether to.

    Adds its origin to `origins`.
    """
    how = [key for key, value in asked.items() if key.startswith("profiling.") and value is not None]
    field = fields(cls).get(RECORDED)
    if not how or values.get(RECORDED) is not None or field is None or field.get_default():
        return {}
    origins[RECORDED] = f"{FILLED_IN}{how[0]} is set"
    return {RECORDED: True}


def complete_all(
    variants: Sequence[Configuration[S]], complete: Callable[[S], tuple[C, dict[str, str]]]
) -> list[Configuration[C]]:
    """Completes the variants that a command runs; see `completed`.

    Raises an error for settings that cannot be run, before a run directory is created.
    """
    for variant in variants:
        _refuse_repeats(variant)
    return refuse_idle([completed(variant, complete) for variant in variants])


def _refuse_repeats(variant: Configuration[Any]) -> None:
    """Raises UsageError for a target precision that cannot decide the number of repeats."""
    precision = variant.settings.measurement.target_precision
    if launched_by_torchrun() and precision is not None:
        message = "a target precision takes fresh processes, which torchrun does not start"
        with naming_origins(variant.origins):
            key = "measurement.target_precision"
            raise UsageError(f"{message}: {key}={precision}", "use --repeats", keys=[key])
    if precision is not None and variant.origins.get("measurement.repeats") == COMMAND_LINE:
        message = f"measurement.repeats={variant.settings.measurement.repeats} has no effect with a target precision"
        hint = "leave one of them out; measurement.max_repeats limits the number of repeats"
        raise UsageError(message, hint, keys=["measurement.repeats"])


def idle(configuration: Configuration[Any]) -> dict[str, str]:
    """The reason, by dot-key, why a given setting has no effect beside the others of a complete configuration."""
    settings = configuration.settings
    cls: type[RunSettings] = type(settings)
    values, found = flatten(settings.model_dump(mode="json")), {}
    for key, field in fields(cls).items():
        if key not in configuration.origins:
            continue
        if key in cls.FIXED:
            if values[key] != cls.FIXED[key]:
                found[key] = f"{kind_of(cls.command).run_by} has only {in_words(cls.FIXED[key])} here"
            continue
        others = setting(field).idle_with if values.get(key) != field.get_default() else None
        decided = [other for other, without in (others or {}).items() if other in values and values[other] in without]
        if decided:
            found[key] = f"{decided[0]} is {in_words(values[decided[0]])}"
    return found


def refuse_idle(runs: list[Configuration[C]]) -> list[Configuration[C]]:
    """Raises SettingsError for a setting from the command line that has an effect in none of the runs.

    A file, a preset or the environment may serve several commands; `Recorder` warns of what is idle in them.
    """
    reasons = [idle(run) for run in runs]
    for key, reason in {key: reason for found in reasons for key, reason in found.items()}.items():
        given = [(run, key in found) for run, found in zip(runs, reasons, strict=True) if key in run.origins]
        if all(is_idle for _, is_idle in given) and {run.origins[key] for run, _ in given} & {COMMAND_LINE, VS}:
            settings = given[-1][0].settings
            value = flatten(settings.model_dump(mode="json"))[key]
            hint = "leave it out" if key in settings.FIXED else f"leave it out, or change {reason.partition(' is ')[0]}"
            raise SettingsError(f"{key}={in_words(value)} has no effect: {reason}", hint, keys=[key])
    return runs


def completed(configuration: Configuration[S], complete: Callable[[S], tuple[C, dict[str, str]]]) -> Configuration[C]:
    """Completes a configuration. The origin of a chosen setting is `FILLED_IN` and the reason.

    `complete` is the command's own function. Its errors pass through, with the origins of the settings.
    """
    configuration = without_training(configuration)
    with naming_origins(configuration.origins):
        settings, reasons = complete(configuration.settings)
    chosen = {key: FILLED_IN + reason for key, reason in reasons.items()}
    return Configuration(settings, configuration.origins | chosen, received=configuration.received)


def without_training(configuration: Configuration[S]) -> Configuration[S]:
    """Resets what only training uses to its defaults in the configuration of a run of inference.

    A preset or a file may describe training as well. Raises SettingsError for such a setting from the command line or
    the environment. A run of training, or of another kind, is returned as it is.
    """
    settings, origins = configuration.settings, configuration.origins
    if not getattr(settings, "inference", False):
        return configuration
    idle = {key: field.get_default() for key, field in fields(type(settings)).items() if setting(field).training_only}
    values = flatten(settings.model_dump())
    changed = {key: default for key, default in idle.items() if values[key] != default}
    asked = [key for key in changed if origins.get(key, "").startswith((COMMAND_LINE, VS, ENVIRONMENT_PREFIX))]
    if asked:
        pronoun = "it" if len(asked) == 1 else "them"
        raise SettingsError(
            with_origins(f"inference does not use {listed(asked)}", asked, origins),
            f"leave {pronoun} out, or measure training without --inference",
            keys=asked,
        )
    kept = {key: origin for key, origin in origins.items() if key not in changed}
    if not changed:
        return configuration
    return Configuration(apply_overrides(settings, changed), kept, received=configuration.received)


def parse_unknown_overrides(arguments: Sequence[str], cls: type[RunSettings] | None = None) -> dict[str, Any]:
    """Parses `--training.epochs=5`, `--training.epochs 5` and a bare `--logging.wandb` (true) into {dot-key: text}.

    With `cls`, a negation such as `--profiling.no-modules` (false) is parsed too; it takes no value: see `negations`.
    Raises UsageError for anything that is not an option.
    """
    overrides: dict[str, Any] = {}
    rest = list(arguments)
    off = negations(cls) if cls else {}
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            raise UsageError(f"unexpected argument {argument!r}", "settings are given as --section.key=value")
        name, equals, value = argument[2:].partition("=")
        key = name.replace("-", "_")
        if key in off:
            if equals and value.lower() not in OPPOSITE:
                raise UsageError(
                    f"--{name} turns {off[key]} off and does not take the value {value!r}", f"give --{name}"
                )
            overrides[off[key]] = OPPOSITE[value.lower()] if equals else "false"
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        overrides[key] = parse_argument(value) if key.startswith(f"{ARGUMENTS}.") else parse_value(value)
    return overrides


def parse_value(value: Any) -> Any:
    """Turns "null" into None and leaves any other text unchanged; the types of the settings parse it."""
    return None if isinstance(value, str) and value.lower() in {"null", "none"} else value


def parse_argument(text: str) -> Any:
    """Parses text into the number, boolean, null or text that it would be in a YAML file."""
    try:
        value = yaml_text.parse(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | str | None) else text


def parse_assignments(cls: type[RunSettings], assignments: Sequence[str]) -> dict[str, Any]:
    """Parses `["precision=fp32"]` into {"precision": "fp32"}. Raises UsageError for a missing `=`."""
    assignments = ["=".join(map(str.strip, one.strip().lstrip("-").split("=", 1))) for one in assignments]
    for assignment in assignments:
        if "=" not in assignment.strip("="):
            key, colon, value = assignment.partition(":")
            example = "for example precision=fp32 or training.batch_size=64"
            hint = offer([f"{key}={value}"]) if colon and value else example
            raise UsageError(f"{assignment!r} is not KEY=VALUE", hint)
    keys = [canonical(cls, assignment.partition("=")[0]) for assignment in assignments]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise UsageError(f"{twice[0]} is changed twice", "give each setting once")
    return parse_unknown_overrides([f"--{assignment}" for assignment in assignments], cls)


def apply_overrides(settings: S, overrides: Mapping[str, Any]) -> S:
    """Changes some dot-keys (or aliases) in a copy. Raises SettingsError as `load` does."""
    keys = {canonical(type(settings), key): value for key, value in overrides.items()}
    values = flatten(settings.model_dump()) | keys
    return validate(type(settings), values, {})


def _by_key(cls: type[RunSettings], layer: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The layer by dot-key. Raises SettingsError if a key and its alias have different values."""
    found: dict[str, Any] = {}
    for name, text in layer.items():
        key, value = canonical(cls, name), parse_value(text)
        if key in found and found[key] != value:
            message = with_origins(f"{key} is {found[key]!r} and {value!r}", [key], {key: origin})
            raise SettingsError(message, "give each setting once", keys=[key])
        found[key] = value
    return found


def _without_nulls(cls: type[RunSettings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Drops sections that are null, and nulls that are not a value of their setting: these have their defaults."""

    def is_default(key: str) -> bool:
        field = fields(cls).get(key)
        if field is None or declared_key(cls, key) is None:
            return bool(inside(cls, key))
        return field.get_default() is not None and type(None) not in get_args(field.annotation)

    return {key: value for key, value in values.items() if value is not None or not is_default(key)}


def validate(cls: type[S], values: Mapping[str, Any], origins: Mapping[str, str]) -> S:
    """Makes settings of these values by dot-key; a null that is not a value of its setting stands for the default.

    Raises SettingsError with the origins of those at fault.
    """
    values = _without_nulls(cls, values)
    refuse_unknown(cls, values, origins)
    if unreadable := [key for key, value in values.items() if isinstance(value, str | Path) and not is_text(value)]:
        message = f"{unreadable[0]} = {str(values[unreadable[0]])!r} is not UTF-8, as a configuration is"
        hint = "rename it, or start gpubench in its folder and give a relative path"
        raise SettingsError(with_origins(message, unreadable[:1], origins), hint, keys=unreadable)
    try:
        return cls.model_validate(nest(values))
    except ValidationError as error:
        found = [_describe(cls, problem) for problem in _by_setting(cls, error.errors(include_url=False))]
    messages = [with_origins(message, keys, origins) for message, keys, _ in found]
    hint = next((hint for _, _, hint in found if hint), SHOWN_BY)
    raise SettingsError("; ".join(messages), hint, keys=[key for _, keys, _ in found for key in keys])


def _by_setting(cls: type[RunSettings], problems: Sequence["ErrorDetails"]) -> list["ErrorDetails"]:
    """Merges the problems of each setting: of one with several types, pydantic reports a problem with each type."""
    found = dict[tuple[int | str, ...], "ErrorDetails"]()
    for problem in problems:
        if problem["type"] == "none_required":  # reported of every setting that may be open, beside what is wrong
            continue
        parts = problem["loc"]  # after the setting come the types that the value does not have
        longest_first = (parts[:end] for end in range(len(parts), 0, -1))
        place = next((one for one in longest_first if declared_key(cls, ".".join(map(str, one)))), parts)
        if earlier := found.get(place):
            also = problem["msg"].removeprefix("Input should be ")
            problem = {**problem, "msg": f"{earlier['msg']}, or {also}"}
        found[place] = {**problem, "loc": place}
    return list(found.values())


OTHER_WORDS = {
    **dict.fromkeys(("fp16", "float16", "half", "16", "f16", "16-mixed"), ("fp16", "amp")),
    **dict.fromkeys(("bfloat16", "bf16-mixed"), ("bf16",)),
    **dict.fromkeys(("float32", "float", "full", "32", "f32"), ("fp32",)),
    **dict.fromkeys(("gpu", "nvidia", "auto"), ("cuda",)),
    "mixed": ("amp",),
}
"""Values of other tools, and those of gpubench that mean the same; of several, the first that a setting has."""
SEVERAL, THOUSANDS = re.compile(r"[\w.-]+(,[\w.-]+)+,?"), re.compile(r"\d{1,3}(,\d{3})+")
TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|sec|secs|seconds?|m|min|mins|minutes?)")
GPU_NUMBER = re.compile(r"(?:cuda:|gpu:?)?(\d+)")
NOT_FINITE = frozenset({"nan", "inf", "infinity"})
WHAT_TO_DO = re.compile(": (?=did you mean |write )")
"""What the error of a value has between what is wrong and its hint."""


def _describe(cls: type[RunSettings], problem: "ErrorDetails") -> tuple[str, Sequence[str], str]:
    """The message of one of pydantic's errors, the dot-keys that it is about, and a hint or ""."""
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    message, hint = (*WHAT_TO_DO.split(message, maxsplit=1), "")[:2]
    if problem["type"] == "value_error":
        error = problem["ctx"]["error"]
        return (message, error.keys, hint) if isinstance(error, Conflict) else (f"{key}: {message}", [key], hint)
    if problem["type"] == "string_pattern_mismatch":
        message = "should be a plain folder name, without '/' and not beginning with '.'"
    return f"{key} = {problem['input']!r}: {message}", [key], hint or _meant(cls, problem)


def _meant(cls: type[RunSettings], problem: "ErrorDetails") -> str:
    """The hint for a value that is not allowed: the value that was perhaps meant, or one that is allowed; "" for none.

    A number beyond a limit may have been meant as the limit.
    """
    given = str(problem["input"]).strip()
    if SEVERAL.fullmatch(given) and not THOUSANDS.fullmatch(given):
        key = ".".join(map(str, problem["loc"]))
        return f"give one value; several are tried by: gpubench tune --try {key}={given.rstrip(',')}"
    if problem["loc"] == ("training", "steps") and (time := TIME.fullmatch(given)):
        seconds = float(time[1]) * (60 if time[2].startswith("m") else 1)
        return (
            offer([f"--seconds {seconds:g}"])
            if declared_key(cls, "training.seconds")
            else "it counts steps: --steps 20"
        )
    if problem["type"] == "int_parsing":
        given = TIME.sub(r"\1", given)
        with suppress(ValueError, OverflowError):
            number = float(given.replace(",", ""))
            return offer([str(int(number))]) if number == int(number) else ""
    if (limit := LIMITS.get(problem["type"])) and given.casefold().lstrip("+-") not in NOT_FINITE:
        return offer([f"{problem['ctx'][limit]:.12g}"])
    if kind := KINDS_OF_VALUES.get(problem["type"]):
        default = fields(cls)[".".join(map(str, problem["loc"]))].get_default()
        what, example = kind
        return f"{what}, such as {example if default is None else str(default).lower()}"
    if problem["type"] not in ("literal_error", "enum"):
        return ""
    known = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
    if "cuda" in known and (index := GPU_NUMBER.fullmatch(given)):
        return f"{offer(['cuda'])} CUDA_VISIBLE_DEVICES={index[1]} before the command chooses the GPU"
    other = [word for word in OTHER_WORDS.get(given.casefold(), ()) if word in known]
    return offer(other[:1] or alike(given, known)) or f"for example {known[0]}"


def refuse_unknown(cls: type[RunSettings], values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    for key in (key for key in values if declared_key(cls, key) is None):
        if keys := inside(cls, key):
            message = f"{key} = {values[key]!r}: a section of settings takes no value"
            hint = f"for example {keys[0]}"
        elif (others := owners(key)) and cls.command in OF_PROGRAMS and not set(others) <= OF_PROGRAMS:
            message = f"{key!r} is a setting of {listed(others)}, and a program has its own"
            hint = NOT_OF_PROGRAMS
        elif others:
            named = [other for other in others if other not in OF_PROGRAMS]
            named = named or ["train-bench -- PROGRAM"]
            message = f"{key!r} is a setting of {listed(named)}, not of {kind_of(cls.command).run_by}"
            hint = f"leave it out, or use gpubench {named[0]}"
        else:
            message = f"unknown setting {key!r}"
            offered = nearest(cls, key, negated=origins.get(key) in (None, COMMAND_LINE))
            hint = suggestion(offered)
            if origins.get(key) == VS and cls.command in OF_PROGRAMS:
                argument = shlex.quote(f"--{key.rpartition('.')[2]} {values[key]}")
                hint = (
                    f"{hint if offered else ''} an argument of the program is changed by --vs-args {argument}".strip()
                )
        raise SettingsError(with_origins(message, [key], origins), hint, keys=[key])


OTHER_FILES = {
    ".py": ("a program", "a program comes after --: gpubench {command} -- python {path}"),
    ".sh": ("a program", "a program comes after --: gpubench {command} -- bash {path}"),
    ".ipynb": ("a notebook", "gpubench {command} -- jupyter nbconvert --to notebook --execute {path}"),
    ".pickle": ("a pickle", "gpubench memory --snapshot {path} reads a snapshot of memory"),
    ".pkl": ("a pickle", "gpubench memory --snapshot {path} reads a snapshot of memory"),
}
"""Files that are not settings, by the ends of their names: what they are, and what reads them."""


def find_config(name: str, command: str = "train-bench") -> Path:
    """Finds a preset or a settings file for a command.

    Raises SettingsError with the nearest preset if there is none, and for a file of another kind with what reads it.
    """
    known = presets()
    if name in known:
        return Path(str(files("gpubench.configs"))) / f"{name}.yaml"
    if os.path.isfile(name):  # noqa: PTH113 - Path's own raises for a name too long or a folder out of bounds
        kind, hint = OTHER_FILES.get(Path(name).suffix, ("", ""))
        if kind:
            raise SettingsError(f"{name} is {kind}, not a file of settings", hint.format(command=command, path=name))
        return Path(name)
    if found := _configs_in(name):
        raise SettingsError(f"{name!r} is a folder, not a file of settings", offer(found))
    if name.startswith("latest"):
        raise SettingsError(
            f"no preset or file {name!r}",
            f"give the config.yaml of the run; gpubench runs show {name} names its directory",
        )
    beside = _configs_in(os.path.dirname(name) or ".")  # noqa: PTH120
    if near := alike(name, [one.removeprefix("./") for one in beside], cutoff=0.8):
        raise SettingsError(f"no preset or file {name!r}", offer(near))
    hint = f"{did_you_mean(name, known)} presets are {', '.join(known)}".lstrip()
    raise SettingsError(f"no preset or file {name!r}", hint)


def _configs_in(folder: str) -> list[str]:
    """The first few YAML files in a folder; empty if there is no such folder."""
    with suppress(OSError, ValueError):
        names = sorted(name for name in os.listdir(folder) if name.endswith((".yaml", ".yml")))  # noqa: PTH208
        return [os.path.join(folder, name) for name in names[:3]]  # noqa: PTH118
    return []


A_TRACE = "gpubench profile --trace {path} reads a trace"
OF_A_TRACE = "traceEvents"
"""The key by which a trace is recognised, which may have the suffix of a file of settings."""


def read_settings(path: Path) -> dict[str, Any]:
    """Reads a YAML file as {dot-key: value}. Raises SettingsError if it is not a mapping."""
    return flatten(read_yaml(path))


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml_text.parse(foreign_files.content(path, MOST_BYTES))
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        hint = A_TRACE.format(path=path) if ".json" in path.suffixes else "--print-config shows one that can"
        raise SettingsError(f"{path} cannot be read as YAML: {reason}", hint) from None
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise SettingsError(f"{path} is not a mapping of settings", "write 'section:' and under it 'key: value'")
    if OF_A_TRACE in document:
        raise SettingsError(f"{path} is a trace, not a file of settings", A_TRACE.format(path=path))
    return document


def variables_of_settings(*classes: type[RunSettings]) -> dict[str, str]:
    """Maps the dot-key that each `GPUBENCH_*` variable sets to the variable.

    Raises SettingsError for a variable that names no setting of any command, because one with an error would be
    ignored. Its hint is the nearest setting of the first of `classes` that has one alike.
    """
    variables = {}
    for name in os.environ:
        if name.upper().startswith(ENVIRONMENT_PREFIX):
            key = name[len(ENVIRONMENT_PREFIX) :].lower().replace("__", ".")
            # the environment may serve several commands
            if not any(declared_key(command, key) for command in COMMANDS.values()):
                raise SettingsError(f"unknown setting in environment variable {name}", _nearest_variable(classes, key))
            variables[key] = name
    return variables


def _nearest_variable(classes: Iterable[type[RunSettings]], key: str) -> str:
    for cls in classes:
        if offered := nearest(cls, key):
            if canonical(cls, offered) == key:  # a mapping, which takes no value itself
                return f"it has no value itself; for example {variable_of(inside(cls, key)[0])}"
            return suggestion(variable_of(canonical(cls, offered)))
    return suggestion(None)


def environment(cls: type[RunSettings]) -> dict[str, dict[str, Any]]:
    """Maps each `GPUBENCH_SECTION__KEY` variable that concerns the command to the dot-key that it sets, with its value.

    Case does not matter. Raises SettingsError as `variables_of_settings` does.
    """
    from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
    from pydantic_settings import SettingsError as SourceError

    variables = variables_of_settings(cls)

    class Sources(BaseSettings, cls):  # type: ignore[misc, valid-type]
        model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__")

    try:
        found = flatten(EnvSettingsSource(Sources)())
    except SourceError as error:
        raise SettingsError(f"environment: {error}", SHOWN_BY) from None
    found |= {
        key: parse_argument(os.environ[name]) for key, name in variables.items() if key.startswith(f"{ARGUMENTS}.")
    }
    return {variables[key]: {key: value} for key, value in found.items() if declared_key(cls, key)}


def variable_of(key: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{key.upper().replace('.', '__')}"
