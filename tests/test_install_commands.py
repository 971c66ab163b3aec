"""Commands that install or run something fetch what is ours: on PyPI, the name gpubench belongs to somebody else."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

PLACES = ("commands", "gpubench", "examples", "docs", "benchmarks", "configs", ".ci", "tests/fake_cuda")
TEXTS = {".py", ".md", ".yml", ".yaml", ".sh", ".sbatch", ".toml", ".html", ".js", ".txt", ""}
INSTALLERS = (
    r"pip3? (?:install|download|wheel)",
    r"uvx",
    r"uv (?:add|tool (?:install|run|upgrade)|pip install)",
    r"uv run\b.* --with",
    r"pipx (?:install|run|upgrade)",
    r"(?:conda|mamba|poetry|pdm|apt|apt-get|brew) (?:install|add)",
)
FETCHES = re.compile(rf"\b(?:{'|'.join(INSTALLERS)})\b(?P<rest>[^\n`|;&]*)")
SOURCE = re.compile(r"--from[ =](?P<from>\S+)|@ *git\+|git\+")
OURS = re.compile(r"""["']?gpubench(?:\[[\w,]+\])?(?:[=<>~!]=?[\w.*]+)?["'\\,.)]*""")
PROSE = re.compile(r"\s#|\s(?:and|in|into|which)\s")
"""Where a command in a line of text or in a comment has ended."""
USES = re.compile(r"uses: *(?P<owner>\S+?)/gpubench\b")


def by_name(text: str) -> Iterator[str]:
    """Yields the commands that would fetch whatever package has the name gpubench."""
    for found in FETCHES.finditer(text):
        arguments = PROSE.split(found["rest"])[0]
        source = SOURCE.search(arguments)
        named = [word for word in arguments.split() if OURS.fullmatch(word)]
        if named and (source is None or (source["from"] and OURS.fullmatch(source["from"]))):
            yield found[0]


@pytest.mark.parametrize(
    "text",
    [
        "pip install gpubench",
        "python -m pip install -U 'gpubench[wandb]'",
        "environment/bin/pip install --quiet gpubench==0.2.0",
        "\"pip install 'gpubench[torchsde]'\"",
        "uvx gpubench train-bench",
        "uvx --from gpubench gpubench runs",
        "uv tool install gpubench",
        "uv add gpubench",
        "uv run --with gpubench gpubench runs",
        "pipx run gpubench",
        "(needs pip install 'gpubench[wandb]')",
        "conda install -c conda-forge gpubench",
    ],
)
def test_a_command_that_fetches_a_package_by_this_name_is_noticed(text: str) -> None:
    assert [*by_name(text)]


@pytest.mark.parametrize(
    "text",
    [
        "pip install .",
        "pip install git+https://example.org/gpubench",
        'pip install "gpubench @ git+https://example.org/gpubench@1"',
        "pip install torchsde, beside gpubench's own packages",
        "uvx --from git+<url of this repository> gpubench runs",
        "uv tool install .    # gpubench in an environment of its own",
        "pipx inject gpubench torchsde",
        "run pip install . and then gpubench",
    ],
)
def test_what_fetches_from_the_repository_is_not(text: str) -> None:
    assert not [*by_name(text)]


def texts() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXTS)
    for place in PLACES:
        yield from (
            path
            for path in (ROOT / place).rglob("*")
            if path.is_file() and path.suffix in TEXTS and "__pycache__" not in path.parts
        )


def test_no_page_example_or_message_fetches_a_package_by_this_name() -> None:
    found = {path.relative_to(ROOT): path.read_text(encoding="utf-8", errors="replace") for path in texts()}
    assert {Path("README.md"), Path("action.yml"), Path("examples/ci/model.yml"), Path("Makefile")} <= {*found}
    assert {path: wrong for path, text in found.items() if (wrong := [*by_name(text)])} == {}


def test_no_workflow_names_an_owner_of_this_action() -> None:
    """The owner of that name could run code there, so that the reader fills in the right one."""
    owners = {used["owner"] for path in texts() for used in USES.finditer(path.read_text(errors="replace"))}
    assert owners == {"<owner>"}


def test_the_readme_says_whose_name_it_is() -> None:
    assert "The package `gpubench` on PyPI is somebody else's." in (ROOT / "README.md").read_text()
