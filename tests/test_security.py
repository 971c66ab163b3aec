"""What docs/security.md claims, where no test of a single room holds it already."""

import ast
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest
import snapshots_made
from cli import complaint
from places import TESTS
from recorded_runs import edit, write_run
from reports import HOSTILE, Page
from running import SMALL, Finished, gpubench
from traces_made import launched, slice_, step, write

import gpubench as package
from gpubench.events import Sample
from gpubench.host.launch import listen
from gpubench.probe.facts import SECRET_PARTS
from gpubench.report.terminal import Terminal
from gpubench.runs import directory
from gpubench.settings.commands import COMMANDS
from gpubench.settings.field import fields
from gpubench.temporary import OwnedFolder
from gpubench.text import cell, clean

CommandLine = Callable[..., Finished]

SOURCE = Path(package.__file__).resolve().parent
DOCUMENT = SOURCE.parent / "docs" / "security.md"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
LIVE = {"img", "iframe", "object", "embed", "form", "base"}
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "tempfile.mktemp", "marshal.loads", "pickle.load",
    "pickle.loads", "pickle.Unpickler", "shelve.open", "torch.load", "torch.hub.load", "yaml.unsafe_load",
    "yaml.full_load", "yaml.load_all", "dist.broadcast_object_list", "dist.all_gather_object", "dist.gather_object",
}  # fmt: skip
"""Calls that run what is in foreign data, or make a name that can be guessed; the collectives unpickle what comes."""


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    folders = (SOURCE, SOURCE / "commands")
    return [(path, ast.parse(path.read_text())) for folder in folders for path in folder.rglob("*.py")]


def calls() -> Iterator[tuple[Path, str, ast.Call]]:
    """(file, what is called as it is written there, the call)"""
    for path, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.Call):
                yield path, ast.unparse(node.func), node


def test_nothing_that_is_read_is_run() -> None:
    found = list(calls())
    assert len(found) > 5000
    wrong = [f"{path.name}: {name}" for path, name, _ in found if name in FORBIDDEN]
    wrong += [f"{path.name}: {name}" for path, name, _ in found if name == "yaml.load" and path.name != "yaml_text.py"]
    shells = [path.name for path, _, call in found for word in call.keywords if word.arg == "shell"]
    trusts = [
        path.name
        for path, _, call in found
        for word in call.keywords
        if word.arg == "trust_remote_code" and ast.unparse(word.value) != "False"
    ]
    assert (wrong, shells, trusts) == ([], [], [])


def test_the_one_unpickler_finds_no_class() -> None:
    subclasses = [
        (path.name, ast.unparse(node))
        for path, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(base) for base in node.bases)
    ]
    ((file, source),) = subclasses
    assert file == "unpickling.py"
    assert "def find_class" in source
    assert "raise pickle.UnpicklingError" in source


def test_markup_is_made_of_text_in_the_source_and_pages_escape_all_else() -> None:
    made = [(path, call) for path, name, call in calls() if name == "Markup" and call.args]
    assert len(made) > 10
    for path, call in made:
        assert isinstance(call.args[0], ast.Constant), f"{path.name}:{call.lineno}"
    for template in (SOURCE / "report" / "templates").iterdir():
        source = re.sub(r'"(?:[^"\\]|\\.)*" \| safe\b', "", template.read_text())  # text in the source, as in Markup
        assert not re.search(r"\|\s*safe\b|autoescape", source), template.name


def test_no_setting_is_a_secret() -> None:
    names = {name for kind in COMMANDS.values() for name in fields(kind)}
    parts = {part for name in names for part in re.split(r"[._]", name.upper())}
    assert not parts & {*SECRET_PARTS, "PASSWORD", "CREDENTIALS"}


