"""gpubench mcp"""

import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gpubench.errors import UsageError

SERVER = "mcp.server.mcpserver"
"""What version 1 of the package did not have."""
EPILOG = """Examples:

gpubench mcp

gpubench mcp projects/model

An MCP client starts it, and talks to it on stdin and stdout.

Exit codes: 0 the client left, 2 usage error, 130 interrupted.
"""


def mcp(
    ctx: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(metavar="[FOLDER]", help="Run programs only in this folder and below.", show_default=False),
    ] = Path(),
) -> None:
    """Serve a coding agent: offer these commands as tools of an MCP server."""
    installed = None
    with suppress(ModuleNotFoundError):
        installed = find_spec(SERVER)
    if installed is None:
        hint = "pip install 'mcp>=2.3', in gpubench's environment"
        raise UsageError("gpubench mcp needs the mcp package, 2.3 or later", hint)
    if sys.stdin is None or sys.stdin.isatty():
        where = "closed" if sys.stdin is None else "a terminal"
        hint = "configure this command in the client, which starts it; see docs/commands/mcp.md"
        raise UsageError(f"gpubench mcp talks to an MCP client on stdin, and stdin is {where}", hint)

    from gpubench.agents.server import serve

    serve(folder, ctx.find_root().command.commands.keys())  # type: ignore[attr-defined]  # it is a group
