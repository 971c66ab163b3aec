"""The registry of the kinds of runs: every row names what there is."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import pytest

from gpubench.registry import PROBE, RUN_KINDS, RunKind, kind_of
from gpubench.report.kind_report import KindReport
from gpubench.report.sweep import Sweep
from gpubench.settings.commands import COMMANDS

KINDS = pytest.mark.parametrize("kind", RUN_KINDS.values(), ids=RUN_KINDS)


def lacking(module: str, protocol: Any) -> set[str]:
    """Returns the members of the protocol that the module has not."""
    wanted = {name for name in vars(protocol) if not name.startswith("_")}
    assert wanted
    return {name for name in wanted if not hasattr(import_module(module), name)}


class Headline(Protocol):
    def describe(self) -> str: ...

    def model(self) -> str: ...


@KINDS
def test_what_a_row_names_has_all_that_is_asked_of_it(kind: RunKind) -> None:
    assert lacking(kind.shown_by, KindReport) == set()
    assert lacking(kind.swept_by, Sweep) == set()
    assert lacking(kind.described_by, Headline) == set()


@KINDS
def test_the_settings_of_a_row_are_those_of_its_command(kind: RunKind) -> None:
    assert COMMANDS[kind.command].command == kind.command
    assert kind_of(kind.work).work == kind.work


@KINDS
def test_the_worker_of_a_row_is_in_a_package_that_may_import_torch(kind: RunKind) -> None:
    assert kind.worker == PROBE or ".worker." in kind.worker
    assert find_spec(kind.worker) is not None
