"""What is made from declarations: the table of the options of settings, and the parts of docs/ that list every option,
every setting and every metric.

python tests/reference.py        # writes the table, and the parts of docs/ into the pages, between two markers

The command line reads the tables as it is imported, so the pages are made by another process once they are written.
"""

import functools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from gpubench.metrics import DEFINITIONS
from gpubench.registry import COMMANDS as MADE_BY
from gpubench.registry import JUDGE, PROGRAM, PROGRAM_MEMORY, PROGRAM_PROFILE, RUN_KINDS, TUNE
from gpubench.settings import field as declared
from gpubench.settings import schema
from gpubench.settings.commands import COMMANDS
from gpubench.settings.field import DEFAULT, aliases, declared_options, fields
from gpubench.settings.loading import canonical
from gpubench.settings.options import Option
from gpubench.settings.roles import Declared
from gpubench.settings.schema import RunSettings
from gpubench.units import listed

RUNS = (*MADE_BY, JUDGE)
"""The commands that run something."""
DOCS = Path(__file__).parents[1] / "docs"
TABLE = Path(schema.__file__).with_name("options.py")
ROWS = "ROWS: list[tuple[str, list[str], Option]] = ["
ROLES_TABLE = Path(schema.__file__).with_name("roles.py")
ROLES = "ROLES: dict[str, Declared] = {"
BEGIN, END = "<!-- made by python tests/reference.py, until the end marker -->", "<!-- end -->"
LARGE = 10**6  # a most from here on says what a type can hold, not what makes sense


PROGRAMS_OWN = ("as the program does", "the program's")
"""The default of a program's settings, in a description and in the table."""


@functools.cache
def commands() -> dict[str, Any]:
    """The command line's own objects, by name."""
    from gpubench.commands import app

    found: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return found


def table() -> str:
    """The module with the options of settings, of which all but the rows is kept."""
    having: dict[tuple[str, Option], list[str]] = {}
    for command in RUNS:
        own = "train-bench" if command in (TUNE, JUDGE) else command
        options: dict[str, Option] = {}
        for kind in [*(kind.command for kind in RUN_KINDS.values() if kind.run_by == own and kind.command != own), own]:
            options |= declared_options(COMMANDS[kind])
        for row in options.items():
            having.setdefault(row, []).append(command)
    rows = []
    for (name, option), commands in having.items():
        declared = ", ".join(f"{key}={value!r}" for key, value in option._asdict().items() if value)
        rows.append(f"    ({name!r}, {commands!r}, Option({declared})),")
    head, begin, _ = TABLE.read_text().partition(ROWS)
    return "\n".join([head + begin, *rows, "]\n"])


def roles() -> str:
    """The module with the roles of settings. One that several commands have counts as that of train-bench."""
    having = {
        key: declared.setting(one) for cls in reversed(list(COMMANDS.values())) for key, one in fields(cls).items()
    }
    rows = []
    for key, one in sorted(having.items()):
        compared = Declared(one.role, tuple(one.depends_on), tuple(one.environment), one.superseded_by)
        given = ", ".join(f"{name}={value!r}" for name, value in compared._asdict().items() if value)
        rows.append(f"    {key!r}: Declared({given}),")
    head, begin, _ = ROLES_TABLE.read_text().partition(ROLES)
    return "\n".join([head + begin, *rows, "}\n"])


def pages() -> dict[Path, Callable[[], str]]:
    """What makes the text that each page should hold between its markers."""
    of_commands = {DOCS / "commands" / f"{name}.md": functools.partial(options, name) for name in commands()}
    return {**of_commands, DOCS / "settings.md": settings, DOCS / "metrics.md": metrics}


