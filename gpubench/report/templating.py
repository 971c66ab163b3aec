"""Render pages from templates, with escaping and the helpers that all templates use."""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gpubench import __version__, units
from gpubench.report import finding_phrases, phrases, wording
from gpubench.report.sheets import Sheet
from gpubench.text import shorten, spelled_out

LONGEST = 96  # characters of a name in a table: a kernel's mangled name can have thousands
JOINT = re.compile(r"(?<=[./:_])(?=[^\W_])")  # between the parts of a path or of a dotted name


@cache
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("gpubench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        plain=phrases.cell,
        quantity=_known(units.quantity),
        span=lambda ends, unit: wording.typeset(units.span(ends[0], ends[1], unit)),
        share=_known(units.percent),
        moment=lambda started: phrases.moment(started) if started else "not recorded",
        duration=wording.duration,
        change=wording.change,
        changes=wording.interval,
        difference=_known(units.difference),
        worse=wording.worse,
        words=wording.name,
        sentence=wording.opening,
        evaluations=phrases.evaluations,
        sign=wording.sign,
        standing=wording.standing,
        open_ends=phrases.note,
        short=lambda text: shorten(text, LONGEST),
        breakable=_breakable,
        code_state=_code_state,
        rests_on=wording.rests_on,
        typeset=wording.typeset,
        columns=_columns,
    )
    made.globals.update(version=__version__, no_finding=finding_phrases.NOTHING)
    return made


def _visible(value: Any) -> Any:
    """Return text with control characters made visible, because a page may be read in a terminal."""
    return type(value)(spelled_out(value)) if isinstance(value, str) else value


def _breakable(text: str) -> Markup:
    """Return a path or dotted name that may wrap after each of its parts."""
    return Markup("<wbr>").join(JOINT.split(shorten(text, LONGEST)))


def _known(show: Callable[..., str]) -> Callable[..., str]:
    """Return `show` extended to figures that are missing or not finite, which become "not known"."""

    def shown(value: float | None, *unit: str) -> str:
        return wording.typeset(show(value, *unit)) if value is not None and math.isfinite(value) else "not known"

    return shown


def _columns(shown: Sheet) -> list[tuple[str, str, str]]:
    """Return rows as the macro `table` takes them."""
    return [
        (wording.opening(name), "number" if is_figure and place else "", name)
        for place, (name, is_figure) in enumerate(zip(shown.columns, shown.figures, strict=True))
    ]


def _code_state(git: Mapping[str, Any]) -> str:
    """Return a clause about the measured working tree."""
    said = f"at commit {str(git.get('commit') or 'none')[:12]}"
    if git.get("branch"):
        said += f" of {git['branch']}"
    return f"{said}, with changes that were not committed" if git.get("dirty") else said
