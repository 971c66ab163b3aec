"""What the shell offers when the tab key is pressed, beside commands and options: runs, settings, devices, traces.

Nothing here imports torch, reads a run that the cache of the results folder does not hold, or raises an error, which
would be printed in the middle of the command line.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gpubench.zoo import MODELS

if TYPE_CHECKING:
    from gpubench.runs.entries import Entry

STATUSES = ("completed", "failed", "interrupted", "running", "damaged")
NEWEST = 50
"""The number of runs that are offered."""
FEW = 8
"""The number of values of a setting up to which each one is offered."""
TRACES = (".json", ".json.gz")

SAFE = re.compile(r"[\w.,+:/@=~*%-]+")
"""What is offered: the name of a run may come from somebody else, and a shell may evaluate it."""
UNSAFE = re.compile(r"[^\w.,:/ -]")

Offered = list[tuple[str, str]]
"""Texts, each with a help that some shells show."""


def runs(ctx: typer.Context, incomplete: str) -> Offered:
    """Offers `latest`, names and ids, and experiments."""
    return _quietly(lambda: _runs(ctx, incomplete))


def experiments(ctx: typer.Context, incomplete: str) -> Offered:
    return _quietly(lambda: _beginning(incomplete, _experiments(_results(ctx))))


def models(ctx: typer.Context, incomplete: str) -> Offered:
    return _quietly(lambda: _beginning(incomplete, (entry.model for entry in _cached(ctx))))


def tags(ctx: typer.Context, incomplete: str) -> Offered:
    return _quietly(lambda: _beginning(incomplete, (tag for entry in _cached(ctx) for tag in entry.tags)))


def conditions(ctx: typer.Context, incomplete: str) -> Offered:
    """Offers the settings of the runs, each with its values if there are only a few."""
    return _quietly(lambda: _beginning(incomplete, _conditions(ctx)))


def sort_keys(ctx: typer.Context, incomplete: str) -> Offered:
    return _quietly(lambda: _beginning(incomplete, _sort_keys(ctx)))


def metrics(ctx: typer.Context, incomplete: str) -> Offered:
    """Offers the metrics that the runs have."""
    return _quietly(
        lambda: _beginning(incomplete, _main_first(name for entry in _cached(ctx) for name in entry.metrics))
    )


def hosts(ctx: typer.Context, incomplete: str) -> Offered:
    return _quietly(lambda: _beginning(incomplete, (entry.record.host for entry in _cached(ctx))))


def searches(ctx: typer.Context, incomplete: str) -> Offered:
    """Offers the folders of searches by tune, the newest one first."""

    def found() -> Offered:
        from gpubench.foreign_files import SEARCH

        folders = sorted((file.parent for file in _results(ctx).glob(f"*/{SEARCH}")), reverse=True)
        return _beginning(incomplete, map(str, folders))

    return _quietly(found)


def tuned(ctx: typer.Context, incomplete: str) -> Offered:
    """Offers the settings that a search can try, each after those that are already named."""
    named, comma, begun = incomplete.rpartition(",")
    return _quietly(
        lambda: _beginning(incomplete, (f"{named}{comma}{key}" for key in _tuned() if key.startswith(begun)))
    )


def tried(incomplete: str) -> Offered:
    """Offers the settings that a search can try, as KEY=."""
    return _quietly(lambda: _beginning(incomplete, (f"{key}=" for key in _tuned())))


def built_in_models(incomplete: str) -> Offered:
    return _beginning(incomplete, sorted(MODELS))


def devices(incomplete: str) -> Offered:
    """Offers the GPUs whose memory can be predicted."""

    def found() -> Offered:
        from gpubench.hardware import ACCELERATORS

        return [(row.key, row.names[0]) for row in ACCELERATORS if row.key.startswith(incomplete)]

    return _quietly(found)


def traces(incomplete: str) -> Offered:
    """Offers files that may be traces, and folders with a slash after them.

    A single folder is opened, because a shell ends the word after the only thing that is offered.
    """
    return _quietly(lambda: [(path, "") for path in _traces(incomplete)])


def assignments(ctx: typer.Context, incomplete: str) -> Offered:
    """Offers settings as KEY=VALUE, each with its values if there are only a few."""
    return _quietly(lambda: _beginning(incomplete, _assignments(_command(ctx), incomplete)))


def keys(command: str, incomplete: str) -> Offered:
    """Offers the settings of a command as options, such as --training.steps."""

    def found() -> Offered:
        fields = _fields(command)
        return [
            (f"--{key}", field.description or "") for key, field in fields.items() if f"--{key}".startswith(incomplete)
        ]

    return _quietly(found)


def _quietly(find: Callable[[], Offered]) -> Offered:
    try:
        return [(word, UNSAFE.sub(" ", about)) for word, about in find() if SAFE.fullmatch(word)]
    except Exception:  # a completion has nowhere to print an error
        return []


def _beginning(incomplete: str, found: Iterable[str]) -> Offered:
    return [(one, "") for one in dict.fromkeys(found) if one.startswith(incomplete)]


def _results(ctx: typer.Context) -> Path:
    """The results folder on the command line so far, in the environment, or the default one."""
    while ctx:
        if found := ctx.params.get("results"):
            return Path(found)
        ctx = ctx.parent  # type: ignore[assignment]
    return Path(os.environ.get("GPUBENCH_RESULTS") or "results")


def _cached(ctx: typer.Context) -> "Iterator[Entry]":
    from gpubench.runs.catalogue import Catalogue

    return Catalogue(_results(ctx)).cached()


def _runs(ctx: typer.Context, incomplete: str) -> Offered:
    from gpubench.runs.catalogue import Catalogue

    known = Catalogue(_results(ctx))
    about = {entry.run_id: entry for entry in known.cached()}
    found = [("latest", "the newest run")] if known.found else []
    found += [(entry.name, _about(entry)) for entry in about.values() if entry.name]
    for name, part_of in known.found.items():
        run_id = name.rpartition("/")[2]
        if part_of is None or incomplete:
            found.append((run_id, _about(about[run_id]) if run_id in about else ""))
    for experiment in _experiments(known.results):
        found.append((f"{experiment}/latest", "the newest run of the experiment"))
    return list(islice((one for one in found if one[0].startswith(incomplete)), NEWEST))


def _about(entry: "Entry") -> str:
    return f"{entry.command}, {entry.model}, {entry.record.status}"


def _experiments(results: Path) -> list[str]:
    from gpubench.runs.catalogue import Catalogue

    return sorted({name.partition("/")[0] for name in Catalogue(results).found if "/" in name})


def _conditions(ctx: typer.Context) -> Iterator[str]:
    values: dict[str, dict[str, None]] = {}
    for entry in _cached(ctx):
        for key, value in entry.settings.items():
            values.setdefault(key, {})[_as_text(value)] = None
    for key, known in sorted(values.items()):
        for end in (key, key.rpartition(".")[2]):
            yield from (f"{end}={value}" for value in known) if 1 < len(known) <= FEW else (f"{end}=",)


def _as_text(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if not isinstance(value, list) else "*"


def _sort_keys(ctx: typer.Context) -> Iterator[str]:
    from gpubench.runs.selection import WORDS

    yield from WORDS
    for entry in _cached(ctx):
        yield from entry.metrics


def _command(ctx: typer.Context) -> str:
    return ctx.info_name or ""


def _fields(command: str) -> "dict[str, Any]":
    from gpubench.settings.commands import COMMANDS
    from gpubench.settings.field import fields

    return dict(fields(COMMANDS["train-bench" if command == "tune" else command]))


def _main_first(names: Iterable[str]) -> list[str]:
    from gpubench.metrics import LEADERS

    known = dict.fromkeys(names)
    return [*(name for name in LEADERS if name in known), *known]


def _tuned() -> list[str]:
    """The settings that a search by tune has values for."""
    from gpubench.settings.field import setting
    from gpubench.settings.sections import NOT_TUNED, TUNED

    return [key for key, field in _fields("tune").items() if key not in NOT_TUNED and setting(field).role in TUNED]


def _assignments(command: str, incomplete: str) -> Iterator[str]:
    from typing import Literal, get_args, get_origin

    for key, field in _fields(command).items():
        kinds = (field.annotation, *get_args(field.annotation))
        known = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        known += ["true", "false"] if bool in kinds else []
        yield from (f"{key}={value}" for value in known) if known else (f"{key}=",)


def _traces(incomplete: str) -> list[str]:
    folder, name = os.path.split(incomplete)
    found = []
    for entry in sorted(os.scandir(folder or "."), key=lambda one: one.name):
        path = os.path.join(folder, entry.name)  # noqa: PTH118
        if not entry.name.startswith(name) or (entry.name.startswith(".") and not name):
            continue
        if entry.is_dir():
            found.append(f"{path}/")
        elif entry.name.endswith(TRACES):
            found.append(path)
    if len(found) == 1 and found[0].endswith("/"):
        return _traces(found[0])
    return found
