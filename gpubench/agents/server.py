"""The MCP server: a tool for each command that a coding agent needs, which runs that command with --json."""

import json
import os
import shlex
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field, WithJsonSchema

from gpubench import __version__
from gpubench.agents import answers
from gpubench.agents.command_line import ERROR, HINT, CommandLine, Ended
from gpubench.agents.folder import Folder, refuse_settings
from gpubench.errors import GpubenchError, Interrupted
from gpubench.registry import LOADER, PROGRAM, PROGRAM_MEMORY, PROGRAM_PROFILE

INSTRUCTIONS = """\
gpubench measures PyTorch programs and decides whether a change made one faster. Measure the program, profile it, make \
one change, and have the change judged against the commit before it; a difference between two single runs proves \
nothing. One measurement runs at a time and takes minutes: do nothing else on the machine meanwhile. Every answer is \
short and says what it leaves out; `show` gives any part of a run. Times are in seconds, memory is in bytes."""

TEXT: dict[str, Any] = {"type": "string"}
TEXTS: dict[str, Any] = {"items": TEXT, "type": "array"}
SETTINGS: dict[str, Any] = {"additionalProperties": {"type": ["string", "number", "boolean"]}, "type": "object"}
"""How the types below are told to a client: without their limits, which would be a tenth of what an agent reads."""
Text = Annotated[str, Field(max_length=1000), WithJsonSchema(TEXT)]
Key = Annotated[str, Field(max_length=200), WithJsonSchema(TEXT)]
Keys = Annotated[list[Key], Field(max_length=1000), WithJsonSchema(TEXTS)]
Words = Annotated[Sequence[Annotated[str, Field(max_length=10_000)]], Field(max_length=1000), WithJsonSchema(TEXTS)]
Setting = Text | float | bool
Program = Annotated[
    Words, Field(description='The command as a list of words, such as ["python", "train.py"]. No shell reads it.')
]
Directory = Annotated[
    Text, Field(description="The working directory, relative to the folder of the server, which it must not leave.")
]
Settings = Annotated[
    Annotated[dict[Key, Setting], Field(max_length=1000), WithJsonSchema(SETTINGS)] | None,
    Field(description='Settings by dotted name, such as {"data.workers": 2}, applied without a change of the program.'),
]
Steps = Annotated[int | None, Field(description="Steps measured in each repeat; chosen for the program if left out.")]
Inference = Annotated[bool, Field(description="Whether the program infers, and takes no optimizer step.")]
Run = Annotated[Text, Field(description="A run: its id, its path, its name, latest, or latest~1.")]
Part = Annotated[Text, Field(description="A part that an answer named in omitted, such as profile.ranks.0.modules.")]
First = Annotated[int, Field(ge=0, description="The number of the first item, if the part is a list.")]
VsRef = Annotated[
    Text | None, Field(description="Also run the program as of this git commit, interleaved, and compare.")
]
Verify = Annotated[bool, Field(description="Also run each proposed fix, and measure its effect; takes longer.")]

ANSWERED = frozenset({0})
JUDGED = frozenset({0, 3, 4, 5})
"""The exit codes of judge: keep, discard, undecided, refused."""
Shape = Callable[[Mapping[str, Any]], Any]


