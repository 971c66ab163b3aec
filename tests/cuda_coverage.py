"""Prints the lines of the product that mention CUDA, NCCL, NVML or HIP and that no test has run, and their share.

    make cuda-coverage      # runs the tests of the simulated GPU and the quicker others under coverage, and then this

It reads the data of the `coverage` package, those of the workers that the tests started included. Comments,
docstrings and imports for type checkers do not count. A line without code of its own, as within a table, has been run
if the statement that it belongs to has.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import coverage

ROOT = Path(__file__).parents[1]
MENTION = re.compile(r"cuda|nccl|nvml|(?<![a-z])hip", re.IGNORECASE)
ALLOWED = 0.05
"""The share of these lines that may be left without a test."""


def mentions(source: str) -> dict[int, int]:
    """The lines of code that mention one of them, each with the first line of the statement that it belongs to."""
    first_lines: dict[int, int] = {}
    silent: set[int] = set()
    for node in ast.walk(ast.parse(source)):  # the outer ones first
        if not isinstance(node, ast.stmt):
            continue
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        first_lines.update(dict.fromkeys(lines, node.lineno))
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            silent.update(lines)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            texts = enumerate(token.string.splitlines(), token.start[0])
            found.update(line for line, text in texts if MENTION.search(text))
    return {line: first_lines[line] for line in sorted(found - silent)}


def with_code(code: CodeType) -> Iterator[int]:
    """The lines for which Python reports that it has reached them."""
    yield from (line for _, _, line in code.co_lines() if line)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_code(constant)


def main() -> int:
    data = coverage.CoverageData(str(ROOT / ".coverage"))
    data.read()
    total, missed = 0, 0
    for path in sorted([*ROOT.glob("gpubench/**/*.py"), *ROOT.glob("commands/*.py")]):
        source = path.read_text()
        own = set(with_code(compile(source, path, "exec")))
        run = set(data.lines(str(path)) or ())
        for line, first in mentions(source).items():
            total += 1
            if (line if line in own else first) not in run:
                missed += 1
                print(f"{path.relative_to(ROOT)}:{line}: {source.splitlines()[line - 1].strip()}")
    print(f"{missed} of {total} lines that mention CUDA, NCCL, NVML or HIP were run by no test: {missed / total:.1%}")
    return int(missed > ALLOWED * total)


if __name__ == "__main__":
    sys.exit(main())