def refreshed(page: str, made: str) -> str:
    """Raises ValueError where the page has no two markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"a page needs a line {BEGIN} and a line {END}")
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def options(command: str) -> str:
    """A table of the options of `command` in the order of its help, with the setting that each one sets.

    Those of every command that runs something are in the table of `common_options` alone.
    """
    cls = COMMANDS.get(command)
    common = {_key(one) for one in _common()} if command in RUNS else set()
    lines = (
        ["| option | what it does | setting |", "|---|---|---|"] if cls else ["| option | what it does |", "|---|---|"]
    )
    from gpubench.commands import plain_help

    panels = plain_help.by_panel(commands()[command].params)
    for panel, parameters in panels.items():
        if panel and panel != plain_help.ARGUMENTS:
            lines.append(_row(f"**{panel}**", "", *([""] if cls else [])))
        own = [one for one in parameters if _key(one) not in common]
        lines += [_row(_usage(one), _help(one), *([_setting(cls, one.name)] if cls else [])) for one in own]
        if panel and not own:
            lines.pop()
    for name, inner in getattr(commands()[command], "commands", {}).items():
        lines.append(_row(f"**{command} {name}**", inner.help))
        lines += [_row(_usage(one), _help(one)) for one in inner.params if _key(one) not in common]
    return "\n".join(lines) + "\n"


def common_options() -> str:
    """A table of the options that every command that runs something has."""
    rows = [_row(_usage(one), _help(one), _setting(COMMANDS[RUNS[0]], one.name)) for one in _common()]
    return "\n".join(["| option | what it does | setting |", "|---|---|---|", *rows]) + "\n"


def _common() -> list[Any]:
    first, *others = (commands()[name].params for name in RUNS)
    return [one for one in first if all(_key(one) in map(_key, other) for other in others)]


def _key(parameter: Any) -> tuple[str, str]:
    return _usage(parameter), str(getattr(parameter, "help", ""))


def _row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in escaped)


def _usage(parameter: Any) -> str:
    from gpubench.commands import plain_help

    return ", ".join(f"`{form}`" for form in plain_help.usage(parameter))


def _help(parameter: Any) -> str:
    from gpubench.commands import plain_help

    said, default, variable = plain_help.explanation(parameter)
    return f"{said}{default and f' Default: `{default}`.'}{variable and f' Environment: `{variable}`.'}"


def _setting(cls: type[RunSettings], name: str) -> str:
    key = canonical(cls, name)
    return f"`{key}`" if key in fields(cls) else ""


def metrics() -> str:
    """A table of all metrics with unit, better direction and definition."""
    lines = ["| metric | unit | better | definition |", "|---|---|---|---|"]
    rows = ((f"`{name}`", one.unit, one.better or "", one.meaning) for name, one in DEFINITIONS.items())
    return "\n".join([*lines, *(_row(*row) for row in rows)]) + "\n"


@dataclass(frozen=True)
class Setting:
    key: str
    kind: str
    meaning: str
    chosen: str
    """What the description says of an open default."""


NAMES = {PROGRAM: "a program", PROGRAM_PROFILE: "profile of a program", PROGRAM_MEMORY: "memory of a program"}


def settings() -> str:
    """A table of all settings for each set of commands that have them, with type, default and alias."""
    defaults: dict[Setting, dict[str, str]] = {}
    for command, cls in COMMANDS.items():
        for setting, default in settings_of(cls):
            defaults.setdefault(setting, {})[command] = default
    lines = ["## Options of every command", "", common_options()]
    for group in dict.fromkeys(tuple(by_command) for by_command in defaults.values()):
        lines += [
            f"## {listed(NAMES.get(each, each) for each in group)}",
            "",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
        ]
        rows = [(setting, by_command) for setting, by_command in defaults.items() if tuple(by_command) == group]
        for setting, by_command in sorted(rows, key=lambda row: "." in row[0].key):
            names = ", ".join(f"`{name}`" for name in [setting.key, *_aliases(setting.key, group)])
            lines.append(_row(names, setting.kind, _default(by_command), setting.meaning))
        lines.append("")
    return "\n".join(lines)


def _aliases(key: str, group: Iterable[str]) -> list[str]:
    return sorted({name for command in group for name, meant in aliases(COMMANDS[command]).items() if meant == key})


def _default(by_command: Mapping[str, str]) -> str:
    """One for all commands, or each one with the commands that have it."""
    if len(set(by_command.values())) == 1:
        return next(iter(by_command.values()))
    commands: dict[str, list[str]] = {}
    for command, default in by_command.items():
        commands.setdefault(default or "none", []).append(NAMES.get(command, command))
    return "; ".join(f"{default} ({', '.join(names)})" for default, names in commands.items())


def settings_of(cls: type[RunSettings]) -> Iterator[tuple[Setting, str]]:
    schema = cls.model_json_schema()
    for key, field in fields(cls).items():
        default = field.get_default()
        meaning, _, chosen = (field.description or "").partition(DEFAULT)
        chosen = chosen.replace(*PROGRAMS_OWN)
        if default in (None, "", {}):
            shown = chosen
        else:
            meaning, shown = field.description or "", f"`{_plain(default)}`"
        yield Setting(key, _kind(_leaf(schema, key), schema), meaning, chosen), shown


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _leaf(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    node: Mapping[str, Any] = schema
    for name in key.split("."):
        node = _followed(node, schema)["properties"][name]
    return node


def _followed(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`node`, or what it refers to."""
    reference = node.get("$ref", "")
    return schema["$defs"][reference.rpartition("/")[2]] if reference else node


def _kind(node: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A type of JSON Schema in a few words."""
    if "anyOf" in node:
        return _listed_kinds(_kind(one, schema) for one in node["anyOf"] if one.get("type") != "null")
    node = _followed(node, schema)
    if "enum" in node or "const" in node:
        return ", ".join(f"`{one}`" for one in node.get("enum", [node.get("const")]))
    words = {
        "integer": "integer",
        "number": "number",
        "boolean": "`true`, `false`",
        "string": "text",
        "object": "mapping",
    }
    kind = "path" if node.get("format") == "path" else words[node["type"]]
    return f"{kind} {', '.join(_bounds(node))}".rstrip()


def _listed_kinds(kinds: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(kinds))


def _bounds(node: Mapping[str, Any]) -> Iterator[str]:
    words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    for name, sign in words.items():
        if name in node and (sign.startswith(">") or node[name] < LARGE):
            yield f"{sign} {node[name]:.12g}"


PAGES = "pages"


def main(arguments: Sequence[str]) -> None:
    if arguments == [PAGES]:
        for path, make in pages().items():
            path.write_text(refreshed(path.read_text(), make()))
        return
    TABLE.write_text(table())
    ROLES_TABLE.write_text(roles())
    subprocess.run([sys.executable, __file__, PAGES], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
