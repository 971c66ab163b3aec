"""What the Markdown of this repository says that can be checked: its links, and its commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

FOLDERS = ("docs", "benchmarks", "examples", "tests")
LATER = {"history"}
"""Commands that the README has before the code does."""
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    .*$", re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
PLACEHOLDER = re.compile(r"<[a-z_ -]+>")
OPERATOR = re.compile(r"[|&;<>()]+")


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])


def links(page: Path) -> list[str]:
    """Where the page leads to, as it is written; of code none."""
    return [str(found[1]) for found in LINK.finditer(CODE.sub("", FENCE.sub("", page.read_text())))]


def anchors(page: Path) -> set[str]:
    """The names that a link can give for the headings of a page, made as GitHub makes them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `gpubench ...` in blocks of code, which may go on behind a backslash, and in lines."""
    prose = FENCE.sub("", text)
    blocks = [*FENCE.findall(text), *INDENTED.findall(prose)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *(" ".join(found.split()) for found in CODE.findall(prose))]:
        yield from _arguments(line.strip().removeprefix("$ ").replace("\\|", "|"))


def _arguments(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(PLACEHOLDER.sub("PLACEHOLDER", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # no shell reads it, so no user copies it
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if OPERATOR.fullmatch(word):
            yield from _of(command)
            command = []
        else:
            command.append(word)


def _of(words: list[str]) -> Iterator[list[str]]:
    for place, word in enumerate(words):
        started = place == 0 and (word == "gpubench" or word.endswith("/gpubench"))
        if started or (word == "gpubench" and words[place - 1] == "-m"):
            yield [argument for argument in words[place + 1 :] if argument != "..."]


def outputs(text: str) -> Iterator[tuple[str, str]]:
    """Yields each command line of a console block with the output below it."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def figures_to_read(text: str) -> set[str]:
    """Returns what a page tells its reader to read in an output: "read `this`", or the name that begins a list item."""
    told = re.findall(r"\bread\s+`([a-z][^`]*)`", text) + re.findall(r"^- \*\*`([a-z][^`]*)`\*\*", text, re.MULTILINE)
    return {one for one in told if "/" not in one and "." not in one}