class Tools:
    """The tools. Each one is a method, whose docstring and parameters are what the client is told of it."""

    def __init__(self, folder: Folder, commands: CommandLine) -> None:
        self._folder = folder
        self._commands = commands

    async def measure(
        self,
        context: Context,
        program: Program,
        directory: Directory = ".",
        steps: Steps = None,
        repeats: Annotated[int | None, Field(description="Repeats in fresh processes; 3 by default.")] = None,
        inference: Inference = False,
        settings: Settings = None,
        vs: Annotated[
            Settings, Field(description="Also run with these settings changed, interleaved, and compare.")
        ] = None,
        vs_ref: VsRef = None,
        vs_args: Annotated[
            Words | None, Field(description="Also run with these arguments added, interleaved, and compare.")
        ] = None,
    ) -> CallToolResult:
        """Measure how fast a program trains or infers, and where the time of a step goes."""
        options = _options(steps=steps, repeats=repeats, inference=inference, vs_ref=vs_ref)
        if vs_args:
            options.append(f"--vs-args={shlex.join(vs_args)}")
        options += [f"--vs={one}" for one in _assignments(PROGRAM, vs)]
        return await self._measure(
            context, "train-bench", program, directory, [*options, *_settings(PROGRAM, settings)]
        )

    async def profile(
        self,
        context: Context,
        program: Program,
        directory: Directory = ".",
        steps: Steps = None,
        inference: Inference = False,
        verify: Verify = False,
        data: Annotated[bool, Field(description="Diagnose how its batches are made.")] = False,
        settings: Settings = None,
    ) -> CallToolResult:
        """Find why a program is not faster: findings with file, line, cause, fix, and what the fix saves at most."""
        options = _options(steps=steps, inference=inference, verify=verify)
        options += _settings(LOADER if data else PROGRAM_PROFILE, settings)
        return await self._measure(context, "loader" if data else "profile", program, directory, options)

    async def memory(
        self,
        context: Context,
        program: Program,
        directory: Directory = ".",
        steps: Steps = None,
        verify: Verify = False,
        settings: Settings = None,
        vs_ref: VsRef = None,
    ) -> CallToolResult:
        """Find what uses the memory of a program that trains, in each phase and at its peak, and what saves some."""
        options = _options(steps=steps, verify=verify, vs_ref=vs_ref)
        options += _settings(PROGRAM_MEMORY, settings)
        return await self._measure(context, "memory", program, directory, options)

    async def judge(
        self,
        context: Context,
        program: Program,
        directory: Directory = ".",
        base: Annotated[Text | None, Field(description="The commit to judge against; HEAD by default.")] = None,
        budget: Annotated[Text | None, Field(description="Take at most about this long: 10m.")] = None,
        margin: Annotated[Text | None, Field(description="The smallest gain that counts: 1%.")] = None,
        metric: Annotated[Text, Field(description="throughput, latency, peak_memory, energy")] = "throughput",
        base_args: Annotated[Words, Field(description="Arguments of the base.")] = (),
        args: Annotated[Words, Field(description="Arguments of the edited one.")] = (),
        ledger: Annotated[Text, Field(description="A file to add the decision to.")] = "",
    ) -> CallToolResult:
        """Decide on the edits in the working tree: keep, discard, undecided, or refused.

        Keep means proved to be faster with the same work and an unharmed loss.
        """
        added = {"base_args": base_args, "args": args}
        words = {name: shlex.join(given) for name, given in added.items() if given}
        file = self._folder.file(ledger, self._folder.below(directory)) if ledger else None
        options = _options(base=base, budget=budget, margin=margin, metric=metric, ledger=file, **words)
        return await self._measure(context, "judge", program, directory, options, answered=JUDGED, shape=dict)

    async def tune(
        self,
        context: Context,
        program: Program,
        directory: Directory = ".",
        budget: Annotated[Text, Field(description="Take at most about this long: 90s, 10m or 1h.")] = "10m",
        only: Annotated[Keys | None, Field(description="Try these settings only, by dotted name.")] = None,
        memory: Annotated[Text | None, Field(description="Keep no settings that need more, such as 22GiB.")] = None,
        keep_arithmetic: Annotated[bool, Field(description="Try no other precision and no other batch size.")] = False,
        inference: Inference = False,
        settings: Settings = None,
    ) -> CallToolResult:
        """Search for the fastest settings of a program, prove their gain, and name the lines of code to write."""
        refuse_settings(PROGRAM, only or ())
        options = _options(budget=budget, memory=memory, keep_arithmetic=keep_arithmetic, inference=inference)
        options += [f"--only={','.join(only)}"] if only else []
        options += _settings(PROGRAM, settings)
        return await self._measure(context, "tune", program, directory, options, shape=dict)

    async def compare(
        self,
        context: Context,
        baseline: Run,
        candidate: Run,
        directory: Directory = ".",
        metric: Annotated[Text | None, Field(description="Judge only this metric, such as step_time.")] = None,
        part: Part = "",
        first: First = 0,
    ) -> CallToolResult:
        """Decide which of two runs is faster, by how much, whether that is certain, and what explains it."""
        place = self._folder.below(directory)
        names = [self._folder.run(name, place) for name in (baseline, candidate)]
        ended = await self._commands.run(
            ["compare", *_options(metric=metric), "--json", *names], place, partial(_tell, context)
        )
        return await _answer(ended, dict, "compare with these runs, and one of these parts", part=part, first=first)

    async def runs(
        self,
        context: Context,
        directory: Directory = ".",
        limit: Annotated[int, Field(description="List at most this many, the newest first.")] = 10,
        where: Annotated[Words | None, Field(description="Runs with these settings: precision=bf16.")] = None,
        since: Annotated[Text | None, Field(description="Runs that began since: 12h, 30d or 2026-11-01.")] = None,
    ) -> CallToolResult:
        """List what was run below the directory, with the first figures of each run."""
        options = [*_options(limit=limit, since=since), *(f"--where={one}" for one in where or ())]
        ended = await self._commands.run(
            ["runs", *options, "--json"], self._folder.below(directory), partial(_tell, context)
        )
        return await _answer(ended, answers.of_listing, "runs with a lower limit, or show with one of these runs")

    async def show(
        self, context: Context, run: Run, directory: Directory = ".", part: Part = "", first: First = 0
    ) -> CallToolResult:
        """Show the results of a run again, or any part of them that another answer left out."""
        place = self._folder.below(directory)
        words = ["runs", "show", "--json", self._folder.run(run, place)]
        ended = await self._commands.run(words, place, partial(_tell, context))
        return await _answer(
            ended, answers.of_shown, "show with this run, and one of these parts", part=part, first=first
        )

    async def _measure(
        self,
        context: Context,
        command: str,
        program: Sequence[str],
        directory: str,
        options: Sequence[str],
        *,
        answered: Collection[int] = ANSWERED,
        shape: Shape = answers.of_runs,
    ) -> CallToolResult:
        """Runs a command that measures the program, and shortens what it printed."""
        words = [command, *options, "--json", "--", *program]
        place = self._folder.below(directory)
        ended = await self._commands.measure(words, place, partial(_tell, context))
        return await _answer(
            ended, shape, "show with the path of a run, this directory, and one of these parts", answered
        )


