"""Runs the command line of gpubench for a tool, in a process of its own, and ends it as Ctrl-C does."""

import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import Process

from gpubench import units
from gpubench.errors import Interrupted, UsageError

GPUBENCH = (sys.executable, "-P", "-m", "gpubench")
"""The words that start gpubench. Without -P, a file of the user such as queue.py would be imported in place of Python's
own."""
SECONDS_TO_END = 90.0
"""The seconds that an interrupted command has to end its program, which gets 30, and to write what was measured."""
LAST_LINES = 20
"""The number of lines of a failure without an error message that are passed on."""
MOST_OF_A_LINE = 600
"""The number of characters that are passed on of a line."""
MOST_OUTPUT = 64 * 2**20
"""The bytes of a document that are read: ten times those of a profile of 64 ranks."""
MOST_LINES = 1000
"""The number of the last lines of stderr that are kept."""
LONGEST = 16 * 2**10
"""The bytes of a line of stderr that are kept."""
AGAIN = 0.05
"""The seconds between two looks whether all commands have ended."""
GUARD = 'read -r line; kill -INT "$1"'
"""Waits for the end of this process, whose pipe then closes, and interrupts a command."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ERROR, HINT = "error: ", "hint: "

Told = Callable[[float, str], Awaitable[None]]
"""Is told a line of progress, and after how many seconds it came."""


@dataclass(frozen=True)
class Ended:
    """What a command left when it ended."""

    code: int
    output: str
    lines: tuple[str, ...]
    """What it wrote to stderr."""

    @property
    def error(self) -> str:
        """The error and the hint that it printed, or else its last lines."""
        starts = [number for number, line in enumerate(self.lines) if line.startswith(ERROR)]
        said = [line for line in self.lines[starts[-1] :] if line.startswith((ERROR, HINT))] if starts else []
        found = said or [f"{ERROR}gpubench ended with {self.code}", *self.lines[-LAST_LINES:]]
        return "\n".join(line[:MOST_OF_A_LINE] for line in found)


class CommandLine:
    """Runs commands of gpubench. Those that measure run one after the other, as they would slow each other down."""

    def __init__(self, launcher: Sequence[str] = GPUBENCH) -> None:
        """`launcher` are the words that start gpubench."""
        self._launcher = launcher
        self._measures = anyio.Lock()
        self._running: set[anyio.CancelScope] = set()
        self._ends = False

    async def measure(self, words: Sequence[str], directory: Path, told: Told) -> Ended:
        """Runs a command that measures, once those before it have ended."""
        if self._measures.locked():
            await told(0.0, "waits until the measurement before it has ended")
        async with self._measures:
            return await self.run(words, directory, told)

    async def run(self, words: Sequence[str], directory: Path, told: Told) -> Ended:
        """Runs a command to its end; if the caller is cancelled, it ends the command before it returns.

        Raises UsageError for words that no process can be given and for a document larger than `MOST_OUTPUT`, and
        Interrupted if `end_all` has ended the command.
        """
        with anyio.CancelScope() as scope:
            if self._ends:
                scope.cancel()
            self._running.add(scope)
            try:
                return await self._run(words, directory, told)
            finally:
                self._running.discard(scope)
        raise Interrupted("the server has ended this command", "start the server again")

    async def _run(self, words: Sequence[str], directory: Path, told: Told) -> Ended:
        output = bytearray()
        printed = 0
        lines: deque[str] = deque(maxlen=MOST_LINES)
        began = time.monotonic()
        process = await self._start(words, directory)

        async def keep(stream: AsyncIterable[bytes]) -> None:
            nonlocal printed
            async for part in stream:
                printed += len(part)
                output.extend(part[: MOST_OUTPUT - len(output)])

        async def tell(stream: AsyncIterable[bytes]) -> None:
            async for line in _lines(stream):
                lines.append(line)
                if not line.startswith((ERROR, HINT)):
                    await told(time.monotonic() - began, line[:MOST_OF_A_LINE])

        try:
            with _guarded(process.pid):
                async with anyio.create_task_group() as tasks:
                    for read, stream in ((keep, process.stdout), (tell, process.stderr)):
                        assert stream
                        tasks.start_soon(read, stream)
                code = await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
                await process.aclose()
        if printed > MOST_OUTPUT:
            raise UsageError(
                f"the command printed {units.size(printed)}, and {units.size(MOST_OUTPUT)} are read",
                "the run directory has all files: read those",
            )
        return Ended(code, output.decode(errors="replace"), tuple(lines))

    async def _start(self, words: Sequence[str], directory: Path) -> Process:
        try:
            return await anyio.open_process([*self._launcher, *words], cwd=directory, stdin=subprocess.DEVNULL)
        except (OSError, ValueError) as error:  # words that are too many, or that contain a NUL character
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"gpubench cannot be started with these words: {reason}", "shorten or leave them out"
            ) from None

    async def end_all(self) -> None:
        """Ends all commands that run, and returns when they have ended. None can be started any longer."""
        self._ends = True
        for scope in self._running:
            scope.cancel()
        while self._running:
            await anyio.sleep(AGAIN)


@contextmanager
def _guarded(pid: int) -> Iterator[None]:
    """A context in which a shell interrupts the process, as Ctrl-C does, if this one is killed."""
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD, "sh", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what ends the group of the server must not end it
    )
    with guard:
        try:
            yield
        finally:
            guard.kill()
            guard.wait()  # before its pipe is closed


async def _end(process: Process) -> None:
    """Interrupts a process as Ctrl-C does, and waits for its end. One that does not end is killed."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with anyio.move_on_after(SECONDS_TO_END):
        async with anyio.create_task_group() as tasks:
            for stream in (process.stdout, process.stderr):  # it may wait until somebody reads what it writes
                if stream:
                    tasks.start_soon(_drain, stream)
            await process.wait()
            tasks.cancel_scope.cancel()
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _drain(stream: AsyncIterable[bytes]) -> None:
    async for _ in stream:
        pass


async def _lines(stream: AsyncIterable[bytes]) -> AsyncIterable[str]:
    """Yields the first `LONGEST` bytes of each line of a stream, without colours."""
    rest = b""
    async for part in stream:
        *whole, rest = (rest + part).split(b"\n")
        rest = rest[:LONGEST]
        for line in whole:
            yield COLOURS.sub("", line[:LONGEST].decode(errors="replace"))
    if rest:
        yield COLOURS.sub("", rest.decode(errors="replace"))
