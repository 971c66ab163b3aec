"""Where settings come from: defaults < preset or file < `GPUBENCH_*` environment < command line.

Every source is flattened to dot-keys, laid over the one before it, and the result is validated once into a plain
frozen model that never looks at the environment again.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import ValidationError

from gpubench import foreign_files, yaml_text
from gpubench.configs import presets
from gpubench.dotkeys import flatten, nest
from gpubench.errors import SettingsError, UsageError, did_you_mean, offer
from gpubench.origins import COMMAND_LINE, source, told
from gpubench.run_settings import is_of_a_run, repeats, taken
from gpubench.setting_keys import COMMANDS, SHOWN_BY, canonical, command_of, fields, nearest, negations, owners, section
from gpubench.settings import RunSettings
from gpubench.units import listed

ENVIRONMENT_PREFIX = "GPUBENCH_"
OPPOSITE = {"true": "false", "false": "true"}
MOST_BYTES = 2**20  # of a file of settings

S = TypeVar("S", bound=RunSettings)


@dataclass(frozen=True)
class Configuration(Generic[S]):
    """Settings, and for each dot-key the source that had the last word."""

    settings: S
    origins: dict[str, str]

    def with_overrides(self, overrides: Mapping[str, Any], origin: str) -> "Configuration[S]":
        """A copy with some keys changed. Raises SettingsError as `load` does."""
        given = {key: value for key, value in flatten(self.settings.model_dump()).items() if key in self.origins}
        cls = type(self.settings)
        keys = {canonical(cls, key): value for key, value in overrides.items()}
        origins = self.origins | dict.fromkeys(keys, origin)
        return Configuration(validate(cls, given | keys, origins), origins)

    def to_yaml(self) -> str:
        """Every setting, with the source of each as a comment."""
        lines: list[str] = []
        for name, value in self.settings.model_dump(mode="json").items():
            if isinstance(value, dict):
                lines.append(f"{name}:")
                lines += [self._line(f"{name}.{key}", key, field, "  ") for key, field in value.items()]
            else:
                lines.append(self._line(name, name, value, ""))
        return "\n".join(lines) + "\n"

    def _line(self, key: str, name: str, value: Any, indent: str) -> str:
        one_line = yaml.safe_dump({name: value}, default_flow_style=False, allow_unicode=True, width=math.inf)
        entry = indent + one_line.removesuffix("\n")
        return f"{entry:<43} # {self.origins.get(key, 'default')}"


def load(cls: type[S], config: str | None = None, overrides: Mapping[str, Any] | None = None) -> Configuration[S]:
    """Settings from all sources.

    `config` names a preset or a YAML file; `overrides` are the command line's, by dot-key or alias. A finished run's
    config.yaml is complete, so the environment is left out and the run is reproduced; to another command it says what
    was run (see `run_settings.taken`), and the environment has a say in the rest.

    Raises SettingsError for an unknown key at any depth (naming the nearest valid one), a value of the wrong type or
    out of range, and a file that is missing or not YAML.
    """
    layers: list[tuple[str, Mapping[str, Any]]] = []
    path = None if config is None else find_config(config)
    if path:
        layers.append((str(config), taken(cls, read_settings(path), str(config), path)))
    if not (path and repeats(cls, path)):
        said = {canonical(cls, key) for _, layer in layers for key in layer} if path and is_of_a_run(path) else set()
        layers += [(name, layer) for name, layer in environment(cls).items() if said.isdisjoint(layer)]
    layers.append((COMMAND_LINE, overrides or {}))

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        keys = _by_key(cls, layer, origin)
        values |= keys
        origins |= dict.fromkeys(keys, origin)
    return Configuration(validate(cls, values, origins), origins)


def parse_unknown_overrides(arguments: Sequence[str], cls: type[RunSettings] | None = None) -> dict[str, Any]:
    """`--training.epochs=5`, `--training.epochs 5` and a bare `--logging.wandb` (true) as {dot-key: text}; of the
    command of `cls` also `--profiling.no-modules` (false), which takes no value: see `setting_keys.negations`.

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
                raise UsageError(f"--{name} turns {off[key]} off, and {value!r} says nothing of that", f"give --{name}")
            overrides[off[key]] = OPPOSITE[value.lower()] if equals else "false"
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        overrides[key] = parse_value(value)
    return overrides


def parse_value(value: Any) -> Any:
    """Text that says null is None; the settings' types make sense of all other."""
    return None if isinstance(value, str) and value.lower() in {"null", "none"} else value


def parse_assignments(cls: type[RunSettings], assignments: Sequence[str]) -> dict[str, Any]:
    """`["precision=fp32"]` as {"precision": "fp32"}. Raises UsageError where the `=` is missing."""
    for assignment in assignments:
        if "=" not in assignment.strip("="):
            raise UsageError(f"{assignment!r} is not KEY=VALUE", "for example precision=fp32 or training.batch_size=64")
    keys = [canonical(cls, assignment.partition("=")[0]) for assignment in assignments]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise UsageError(f"{twice[0]} is changed twice", "give each setting once")
    return parse_unknown_overrides([f"--{assignment}" for assignment in assignments], cls)


