"""The server as the SDK's own client sees it."""

import inspect
import json
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT
from running import HOST, PATIENCE, environment, processes_of

pytest.importorskip("mcp")

import anyio
from mcp import Client
from mcp.types import CallToolResult

from gpubench.agents.answers import MOST
from gpubench.agents.command_line import CommandLine
from gpubench.agents.folder import Folder
from gpubench.agents.server import READING, TOOLS, Tools, made
from gpubench.commands import app
from gpubench.errors import UsageError

PROGRAM = str(SUPPORT / "training_program.py")
GPUBENCH = (*HOST, "-m", "gpubench")
NOTHING = (sys.executable, "-S", "-c", "open('started', 'w')")
"""In place of gpubench, where it must not be started."""
FEW = {"steps": 20, "repeats": 1}
KNOWN = set(TOOLS.values())


def served(
    folder: Path,
    talk: Callable[[Client], Awaitable[Any]],
    launcher: Sequence[str] = GPUBENCH,
    known: set[str] = KNOWN,
) -> Any:
    """Connects a client to a server of the folder by messages, as on stdin and stdout, and returns what `talk` does."""

    async def main() -> Any:
        async with Client(made(Folder(folder), CommandLine(launcher), known), mode="legacy") as client:
            return await talk(client)

    return anyio.run(main)


def called(
    folder: Path, tool: str, arguments: dict[str, Any], launcher: Sequence[str] = GPUBENCH, **more: Any
) -> CallToolResult:
    found: CallToolResult = served(folder, lambda client: client.call_tool(tool, arguments, **more), launcher)
    return found


def texts(result: CallToolResult) -> list[str]:
    found = [content.text for content in result.content if content.type == "text"]
    assert len(found) == len(result.content)
    return found


def answer(result: CallToolResult) -> Any:
    (text,) = texts(result)
    assert not result.is_error, text
    assert len(text) <= MOST
    return json.loads(text)


def error(result: CallToolResult) -> tuple[str, str]:
    assert result.is_error
    assert sum(map(len, texts(result))) <= 2 * MOST
    said, hint = texts(result)[0].splitlines()
    return said.removeprefix("error: "), hint.removeprefix("hint: ")


def takes(steps: int, end: str | int = 0) -> list[str]:
    return [sys.executable, PROGRAM, str(steps), str(end)]


@pytest.fixture(autouse=True)
def environment_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def test_the_tools_are_listed_with_what_each_argument_is(tmp_path: Path) -> None:
    tools = served(tmp_path, lambda client: client.list_tools()).tools
    assert [tool.name for tool in tools] == list(TOOLS)
    for tool in tools:
        assert tool.description
        assert tool.annotations.read_only_hint == (tool.name in READING)
        assert all("description" in one for name, one in tool.input_schema["properties"].items() if name != "directory")
    assert sum(len(tool.model_dump_json()) for tool in tools) < 4 * 3_000


def too_long(schema: dict[str, Any]) -> list[Any]:
    """Returns values of any length that an argument could have by what a client is told of it."""
    kinds = [one["type"] for one in schema.get("anyOf", [schema])]
    long = "a." * 450_000
    found: dict[str, list[Any]] = {
        "string": [long],
        "array": [[long], ["a"] * 100_000],
        "object": [{long: 1}, {"seed": long}, {f"a{number}": 1 for number in range(100_000)}],
    }
    return [value for kind in kinds for value in found.get(kind, [])]


def test_a_long_argument_is_refused(tmp_path: Path) -> None:
    needed = {"program": ["p"], "run": "latest", "baseline": "latest", "candidate": "latest"}

    async def talk(client: Client) -> int:
        tried = 0
        for tool in (await client.list_tools()).tools:
            properties = tool.input_schema["properties"]
            given = {name: value for name, value in needed.items() if name in properties}
            for name, value in ((each, value) for each in properties for value in too_long(properties[each])):
                result = await client.call_tool(tool.name, given | {name: value})
                assert result.is_error, (tool.name, name)
                assert "should have at most" in texts(result)[0]
                tried += 1
        return tried

    assert served(tmp_path, talk, NOTHING) > 50
    assert not (tmp_path / "started").exists()


def test_a_busy_server_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def shorten(*_: Any) -> str:
        begun.set()
        assert goes_on.wait(PATIENCE), "the server is busy"
        return "{}"

    async def talk(client: Client) -> Any:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "compare", {"baseline": "a", "candidate": "b"})
            await anyio.to_thread.run_sync(begun.wait, PATIENCE)
            found = await client.list_tools()
            goes_on.set()
        return found

    monkeypatch.setattr("gpubench.agents.answers.written", shorten)
    assert served(tmp_path, talk, (sys.executable, "-S", "-c", "print('{}')")).tools