TOOLS = {
    "measure": "train-bench",
    "profile": "profile",
    "memory": "memory",
    "judge": "judge",
    "tune": "tune",
    "compare": "compare",
    "runs": "runs",
    "show": "runs",
}
"""The command of gpubench that each tool runs, by the name of the tool."""
READING = {"compare", "runs", "show"}
"""The tools that start no program and change nothing."""


def made(folder: Folder, commands: CommandLine, known: Collection[str]) -> MCPServer:
    """Returns the server, with the tools whose command is `known`."""
    server = MCPServer("gpubench", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    tools = Tools(folder, commands)
    for name, command in TOOLS.items():
        if command in known:
            server.add_tool(
                _reporting(getattr(tools, name)),
                description=getdoc(getattr(Tools, name)),
                annotations=ToolAnnotations(read_only_hint=name in READING),
                structured_output=False,
            )
    return server


def serve(folder: Path, known: Collection[str]) -> None:
    """Serves one client on stdin and stdout until it leaves, or until a signal ends the server and all that it runs.

    `known` are the commands of gpubench. Raises UsageError for a folder that cannot be served.
    """
    commands = CommandLine()
    anyio.run(_serve, made(Folder(folder), commands, known), commands)


async def _serve(server: MCPServer, commands: CommandLine) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_end_on_signal, commands)
        try:
            await server.run_stdio_async()
        except* BrokenPipeError:  # the client has left
            pass
        tasks.cancel_scope.cancel()


async def _end_on_signal(commands: CommandLine) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            await commands.end_all()
            os._exit(Interrupted.exit_code)  # the thread that reads stdin would wait for one more line


Tool = Callable[..., Awaitable[CallToolResult]]


def _reporting(tool: Tool) -> Tool:
    """Returns a tool that answers with an error, as the command line prints it, where the tool raises one."""

    @wraps(tool)
    async def call(**arguments: Any) -> CallToolResult:
        try:
            return await tool(**arguments)
        except GpubenchError as error:
            return _failed(f"{ERROR}{error.message}" + (f"\n{HINT}{error.hint}" if error.hint else ""))

    return call


async def _tell(context: Context, seconds: float, line: str) -> None:
    await context.report_progress(seconds, message=line)


async def _answer(
    ended: Ended,
    shape: Shape,
    more: str,
    answered: Collection[int] = ANSWERED,
    *,
    part: str = "",
    first: int = 0,
) -> CallToolResult:
    """Returns the document that a command printed, shortened; and its error, unless the exit code is an answer.

    It is shortened in a thread, so that the server answers and can be ended meanwhile, however large it is.
    """

    def shortened() -> str | None:
        try:
            document = json.loads(ended.output)
        except (ValueError, RecursionError):
            return None
        return answers.written(shape(document), more, part, first)

    text = await anyio.to_thread.run_sync(shortened, abandon_on_cancel=True)
    if text is None:
        return _failed(ended.error)
    return CallToolResult(content=[_text(text)]) if ended.code in answered else _failed(ended.error, text)


def _failed(*texts: str) -> CallToolResult:
    return CallToolResult(content=[_text(text) for text in texts], is_error=True)


def _text(text: str) -> TextContent:
    return TextContent(type="text", text=text[: answers.MOST])


def _options(**values: str | float | None) -> list[str]:
    """Returns the options with these names and values, without those that are None or False."""
    given = {f"--{name.replace('_', '-')}": value for name, value in values.items() if value is not None}
    return [name if value is True else f"{name}={value}" for name, value in given.items() if value is not False]


def _settings(command: str, settings: Mapping[str, Setting] | None) -> list[str]:
    return [f"--{one}" for one in _assignments(command, settings)]


def _assignments(command: str, settings: Mapping[str, Setting] | None) -> list[str]:
    """Returns settings of the runs of `command` as KEY=VALUE. Raises an error for those that a tool must not choose."""
    refuse_settings(command, settings or ())
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in (settings or {}).items()
    ]
