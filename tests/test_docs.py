"""The documentation against the code: links that lead somewhere, commands that exist, tables that are up to date."""

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import documents
import pytest
import reference
import typer
import yaml
from places import ROOT

from gpubench import units
from gpubench.commands import app, options, program, program_words
from gpubench.compare.gate import parse_condition
from gpubench.configs import presets
from gpubench.errors import GpubenchError
from gpubench.kinds.pipeline import report as pipeline
from gpubench.metrics import DEFINITIONS
from gpubench.registry import OF_PROGRAMS, kind_of
from gpubench.report import steps
from gpubench.settings.commands import COMMANDS
from gpubench.settings.field import declared_key
from gpubench.settings.loading import canonical, load, parse_assignments
from gpubench.settings.options import ROWS

PAGES = documents.pages()
HELP = {"--help", "-h"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_link_in_text_is_found_and_one_in_code_is_not(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Two words, one\n[a](b.md#c), [d](https://e) `[f](g)`\n```\n[h](i)\n# none\n```\n")
    assert documents.links(page) == ["b.md#c", "https://e"]
    assert documents.anchors(page) == {"two-words-one"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`gpubench compare A B` and `import gpubench`", [["compare", "A", "B"]]),
        ("```\n$ gpubench compare a b \\\n  --strict > x\nout gpubench none\n```", [["compare", "a", "b", "--strict"]]),
        ("    torchrun -m gpubench memory --config <run>/c.yaml", [["memory", "--config", "PLACEHOLDER/c.yaml"]]),
        ('`gpubench compare a b --fail-on "step_time>2%" | cat`', [["compare", "a", "b", "--fail-on", "step_time>2%"]]),
        ("`.venv/bin/gpubench ...`, gpubench in prose", [[]]),
        ("`gpubench's`", []),
    ],
)  # fmt: skip
def test_commands_are_found_where_they_are_meant_to_be_copied(text: str, found: list[list[str]]) -> None:
    assert list(documents.commands(text)) == found


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_leads_to_something(page: Path) -> None:
    for link in documents.links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in documents.anchors(target), link


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "commands"], ids=relative)
def test_what_a_page_tells_to_read_is_in_an_output_that_it_shows_without_details(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    brief = [output for command, output in documents.outputs(text) if not {"-v", "-vv"} & {*command.split()}]
    for figure in documents.figures_to_read(text):
        assert any(figure in output for output in brief), figure


@pytest.mark.parametrize(
    ("page", "shown"), [("pipe-infer.md", pipeline.IN_BRIEF), ("train-bench.md", steps.IN_BRIEF)], ids=["pipe", "train"]
)
def test_rows_of_metrics_in_a_documented_output_are_those_that_the_command_prints(
    page: str, shown: tuple[str, ...]
) -> None:
    text = (ROOT / "docs" / "commands" / page).read_text(encoding="utf-8")
    names = {units.words(name): name for name in DEFINITIONS}
    for command, output in documents.outputs(text):
        rows = [re.split(r"\s{2,}", line)[0] for line in output.splitlines() if re.search(r"\S\s{2,}\S", line)]
        listed = {names[row] for row in rows if row in names}
        assert not listed - {*shown} or {"-v", "-vv"} & {*command.split()}, command


@functools.cache
def gpubench_command() -> Any:
    return typer.main.get_command(app)


@pytest.fixture(autouse=True)
def files_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs in the examples need not exist here."""
    monkeypatch.setattr(program_words, "refuse_unstartable", lambda *_, **__: None)


def refused(arguments: list[str]) -> str | None:
    """What is wrong with a command line, which is not run; None if its command, options and values exist."""
    group = gpubench_command()
    if not arguments or arguments[0].isupper():
        return None
    name, *rest = arguments
    if name.startswith("-"):
        known = HELP | {option for parameter in group.params for option in parameter.opts}
        return None if name in known else f"no option {name}"
    if name not in group.commands:
        return None if name in documents.LATER else f"no command {name}"
    command = group.commands[name]
    if rest and rest[0] in getattr(command, "commands", {}):
        command, name, rest = command.commands[rest[0]], rest[0], rest[1:]
    try:
        context = command.make_context(name, [word for word in rest if word not in HELP])
        return _refused_settings(name, context)
    except typer.TyperException as error:
        said = error.format_message()
        return (
            None if said.endswith(f"{rest[-1]}' requires an argument.") else said
        )  # a sentence may name an option alone
    except GpubenchError as error:
        return str(error)


def _refused_settings(name: str, context: Any) -> str | None:
    """What is wrong with the values of a command line. Raises the errors of the command itself.

    A preset has to exist, and a configuration without a folder has to be one of the examples. Other files need not.
    """
    for condition in context.params.get("fail_on") or ():
        parse_condition(condition)
    of_models = COMMANDS.get("train-bench" if name == "tune" else name)
    if of_models is None:
        return None
    cls = of_models
    if options.program(context) is not None:
        run_by = name.replace("tune", "train-bench")
        kind = next(kind for kind in map(kind_of, OF_PROGRAMS) if kind.run_by == run_by)
        cls = COMMANDS[kind.command]
        program.configuration(context, None, kind)
    config = context.params.get("config") or ""
    known = {*presets(), *(path.name for path in (ROOT / "examples").rglob("*.yaml"))}
    if not (config.isupper() or "/" in config or config in {"", *known}):
        return f"no preset or example {config}"
    given = [*options.overrides(context, cls).items()]
    for assignment in context.params.get("vs") or ():
        given += parse_assignments(cls, [assignment]).items() if assignment != "KEY=VALUE" else ()
    for key, value in given:
        if declared_key(cls, canonical(cls, key)) is None:
            return f"no setting {key}"
        several = {"train-bench": "training.batch_size", "pipe-infer": "distributed.world_size"}.get(name)
        for one in str(value).split(",") if canonical(cls, key) == several else [value]:
            if not str(one).isupper() and "PLACEHOLDER" not in str(one):  # of which N is one, too
                load(cls, None, {key: one})
    return None


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("train-bench --training.steps=3 --vs precision=bf16", None),
        ("train-bench --training.stepz=3", "training.stepz"),
        ("compare a b --fail-om x", "--fail-om"),
        ("compare a b --format pdf", "pdf"),
        ("train-bnch", "train-bnch"),
        ("--versionn", "--versionn"),
        ("train-bench --config tinny", "tinny"),
        ("train-bench --config none.yaml", "none.yaml"),
        ("train-bench --training.steps=many", "training.steps"),
        ("train-bench --vs precision=bf17", "precision"),
        ("train-bench --batch-size 1,x", "batch_size"),
        ("train-bench --batch-size 4 -- python train.py", "batch-size"),
        ("memory --spare 5% -- python train.py", "spare"),
        ("compare a b --fail-on step_time>2", "step_time>2"),
        ("pipe-infer --help", None),
        ("runs show latest", None),
        ("runs prune --keep 20 --failedd", "--failedd"),
    ],
)
def test_a_command_that_would_be_refused_is_noticed(line: str, wrong: str | None) -> None:
    said = refused(line.split())
    assert said is None if wrong is None else said is not None and wrong in said


@pytest.mark.parametrize("page", [page for page in PAGES if relative(page) != "docs/benchmarks.md"], ids=relative)
def test_every_command_of_a_page_exists(page: Path) -> None:
    """Of those that people wrote: the page of benchmarks holds what programs printed."""
    for arguments in documents.commands(page.read_text()):
        assert refused(arguments) is None, arguments


def test_every_command_of_an_example_and_of_the_help_exists() -> None:
    texts = [
        f"`{line.strip()}`" for path in (ROOT / "examples").rglob("*.py") for line in path.read_text().splitlines()
    ]
    for path in (ROOT / "examples").rglob("*.yml"):
        known = yaml.safe_load(path.read_text())
        jobs = known["jobs"].values() if "jobs" in known else [known["runs"]]  # of a workflow, or of an action
        steps = [step.get("run", "") for job in jobs for step in job["steps"]]
        texts += [f"```\n{run}\n```" for run in steps]
    for path in (path for kind in ("*.sh", "*.sbatch") for path in (ROOT / "examples").rglob(kind)):
        texts.append(f"```\n{path.read_text()}\n```")
    texts += [f"```\n{command.epilog}\n```" for command in reference.commands().values()]
    found = [arguments for text in texts for arguments in documents.commands(text) if arguments != ["$@"]]
    assert len(found) > 20
    for arguments in found:
        assert refused(arguments) is None, arguments


@pytest.mark.parametrize("page", reference.pages(), ids=relative)
def test_tables_of_options_and_settings_are_those_of_the_code(page: Path) -> None:
    text = page.read_text()
    made = reference.pages()[page]()
    assert text == reference.refreshed(text, made), "python tests/reference.py writes them anew"


def test_the_table_of_options_is_that_of_the_declarations() -> None:
    assert reference.TABLE.read_text() == reference.table(), "python tests/reference.py writes it anew"


def test_the_table_of_roles_is_that_of_the_declarations() -> None:
    assert reference.ROLES_TABLE.read_text() == reference.roles(), "python tests/reference.py writes it anew"


def test_every_declared_option_is_in_the_help_of_a_command() -> None:
    shown = {(name, one.name) for name, command in reference.commands().items() for one in command.params}
    assert [name for name, commands, _ in ROWS if not any((one, name) in shown for one in commands)] == []


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="end"):
        reference.refreshed("# a page\n", "")


def test_every_number_in_the_table_of_settings_has_a_bound() -> None:
    """A validator that stands before a bound in its Annotated would hide it from the table."""
    unbounded = [line for line in reference.settings().splitlines() if "| integer |" in line or "| number |" in line]
    assert unbounded == []


def test_the_settings_of_a_command_are_those_that_it_takes() -> None:
    groups = {group.splitlines()[0] for group in reference.settings().split("## ") if "`profiling." in group}
    assert groups == {
        "train-bench, profile, pipe-infer, a program and profile of a program",
        "train-bench, pipe-infer and a program",
        "profile and profile of a program",
        "loader",
    }


def test_no_page_and_no_reference_holds_a_figure_of_the_simulated_gpu() -> None:
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*"), *(ROOT / "benchmarks").rglob("*")]
    texts = [path for path in places if path.suffix in {".md", ".json", ".jsonl", ".html", ".yaml", ".txt", ".csv"}]
    assert ROOT / "README.md" in texts
    assert [path for path in texts if "(simulated)" in path.read_text(errors="replace")] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_modules_that_a_page_for_contributors_names_exist(page: str) -> None:
    named = re.findall(r"`(\w+(?:/\w+)+\.py)`", (ROOT / page).read_text())
    assert len(named) > 1
    assert [name for name in named if not (ROOT / name).is_file() and not (ROOT / "gpubench" / name).is_file()] == []


STORY = 25
"""Lines of code that a command's own function takes at the most to tell its story."""


def test_the_architecture_begins_with_a_function_that_tells_the_story_of_a_command() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"\[`(\w+)`\]\(\.\./(gpubench/[\w/]+)\.py\)", text)
    found = [getattr(importlib.import_module(module.replace("/", ".")), name) for name, module in named]
    assert [named[0][0], named[1][0]] == ["train_bench", "Bench"]
    assert text.index("`train_bench`") < text.index("## ")
    (command,) = ast.parse(inspect.getsource(inspect.unwrap(found[0]))).body
    assert isinstance(command, ast.FunctionDef)
    body = command.body[1:]
    assert (body[-1].end_lineno or 0) - body[0].lineno < STORY