def test_a_tool_is_offered_once_its_command_exists(tmp_path: Path) -> None:
    tools = served(tmp_path, lambda client: client.list_tools(), known={"compare", "runs"}).tools
    assert [tool.name for tool in tools] == ["compare", "runs", "show"]


def test_each_tool_is_a_method_and_each_method_a_tool() -> None:
    methods = [name for name, _ in inspect.getmembers(Tools, inspect.isfunction) if not name.startswith("_")]
    assert sorted(methods) == sorted(TOOLS)
    commands = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    assert commands >= KNOWN


def test_a_program_is_measured(tmp_path: Path) -> None:
    found = answer(called(tmp_path, "measure", {"program": takes(500), **FEW}))
    assert (found["status"], found["metrics"][0]["name"]) == ("completed", "throughput")
    assert found["metrics"][0]["estimate"] == pytest.approx(4 / 0.002, rel=1e-3)


def test_what_a_command_writes_to_stderr_is_told_as_progress(tmp_path: Path) -> None:
    told: list[tuple[float, str | None]] = []

    async def tell(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    code = "import sys; print('repeat 1 of 2', file=sys.stderr); print('repeat 2 of 2', file=sys.stderr); print('{}')"
    called(tmp_path, "measure", {"program": takes(5)}, (sys.executable, "-c", code), progress_callback=tell)
    assert [message for _, message in told] == ["repeat 1 of 2", "repeat 2 of 2"]
    assert [seconds for seconds, _ in told] == sorted({seconds for seconds, _ in told})


@pytest.mark.stress
def test_two_versions_are_compared_and_their_runs_can_be_listed_shown_and_compared_again(tmp_path: Path) -> None:
    async def talk(client: Client) -> list[Any]:
        measured = {"program": takes(500), "steps": 20, "repeats": 2, "vs_args": ["--other"]}
        pair = answer(await client.call_tool("measure", measured))
        baseline, candidate = (run["path"] for run in pair["runs"])
        again = await client.call_tool("compare", {"baseline": baseline, "candidate": candidate})
        runs = await client.call_tool("runs", {})
        shown = await client.call_tool("show", {"run": baseline, "part": "metrics.0"})
        return [pair, *map(answer, (again, runs, shown))]

    pair, again, runs, shown = served(tmp_path, talk)
    verdict = pair["comparisons"][0]["verdicts"][0]
    assert verdict["metric"] == "throughput"
    assert again["comparisons"][0]["verdicts"][0]["verdict"] == verdict["verdict"]
    assert {run["path"] for run in runs["runs"]} == {run["path"] for run in pair["runs"]}
    assert shown["value"] == pair["runs"][0]["metrics"][0]


def test_a_cancelled_measurement_ends_as_by_ctrl_c_and_leaves_no_process(tmp_path: Path) -> None:
    words = takes(5, "hang")

    async def talk(client: Client) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "measure", {"program": words, "repeats": 1, "steps": 500})
            while not [*tmp_path.glob("results/*/*/steps.jsonl")]:
                await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()

    served(tmp_path, talk)
    (run,) = tmp_path.glob("results/*/*/run.json")
    assert json.loads(run.read_text())["status"] == "interrupted"
    assert processes_of(words) == []


def test_an_error_of_the_command_line_comes_with_its_hint(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    said, hint = error(called(tmp_path, "profile", {"program": [sys.executable, "trian.py"]}))
    assert said == f"there is no file trian.py in {tmp_path.resolve()}"
    assert hint.endswith("train.py")


@pytest.mark.parametrize("directory", ["..", "/", "link", "below/../.."])
def test_a_directory_outside_of_the_folder_is_refused(tmp_path: Path, directory: str) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path)
    said, hint = error(called(folder, "measure", {"program": ["python"], "directory": directory}, NOTHING))
    assert said.startswith(f"directory {directory!r} is outside of {folder.resolve()}")
    assert hint
    assert not [*tmp_path.rglob("started")]


