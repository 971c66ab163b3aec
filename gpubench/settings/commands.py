"""The settings class of each command that makes runs, by command; the rows of `gpubench.registry` name them."""

from collections.abc import Mapping
from importlib import import_module

from gpubench.registry import RUN_KINDS
from gpubench.settings.schema import RunSettings


def _named(name: str) -> type[RunSettings]:
    module, _, cls = name.partition(":")
    found: type[RunSettings] = getattr(import_module(module), cls)
    return found


_WORKS = list(dict.fromkeys(kind.work for kind in RUN_KINDS.values()))

COMMANDS: Mapping[str, type[RunSettings]] = {
    kind.command: _named(kind.settings)
    for kind in sorted(RUN_KINDS.values(), key=lambda kind: _WORKS.index(kind.work))  # those of one work together
}
