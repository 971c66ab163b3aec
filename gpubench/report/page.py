"""Renders a report as a self-contained HTML page, which loads nothing from elsewhere and runs no script but its own."""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from gpubench import __version__, foreign_files
from gpubench.registry import STARTERS
from gpubench.report.charts import hue
from gpubench.report.document import Block, Document, Heading, Medium, NestedDocument
from gpubench.text import shorten, spelled_out, typeset

GENERATOR = Markup('<meta name="generator" content="gpubench">')
"""The mark of a page that gpubench has written, and may write again."""
MANY = 5  # sections, about two screens: a page with so many has a list of them
LONGEST = 96  # characters of a name in a table: a kernel's mangled name can have thousands
_WORD = re.compile(r"[^\W\d_]+(?=[,:;.!?()]*(?:\s|$))")  # not a name with digits, dots or signs
_OF_A_MODEL = re.compile(r"[^\s,]+, (?:fp32|tf32|fp16|bf16|amp|\?|\w+Scheduler)(?![\w-])")
"""The beginning of a text with the name of a model, which may be that of a folder such as sd."""
_OPTION = re.compile(r"(--[a-z][a-z.-]{1,30})")
JOINT = re.compile(
    r"(?<=[./:_])(?!(?<=\d[.:])\d)(?=[^\W_])"
)  # between the parts of a path or dotted name, and of no number


def render(document: Document) -> str:
    contents = [(one.anchor or anchor(one.text), one.text) for one in _headings(document.blocks) if one.text]
    contents = contents if len(contents) >= MANY else []
    return rendered("page.html", ["page.js"], document.links, document=document, contents=contents)


def rendered(template: str, scripts: Sequence[str], links: Sequence[tuple[str, str]], **values: Any) -> str:
    """Returns the page that a template makes of values, with links to others; it runs these scripts and no other."""
    script = "".join(part(name).removesuffix("\n") for name in scripts)  # as the template includes them
    given = {"generator": GENERATOR, "scripts": scripts, "digest": digest(script), "links": links}
    return _environment().get_template(template).render(given | values)


@cache
def part(name: str) -> str:
    """Returns the text of a file in templates/."""
    return files("gpubench.report").joinpath("templates", name).read_text(encoding="utf-8")


def digest(script: str) -> str:
    """Returns the digest by which the policy of a page lets a script run."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _headings(blocks: Iterable[Block]) -> Iterator[Heading]:
    """Yields the headings of the sections of a page, which has one report in it."""
    shown = _shown(blocks)
    nested = [block for block in shown if isinstance(block, NestedDocument)]
    if len(nested) > 1:  # a list of the reports comes first
        return
    for block in shown:
        if isinstance(block, Heading) and block.level == 2:
            yield block
        elif isinstance(block, NestedDocument):
            yield from _headings(block.blocks)


def anchor(text: str) -> str:
    """Returns the name of a heading in an address."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def is_of_others(page: Path) -> bool:
    """Tells whether the path of a page is taken by a file or a link that gpubench has not written."""
    try:
        with foreign_files.opened(page) as file:
            return GENERATOR.encode() not in file.read(1024)
    except FileNotFoundError:
        return page.is_symlink()
    except OSError:
        return True


def sentence(text: str, names: Sequence[str] = ()) -> str:
    """Returns the text as a sentence on the page, with the typographic signs of numbers; see `plain_sentence`."""
    return typeset(plain_sentence(text, names))


def plain_sentence(text: str, names: Sequence[str] = ()) -> str:
    """Returns the text with a capital first letter and a full stop; code in it, such as dim=-1, stays as it is.

    One of the `names` that it begins with keeps its case.
    """
    text = _capital(text.rstrip("."), names)
    return text if text.endswith((":", "?", "!")) else f"{text}."


def heading(text: str, names: Sequence[str] = ()) -> str:
    """Returns the text with a capital first letter, and with the typographic signs of numbers."""
    return typeset(_capital(text, names))


def _capital(text: str, names: Sequence[str]) -> str:
    """Returns the text with a capital first letter, unless its first word is a command, or a name such as gpt2-tiny."""
    first = _WORD.match(text)
    named = first is None or first[0] in STARTERS or first[0] in names or _OF_A_MODEL.match(text)
    return text if named else f"{text[:1].upper()}{text[1:]}"


def _names(context: Context) -> Sequence[str]:
    """Returns the names that keep their case in the document that is rendered."""
    document = context.get("document")
    return document.names if isinstance(document, Document) else ()


@pass_context
def _sentence(context: Context, text: str) -> Markup:
    return _with_whole_options(sentence(text, _names(context)))


@pass_context
def _plain_sentence(context: Context, text: str) -> Markup:
    return _with_whole_options(plain_sentence(text, _names(context)))


@pass_context
def _heading(context: Context, text: str) -> str:
    return heading(text, _names(context))


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("gpubench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        sentence=_sentence,
        whole=_with_whole_options,
        plain_sentence=_plain_sentence,
        heading=_heading,
        typeset=typeset,
        short=lambda text: shorten(text, LONGEST),
        breakable=_breakable,
        hue=hue,
        kind=lambda block: type(block).__name__.lower(),
        shown=_shown,
        anchor=anchor,
    )
    made.policies["json.dumps_function"] = lambda value, **_: msgspec.json.encode(value).decode()
    made.globals.update(version=__version__)
    return made


def _shown(blocks: Iterable[Block]) -> list[Block]:
    return [block for block in blocks if Medium.PAGE in block.on]


def _visible(value: Any) -> Any:
    """Returns text with control characters made visible, because a page may be read in a terminal."""
    return type(value)(spelled_out(value)) if isinstance(value, str) else value


def _with_whole_options(text: str) -> Markup:
    """Returns text in which no line ends within an option such as --repeats."""
    parts = _OPTION.split(text)  # every second one is an option
    span = Markup('<span class="option">{}</span>')
    return Markup("").join(span.format(part) if place % 2 else part for place, part in enumerate(parts))


def _breakable(text: str) -> Markup:
    """Returns a path or dotted name that may wrap after each of its parts."""
    return Markup("<wbr>").join(JOINT.split(shorten(text, LONGEST)))