def test_a_directory_below_the_folder_is_where_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    called(tmp_path, "measure", {"program": ["python"], "directory": "below"}, NOTHING)
    assert (tmp_path / "below" / "started").exists()


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("measure", {"program": ["p"], "settings": {"program.directory": "/"}}, "so a tool does not choose it"),
        ("measure", {"program": ["p"], "vs": {"program.directory": "/"}}, "so a tool does not choose it"),
        ("memory", {"program": ["p"], "settings": {"results": "/tmp"}}, "so a tool does not choose it"),
        ("tune", {"program": ["p"], "only": ["program.command"]}, "so a tool does not choose it"),
        (
            "measure",
            {"program": ["p"], "settings": {"program.patch": "/etc/passwd"}},
            "the setting 'program.patch' can",
        ),
        ("measure", {"program": ["p"], "vs": {"program.patch": "/etc/passwd"}}, "the setting 'program.patch' can"),
        ("profile", {"program": ["p"], "settings": {"logging.wandb": True}}, "the setting 'logging.wandb' can"),
        ("tune", {"program": ["p"], "settings": {"logging.wandb_mode": "online"}}, "the setting 'logging.wandb_mode'"),
        (
            "memory",
            {"program": ["p"], "settings": {"logging.wandb_project": "x"}},
            "the setting 'logging.wandb_project'",
        ),
        ("profile", {"program": ["p"], "settings": {"html": "/tmp/x"}}, "unknown setting 'html'"),
        ("profile", {"program": ["p"], "settings": {"": "x"}}, "unknown setting ''"),
        ("measure", {"program": ["a\0b"]}, "cannot be started with these words: embedded null byte"),
        ("measure", {"program": ["p"], "directory": "nowhere"}, "directory 'nowhere' does not exist"),
        ("measure", {"program": ["p"], "directory": "a\0b"}, "directory 'a\\x00b' does not exist"),
        ("measure", {"program": ["p"], "directory": "x" * 900}, "directory 'xxxx"),
        ("show", {"run": "a\0b"}, "cannot be started with these words"),
        ("show", {"run": "--help"}, "'--help' is an option and not a run"),
        ("show", {"run": "../other/results/x"}, "run '../other/results/x' is outside of"),
        ("compare", {"baseline": "latest", "candidate": "/etc"}, "run '/etc' is outside of"),
        ("judge", {"program": ["p"], "ledger": "../edits.jsonl"}, "file '../edits.jsonl' is outside of"),
        ("judge", {"program": ["p"], "ledger": "/tmp/edits.jsonl"}, "file '/tmp/edits.jsonl' is outside of"),
    ],
)
def test_what_would_lead_out_of_the_folder_is_refused_before_anything_starts(
    tmp_path: Path, tool: str, arguments: dict[str, Any], said: str
) -> None:
    found, hint = error(called(tmp_path, tool, arguments, NOTHING))
    assert said in found
    assert hint
    assert not (tmp_path / "started").exists()


def test_no_argument_of_a_tool_can_become_an_option_of_its_own(tmp_path: Path) -> None:
    prints = (sys.executable, "-S", "-c", "import json, sys; print(json.dumps({'runs': [], 'words': sys.argv[1:]}))")
    judged = called(tmp_path, "judge", {"program": ["--json"], "base": "--trust", "budget": "--x"}, prints)
    assert answer(judged)["words"] == [
        "judge",
        "--base=--trust",
        "--budget=--x",
        "--metric=throughput",
        "--json",
        "--",
        "--json",
    ]
    more = {"metric": "latency", "args": ["--lr", "a b"], "base_args": ["--trust"], "ledger": "--x"}
    found = answer(called(tmp_path, "judge", {"program": ["p"], **more}, prints))["words"]
    ledger = f"--ledger={tmp_path.resolve() / '--x'}"
    assert found == [
        *("judge", "--metric=latency", ledger, "--base-args=--trust", "--args=--lr 'a b'", "--json", "--", "p")
    ]
    tuned = called(tmp_path, "tune", {"program": ["p"], "memory": "--trust", "keep_arithmetic": True}, prints)
    words = ["tune", "--budget=10m", "--memory=--trust", "--keep-arithmetic", "--json", "--", "p"]
    assert answer(tuned)["words"] == words


@pytest.mark.parametrize(("code", "is_error"), [(0, False), (3, False), (4, False), (5, False), (2, True), (130, True)])
def test_every_verdict_of_judge_is_an_answer(tmp_path: Path, code: int, is_error: bool) -> None:
    says = f"import sys; print('{{\"verdict\": \"discard\"}}'); sys.stderr.write('error: e\\n'); sys.exit({code})"
    found = called(tmp_path, "judge", {"program": ["p"]}, (sys.executable, "-S", "-c", says))
    assert found.is_error == is_error
    assert texts(found) == (["error: e"] * is_error) + ['{"verdict":"discard"}']


def test_a_failed_run_is_an_error_with_what_was_measured(tmp_path: Path) -> None:
    result = called(tmp_path, "measure", {"program": takes(25, 7), "steps": 500, "repeats": 1})
    assert result.is_error
    said, document = texts(result)
    assert said.startswith("error: ")
    assert "hint: " in said
    assert json.loads(document)["status"] == "failed"


def test_a_command_that_prints_no_document_is_an_error(tmp_path: Path) -> None:
    code = textwrap.dedent("import sys; print('no document'); sys.exit('Traceback')")
    assert texts(called(tmp_path, "runs", {}, (sys.executable, "-S", "-c", code)))[0].endswith("Traceback")


def test_programs_that_the_environment_sends_elsewhere_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("gpubench_program__directory", "/")
    with pytest.raises(UsageError, match="gpubench_program__directory is set"):
        Folder(tmp_path)


def test_a_folder_that_does_not_exist_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        Folder(tmp_path / "nowhere")
