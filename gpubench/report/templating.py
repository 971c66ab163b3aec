"""How pages are made from templates: escaped, complete, and with the words that all of them use."""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gpubench import __version__, units
from gpubench.control_characters import spelled_out
from gpubench.report import finding_phrases, phrases, pipe_phrases, plain, wording
from gpubench.report.sheets import Sheet

LONGEST = 96  # characters of a name in a table: the mangled name of a kernel can have thousands
JOINT = re.compile(r"(?<=[./:_])(?=[^\W_])")  # between the parts of a path, or of a dotted name


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
        evaluations=pipe_phrases.evaluations,
        sign=wording.sign,
        standing=wording.standing,
        open_ends=phrases.note,
        short=lambda text: plain.shorten(text, LONGEST),
        breakable=_breakable,
        code_state=_code_state,
        rests_on=wording.rests_on,
        typeset=wording.typeset,
        columns=_columns,
    )
    made.globals.update(version=__version__, no_finding=finding_phrases.NOTHING)
    return made


def _visible(value: Any) -> Any:
    """A page may be read on a terminal, and shows a name as it is."""
    return type(value)(spelled_out(value)) if isinstance(value, str) else value


def _breakable(text: str) -> Markup:
    """A path or a dotted name, which may go on in another line behind each of its parts."""
    return Markup("<wbr>").join(JOINT.split(plain.shorten(text, LONGEST)))


def _known(show: Callable[..., str]) -> Callable[..., str]:
    """`show` for a figure that may be missing or not finite."""

    def shown(value: float | None, *unit: str) -> str:
        return wording.typeset(show(value, *unit)) if value is not None and math.isfinite(value) else "not known"

    return shown


def _columns(shown: Sheet) -> list[tuple[str, str, str]]:
    """As the macro `table` takes them."""
    return [
        (wording.opening(name), "number" if is_figure and place else "", name)
        for place, (name, is_figure) in enumerate(zip(shown.columns, shown.figures, strict=True))
    ]


def _code_state(git: Mapping[str, Any]) -> str:
    """The working tree that was measured, in a clause."""
    said = f"at commit {str(git.get('commit') or 'none')[:12]}"
    if git.get("branch"):
        said += f" of {git['branch']}"
    return f"{said}, with changes that were not committed" if git.get("dirty") else said