def apply_overrides(settings: S, overrides: Mapping[str, Any]) -> S:
    """`settings` with some dot-keys (or aliases) changed. Raises SettingsError as `load` does."""
    keys = {canonical(type(settings), key): value for key, value in overrides.items()}
    values = flatten(settings.model_dump()) | keys
    return validate(type(settings), values, {})


def _by_key(cls: type[RunSettings], layer: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Raises SettingsError for a setting that has one value by its key and another by its alias."""
    found: dict[str, Any] = {}
    for name, text in layer.items():
        key, value = canonical(cls, name), parse_value(text)
        if key in found and found[key] != value:
            raise SettingsError(f"{key} is {found[key]!r} and {value!r}{source(origin)}", "give each setting once")
        found[key] = value
    return found


def validate(cls: type[S], values: Mapping[str, Any], origins: Mapping[str, str]) -> S:
    refuse_unknown(cls, values, origins)
    try:
        return cls.model_validate(nest(values))
    except ValidationError as error:
        problems = [_describe(problem, origins) for problem in error.errors(include_url=False, include_context=False)]
        raise SettingsError("; ".join(problems), SHOWN_BY) from None


def refuse_unknown(cls: type[RunSettings], values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raises SettingsError for a dot-key that the command has not."""
    known = fields(cls)
    for key in (key for key in values if key not in known):
        origin = source(origins.get(key))
        if inside := section(cls, key):
            said = f"{key} = {values[key]!r}: a section of settings takes no value{origin}"
            raise SettingsError(said, f"for example {inside[0]}")
        if others := owners(key):
            said = f"{key!r} is a setting of {listed(others)}, not of {command_of(cls)}{origin}"
            raise SettingsError(said, f"leave it out, or use gpubench {others[0]}")
        typed = origins.get(key) in (None, COMMAND_LINE)
        raise SettingsError(f"unknown setting {key!r}{origin}", nearest(cls, key, negated=typed))


def find_config(name: str) -> Path:
    """The file of a preset, or the file itself. Raises SettingsError naming the nearest preset."""
    known = presets()
    if name in known:
        return Path(str(files("gpubench.configs"))) / f"{name}.yaml"
    if os.path.isfile(name):  # noqa: PTH113 - Path's own raises for a name too long or a folder out of bounds
        return Path(name)
    hint = f"{did_you_mean(name, known)} presets are {', '.join(known)}".lstrip()
    raise SettingsError(f"no preset or file {name!r}", hint)


def read_settings(path: Path) -> dict[str, Any]:
    """A YAML file, flattened."""
    return flatten(read_yaml(path))


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml_text.parse(foreign_files.content(path, MOST_BYTES))
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{path} cannot be read as YAML: {reason}", "--print-config shows one that can") from None
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise SettingsError(f"{path} is not a mapping of settings", "write 'section:' and under it 'key: value'")
    return document


def environment(cls: type[RunSettings]) -> dict[str, dict[str, Any]]:
    """For each `GPUBENCH_SECTION__KEY` variable that concerns the command, the dot-key that it sets and its value.

    Capitals or not is the same. Raises SettingsError for a variable that names no setting of any command:
    pydantic-settings would pass over it in silence.
    """
    from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
    from pydantic_settings import SettingsError as SourceError

    variables = {}
    for name in os.environ:
        if name.upper().startswith(ENVIRONMENT_PREFIX):
            key = name[len(ENVIRONMENT_PREFIX) :].lower().replace("__", ".")
            if not any(key in fields(command) for command in COMMANDS.values()):  # the environment is not made for one
                hint = _variable(cls, nearest(cls, key))
                raise SettingsError(f"unknown setting in environment variable {name}", hint)
            variables[key] = name

    class Sources(BaseSettings, cls):  # type: ignore[misc, valid-type]
        model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__")

    try:
        found = flatten(EnvSettingsSource(Sources)())
    except SourceError as error:
        raise SettingsError(f"environment: {error}", SHOWN_BY) from None
    own = fields(cls)
    return {variables[key]: {key: value} for key, value in found.items() if key in own}


def _variable(cls: type[RunSettings], hint: str) -> str:
    quoted = hint.split("'")
    if len(quoted) != 3:
        return hint
    return offer([f"{ENVIRONMENT_PREFIX}{canonical(cls, quoted[1]).upper().replace('.', '__')}"])


def _describe(problem: Any, origins: Mapping[str, str]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    message: str = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if problem["type"] == "value_error":
        return f"{key}: {message}{source(origins[key])}" if key in origins else told(message, origins)
    if problem["type"] == "string_pattern_mismatch":
        message = "should be a plain folder name, without '/' and not beginning with '.'"
    return f"{key} = {problem['input']!r}: {message}{source(origins.get(key))}"