def test_a_run_directory_holds_no_secret_of_the_environment_or_of_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OMP_TOKEN", "SSH_AUTH_SOCK", "DATABASE_URL"):
        monkeypatch.setenv(name, f"hush-{name}")
    monkeypatch.setenv("NCCL_SOCKET", "http://me:hush@host")
    git = tmp_path / ".git"
    for folder in (git / "objects", git / "refs"):
        folder.mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "config").write_text('[remote "origin"]\n\turl = https://me:hush@host/repository\n')
    options = (*SMALL, "--device", "cpu", "--steps", "3", "--training.warmup_steps=1", "--repeats", "1")
    done = gpubench("train-bench", *options, "--logging.level", "NOTIMPORTANT", results=tmp_path / "out", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert done.document(directory.RUN)["git"]["branch"] == "main"
    files = [path for path in done.run.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path.name for path in files if b"hush" in path.read_bytes()] == []


@pytest.mark.parametrize("option", ["--data", "--data.path", "--model"])
def test_an_address_with_a_password_is_no_source_and_gets_into_no_run_directory(
    command_line: CommandLine, option: str
) -> None:
    done = command_line("train-bench", "--device", "cpu", option, "https://me:hush@host/x")
    complaint(done)
    assert not done.results.exists()


@pytest.mark.parametrize("name", ["../../etc", "/etc", "..", ".hidden", "a/b", "a\\..\\b\x00"])
def test_an_experiment_stays_under_the_results(command_line: CommandLine, tmp_path: Path, name: str) -> None:
    done = command_line("train-bench", "--device", "cpu", "--experiment", name)
    complaint(done)
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_sample_s_file_is_made_of_its_number() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.sample"):
        msgspec.convert({"sample": "../../etc"}, Sample)
    assert directory.sample_file(-1, directory.LATENT) == "samples/-0001.safetensors"


def test_a_document_is_not_written_through_a_link_that_lies_in_wait(tmp_path: Path) -> None:
    valued = tmp_path / "valued"
    valued.write_text("mine")
    for name in (".noise.json.tmp", directory.NOISE):
        (tmp_path / name).symlink_to(valued)
    directory.write_document(tmp_path / directory.NOISE, {"a": 1})
    assert valued.read_text() == "mine"
    assert json.loads((tmp_path / directory.NOISE).read_text()) == {"a": 1}
    assert not (tmp_path / directory.NOISE).is_symlink()


def test_the_socket_of_one_machine_is_in_a_folder_of_this_user() -> None:
    with OwnedFolder() as name, listen(folder := Path(name))[0] as listener:
        address = f"unix:{listener.getsockname()}"
        assert address.startswith(f"unix:{folder}/")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
    assert not folder.exists()


def test_only_several_machines_listen_on_the_network_and_then_with_a_secret_of_the_run() -> None:
    secrets = set()
    for _ in range(2):
        listener, address, secret = listen(None)
        with listener:
            assert address.endswith(f"#{secret}")
            assert len(secret) == 32
            secrets.add(secret)
    assert len(secrets) == 2


def hostile_trace(folder: Path) -> Path:
    name = f"{HOSTILE}{ESCAPE}[bold]"
    events = [
        part
        for number in range(2)
        for part in (
            step(number, number * 100, number * 100 + 100),
            slice_(f"nn.Module: {name}_0", number * 100 + 1, number * 100 + 40, cat="python_function"),
            slice_(f"{name}.py(12): {name}", number * 100 + 2, number * 100 + 39, cat="python_function"),
            slice_(f"aten::{name}", number * 100 + 3, number * 100 + 38),
            *launched(name, number * 100 + 4, number * 100 + 6, number * 100 + 80, number + 1),
        )
    ]
    return write(folder / f"{ESCAPE}<b>.json", events, deviceProperties=[{"name": name, "computeMajor": 9}])


def hostile_snapshot(folder: Path) -> Path:
    name = f"{HOSTILE}{ESCAPE}[bold]"
    frames = [snapshots_made.frame(name, f"/home/{name}.py", 3)]
    events = [snapshots_made.alloc(512 * number, 400, frames) for number in range(4)]
    return snapshots_made.write(folder / f"{ESCAPE}<b>.pickle", snapshots_made.snapshot(events))


@pytest.mark.parametrize(
    ("command", "option", "made"),
    [
        ("profile", "--trace", hostile_trace),
        ("memory", "--snapshot", hostile_snapshot),
    ],
)
def test_names_in_a_file_are_shown_on_pages_and_terminals_and_not_obeyed(
    command_line: CommandLine, tmp_path: Path, command: str, option: str, made: Callable[[Path], Path]
) -> None:
    page = tmp_path / "page.html"
    done = command_line(command, option, str(made(tmp_path)), "--html", str(page))
    assert done.code == 0, done.stderr
    assert not CONTROL.search(done.stdout + done.stderr)
    source = page.read_text()
    assert not CONTROL.search(source)
    shown = Page(source)
    assert LIVE.isdisjoint(shown.tags)
    assert shown.tags.count("script") == 1  # its own, which the policy names by its digest
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in shown.words


@pytest.mark.parametrize("format_", ["terminal", "json", "html", "markdown", "csv"])
def test_a_run_that_is_hostile_throughout_is_shown_and_not_obeyed(
    command_line: CommandLine, tmp_path: Path, format_: str
) -> None:
    foreign, own = write_run(tmp_path / "a", HOSTILE.replace("/", "")), write_run(tmp_path / "b")
    text = f"{HOSTILE}{ESCAPE}"
    edit(foreign / directory.RUN, experiment=text, argv=[text], host=text, git={"commit": text, "branch": text})
    edit(foreign / directory.ENVIRONMENT, host={"name": text, "product": text}, torch={"version": text}, **{text: text})
    edit(foreign / directory.SUMMARY, warnings=[text])
    (foreign / directory.CONFIG).write_text(f"experiment: made\nmodel: {{name: {json.dumps(text)}}}\n")
    finding = {"id": text, "title": text, "severity": "high", "evidence": [text], "cause": text, "advice": text}
    findings = {"headline": text, "findings": [finding | {"threshold": text}], "unanswered": []}
    (foreign / directory.FINDINGS).write_text(json.dumps(findings))
    done = command_line("compare", str(own), str(foreign), "--force", "--format", format_)
    assert done.code == 0, done.stderr
    assert not CONTROL.search(done.stdout + done.stderr)
    if format_ == "html":
        shown = Page(done.stdout)
        assert LIVE.isdisjoint(shown.tags)
        assert shown.tags.count("script") == 1  # its own, which the policy names by its digest
        assert "<script>alert(1)</script>" in shown.words
    if format_ == "markdown":
        assert "<script" not in done.stdout


def test_what_is_left_out_and_what_is_logged_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(quiet=False, verbosity=0)
    terminal.err.print(f"left out: {ESCAPE}\u202e", markup=False, soft_wrap=True)
    said = capsys.readouterr().err
    assert not CONTROL.search(said)
    assert "\\x1b]0;owned" in said


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1", "-1+1", "@SUM(1)", "\t=1", "\r=1"])
def test_a_cell_of_text_is_no_formula(text: str) -> None:
    assert cell(text)[0] not in "=+-@\t\r"


def test_a_log_whose_name_is_a_formula_is_no_formula_in_an_exported_csv(
    command_line: CommandLine, tmp_path: Path
) -> None:
    rows = "=1+1\n" + "\n".join(str(10 + number % 3) for number in range(30)) + "\n"
    for name in ("=a.csv", "=b.csv"):
        (tmp_path / name).write_text(rows)
    done = command_line("compare", "=a.csv", "=b.csv", "--column", "=1+1", "--unit", "ms", "--format", "csv")
    assert done.code == 0, done.stderr
    first = done.stdout.splitlines()[1].split(",")
    assert first[:2] == ["'=a.csv", "'=b.csv"]
    assert "'=1+1" in first


def test_every_test_that_the_document_names_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", DOCUMENT.read_text())
    assert len(named) > 15
    for file, name in named:
        assert f"def {name}(" in next(TESTS.rglob(file)).read_text(), f"{file}::{name}"


@pytest.mark.parametrize("blank", ["\u3164", "\uffa0", "\u115f", "\u2800", "\ufe0f", "\u034f", "\U000e0100"])
def test_a_character_that_shows_nothing_is_an_escape(blank: str) -> None:
    assert clean(f"if ok and {blank}:").isascii()
