"""gpubench mcp as a client starts it, and what it says where there is no client."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli import complaint
from places import SUPPORT
from running import HOST, PATIENCE, Finished, environment, processes_of

from gpubench.commands import mcp

CommandLine = Callable[..., Finished]
PROGRAM = [sys.executable, str(SUPPORT / "training_program.py"), "5", "hang"]
SERVER = [*HOST, "-m", "gpubench", "mcp"]


def test_without_the_extra_it_says_what_to_install(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "SERVER", "no_such_package.server")
    assert complaint(command_line("mcp")) == (
        "gpubench mcp needs the mcp package, 2.3 or later",
        "pip install 'mcp>=2.3', in gpubench's environment",
    )


def test_on_a_terminal_it_says_that_it_waits_for_no_user(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp")
    ours, terminal = os.openpty()
    with os.fdopen(ours), os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        error, hint = complaint(command_line("mcp"))
    assert error == "gpubench mcp talks to an MCP client on stdin, and stdin is a terminal"
    assert "docs/commands/mcp.md" in hint


def test_a_folder_that_does_not_exist_is_refused(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        error, _ = complaint(command_line("mcp", "nowhere"))
    assert error == "nowhere is not a folder"


@pytest.mark.stress
def test_a_client_starts_it_and_is_served_until_it_leaves(tmp_path: Path) -> None:
    sdk = pytest.importorskip("mcp")
    anyio = pytest.importorskip("anyio")
    server = sdk.StdioServerParameters(command=SERVER[0], args=[*SERVER[1:], str(tmp_path)], env=environment())

    async def main() -> None:
        async with sdk.Client(sdk.stdio_client(server, errlog=sys.__stderr__)) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert {"measure", "profile", "memory", "tune", "compare", "runs", "show"} <= {*names}
            result = await client.call_tool("measure", {"program": ["python", "nothing.py"]})
            assert result.is_error
            assert result.content[0].text.startswith(f"error: there is no file nothing.py in {tmp_path.resolve()}")

    anyio.run(main)
    assert processes_of([*SERVER, str(tmp_path)]) == []


@pytest.mark.stress
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, None])
def test_a_server_that_is_ended_ends_what_it_runs(tmp_path: Path, end: signal.Signals | None) -> None:
    """By a signal, or because its client has left, which closes its stdin."""
    pytest.importorskip("mcp")
    words = {"program": PROGRAM, "repeats": 1, "steps": 500}
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    messages: list[dict[str, Any]] = [
        {"method": "initialize", "id": 1, "params": client},
        {"method": "notifications/initialized"},
        {"method": "tools/call", "id": 2, "params": {"name": "measure", "arguments": words}},
    ]
    with subprocess.Popen(
        [*SERVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
    ) as server:
        assert server.stdin
        assert server.stdout
        server.stdin.writelines(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in messages)
        server.stdin.flush()
        deadline = time.monotonic() + PATIENCE
        while not [*tmp_path.glob("results/*/*/steps.jsonl")]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if end:
            server.send_signal(end)
        else:
            server.stdin.close()
        for line in server.stdout:
            assert json.loads(line)["jsonrpc"] == "2.0"  # and nothing else
        assert server.wait(PATIENCE) == (130 if end else 0)
    (run,) = tmp_path.glob("results/*/*/run.json")
    assert json.loads(run.read_text())["status"] == "interrupted"
    assert processes_of(PROGRAM) == []
