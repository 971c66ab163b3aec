"""Runs a program of the user with the probe in it.

The program is started as the user would start it, with a few more environment variables. Which of its processes train
is known once they take their first optimizer step; see `gpubench.probe`.
"""

import json
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from gpubench import events, git, probe, units
from gpubench.errors import ProgramFailed
from gpubench.host.launch import GRACE
from gpubench.host.supervision import EXCEPTION, KILLED, Peer, exit_in_words, last_line
from gpubench.kinds.program import beside, endings, standard_input
from gpubench.kinds.program.beside import StartedProcess
from gpubench.kinds.program.endings import Ending, Image
from gpubench.kinds.program.machines import EVERYWHERE, TORCHRUN_SECONDS, SpreadWorkers, started_together
from gpubench.kinds.program.tokens import Tokens
from gpubench.logs import PROGRAM_OUTPUT
from gpubench.ranks import machine
from gpubench.runs.directory import OUTPUT
from gpubench.settings.programs import CommandSettings

MOST_OUTPUT = 64 * 2**20
"""The bytes of output that are kept of a repeat. The last lines are known in any case, for messages of errors."""
ABSENT_SECONDS = 60.0
"""The seconds after the last step of this machine's ranks in which those of other machines must connect."""

TORCHRUN_FAILED = "ChildFailedError"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"

log = logging.getLogger("gpubench.program")


def step_name(inference: bool) -> str:
    return "call of a model" if inference else "optimizer step"


class ProgramProcesses(SpreadWorkers):
    """The processes of one repeat of a program."""

    output_log = logging.getLogger(PROGRAM_OUTPUT)

    def __init__(
        self,
        job: events.Job,
        settings: CommandSettings,
        directory: Path,
        treatments: Mapping[str, Any],
        wanted: int | None,
        stall_timeout: float,
        keep: Callable[[bytes], None],
        variables: Mapping[str, str],
    ) -> None:
        """Starts the program in `directory` with `treatments`, which are values by dot-key.

        `wanted` is the number of steps after which the probe ends the program; None if the program ends by itself.
        `keep` gets what the program prints. `variables` are more environment variables.
        """
        self._settings = settings
        self._directory = directory
        self._treatments = treatments
        self._wanted = wanted
        self._keep = keep
        self._more = variables
        self._step = "batch" if probe.LOADER_VARIABLE in variables else step_name(probe.INFERENCE_VARIABLE in variables)
        self._kept = 0
        self._address = ""
        self._seen: set[str] = set()
        self._exited: float | None = None
        self._done: float | None = None
        self._images: dict[int, Image] = {}
        """What the ranks of this machine ran when they connected, by rank."""
        self._news: list[events.Message] = []
        """What to say about ranks that have left without a word, and processes that are not measured."""
        self._ancestries: dict[int, list[StartedProcess]] = {}
        """What led from the program's first process to each rank of this machine, when the rank connected."""
        self._unmeasured: set[int] = set()
        """The process ids of those that train and are not ranks."""
        self._tokens = Tokens()
        self._held: dict[int, events.StepsHeld] = {}
        """By rank, the steps that count if the rank ends now without a word."""
        self.shutdown = settings.grace
        super().__init__(job, None, {}, stall_timeout)

    def _start(self, address: str) -> tuple[list["subprocess.Popen[bytes]"], IO[bytes]]:
        self._address = address.removeprefix("unix:")
        given = git.variables(os.environ) if self._settings.ref else os.environ  # a copy is its own repository
        path = os.pathsep.join(filter(None, [str(Path(probe.__file__).parent), os.environ.get("PYTHONPATH")]))
        self._fed = standard_input.OWN.feed()
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        try:
            child = subprocess.Popen(
                self._settings.words,
                cwd=self._directory,
                env=dict(given) | self._variables(path),
                stdin=self._fed.descriptor,
                stdout=writing,
                stderr=writing,
                start_new_session=True,  # only the host receives Ctrl-C
            )
        except OSError as error:
            os.close(reading)
            self._fed.close()
            raise ProgramFailed(f"cannot start the program: {error.strerror}", "check the command after --") from None
        finally:
            os.close(writing)
            self._fed.release()
        return [child], os.fdopen(reading, "rb", buffering=0)

    def _variables(self, path: str) -> dict[str, str]:
        """The environment variables to add. `path` is the PYTHONPATH with the probe."""
        threads = self._treatments.get("performance.cpu_threads")
        expandable = self._treatments.get("performance.expandable_segments")
        variables = {
            "PYTHONPATH": path,
            **self.mark,
            probe.ADDRESS_VARIABLE: self._address,
            probe.TREATMENTS_VARIABLE: json.dumps(self._treatments),
            probe.HOSTS_VARIABLE: str(started_together()),
            **self._more,
        }
        if threads:
            variables |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        if expandable is not None:  # every release of PyTorch reads this one, and first
            given = os.environ.get(ALLOCATOR, os.environ.get("PYTORCH_ALLOC_CONF"))
            variables[ALLOCATOR] = ",".join(filter(None, [given, f"expandable_segments:{expandable}"]))
        return variables

    def stream(self) -> Iterator[events.Message | None]:
        """Yields the events of the ranks, and None about every `TICK` seconds, until the program has been measured.

        Raises ProgramFailed if the program fails, ends or stops before that.
        """
        while not self._is_over():
            yield from self.receive()
            yield from self.news()
            yield None
        yield from self.news()

    def _kill(self, processes: Iterable[psutil.Process]) -> None:
        super()._kill(processes)
        for process in self._processes():
            with suppress(psutil.Error):
                process.kill()

    def _end(self, processes: Iterable[psutil.Process]) -> None:
        try:
            super()._end(processes)
        finally:
            self._fed.close()

    def _processes(self) -> list[psutil.Process]:
        """The processes of the program that still run, also those that have left its session."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(probe.ADDRESS_VARIABLE) == self._address:
                    found.append(process)
        return found

    def _answer(self, peer: Peer, hello: events.Hello) -> None:
        if peer.here and (image := endings.image(hello.pid)):  # before it goes on, as it may replace itself at once
            self._images[hello.rank] = image
        if peer.here:
            self._ancestries[hello.pid] = beside.ancestry(hello.pid, self._children[0].pid)
        self._tokens.begin(hello.rank)
        super()._answer(peer, hello)

    def _stop_admitting(self) -> None:
        """Stops listening for other machines only: a process that trains but is not a rank is still to be reported."""
        if self._listener is None:
            return
        for listening in self._listener.sockets:
            if listening.family != socket.AF_UNIX:
                self._selector.unregister(listening)
        for client in self._listener.close_ports():
            self._hang_up(client)

    def _note_seen(self, seen: events.Seen) -> None:
        self._seen.add(seen.what)
        if seen.what == "trained":
            self._note_unmeasured(seen.pid)

    def _note_refused(self, hello: events.Hello) -> None:
        if hello.machine == machine():
            self._note_unmeasured(hello.pid)

    def _note_unmeasured(self, pid: int) -> None:
        """Keeps what is to be reported of a process that trains but is not a rank."""
        if pid in self._unmeasured or pid in self._ancestries or not self._ancestries:
            return
        self._unmeasured.add(pid)
        later = all(peer.left or peer.lost is not None for peer in self.peers.values())
        found = beside.ancestry(pid, self._children[0].pid)
        first = next(iter(self._ancestries.values()))
        self._news.append(beside.unmeasured(found, first, self._job.repeats[0], later=later))

    def news(self) -> list[events.Message]:
        news, self._news = self._news, []
        return news

    def _read(self, peer: Peer) -> Iterator[events.Message]:
        for message in super()._read(peer):
            if isinstance(message, events.StepsMeasured) and peer not in self.elsewhere:
                yield self._tokens.exchange(peer, message)
            else:
                yield message

    def _note(self, peer: Peer, message: events.Message) -> None:
        super()._note(peer, message)
        if isinstance(message, events.StepsHeld):
            self._held[message.rank] = message
        elif isinstance(message, events.StepsMeasured):
            self._held.pop(message.rank, None)
        elif (
            isinstance(message, events.Planned)
            and message.rank == 0
            and self._job.seconds
            and (self._wanted is None or message.steps < self._wanted)
        ):
            self._tell_length(message)

    def _hang_up(self, peer: Peer) -> None:
        super()._hang_up(peer)
        held = self._held.pop(peer.hello.rank, None) if peer.hello else None
        if held and held.steps and peer.lost is not None:
            measured = events.StepsMeasured(rank=held.rank, steps=held.steps)
            self._note(peer, measured)
            self._news.append(measured)

    def _tell_length(self, planned: events.Planned) -> None:
        """Sends the length that rank 0 has decided on to the other ranks, those that have joined and those to come."""
        assert planned.warmup is not None
        self._wanted = planned.steps
        self._job = msgspec.structs.replace(self._job, length=(planned.warmup, planned.steps, planned.each_update))
        for rank, peer in self.peers.items():
            if rank and peer.lost is None and peer not in self.elsewhere:
                with suppress(OSError):  # a rank that has died is detected later
                    peer.connection.sendall(events.encode(planned))

    def _keep_output(self, data: bytes | None) -> None:
        room = MOST_OUTPUT - self._kept
        if not data:
            return
        self._kept += len(data)
        if room > 0:
            self._keep(data[:room])
            if self._kept > MOST_OUTPUT:
                log.warning("%s has the first %s of what the program printed", OUTPUT, units.size(MOST_OUTPUT))
        self._split(data if room > 0 else data[-4096:])

    def _is_over(self) -> bool:
        """Whether all ranks have left the run and, unless the probe ended it, the program has ended.

        Raises ProgramFailed if that will not happen any more.
        """
        now, code = time.monotonic(), self._children[0].poll()
        self._look_for(now, code)
        if len(self.peers) < self.world_size or not all(peer.left for peer in self.peers.values()):
            self._check_progress(now, code)
            return False
        if self._have_all_steps():
            return True
        self._done = self._done or now
        if code and not (self.failed_elsewhere and now - self._done < TORCHRUN_SECONDS):
            raise self._failed(code)
        return code == 0 or (code is None and now - self._done > self._time_to_end())

    def _time_to_end(self) -> float:
        """The seconds that the program has to end once nothing more is expected of its ranks.

        One that runs on unmeasured still takes its steps, and its probe ends it after the last one.
        """
        if not any(peer.released for peer in self.peers.values()):
            return self.shutdown
        return float("inf") if self._wanted is None else self._stall_timeout

    def _look_for(self, now: float, code: int | None) -> None:
        """Finds out what has become of ranks of this machine whose connection has ended, and releases those of a
        program that goes on without it, or has ended well."""
        for rank, peer in self.peers.items():
            waits = code is None and peer.lost is not None and now - peer.lost < GRACE  # an ending process takes time
            if peer.lost is None or peer.left or waits or rank not in self._images or self._relays:
                continue
            assert peer.hello
            ending = endings.ending_of(peer.hello.pid, self._images[rank])
            if ending is not Ending.died or code == 0:
                peer.released = True
                self._news.append(endings.left(peer, ending, self._job.repeats[0], self._wanted))

    def _check_progress(self, now: float, code: int | None) -> None:
        """Raises ProgramFailed if the program has ended, lost a rank or made no progress."""
        active = [peer for peer in self.peers.values() if not peer.left and peer.lost is None]
        here = [peer for peer in active if peer not in self.elsewhere]
        if code is not None and not (here if code else active):
            self._exited = self._exited or now
            if now - self._exited > (
                TORCHRUN_SECONDS if self.failed_elsewhere else GRACE
            ):  # what it sent last has been read
                if code or not self._processes():
                    raise self._failed(code)
                self._exited = now  # it has put itself into the background
        lost = [peer for peer in self.peers.values() if peer.lost is not None and not peer.released]
        if lost and now - min(peer.lost or now for peer in lost) > TORCHRUN_SECONDS:
            raise ProgramFailed(
                f"{lost[0]} ended {self._position(lost[0])}, and the program goes on without it",
                self._hint(),
            )
        if not self.peers and now - self._started > self._settings.patience:
            raise ProgramFailed(
                f"the program has taken no {self._step} {self._settings.patience:.0f} s after its start",
                f"--program.patience sets the limit; {self._hint()}{self._awaited()}",
            )
        limit = self._stall_timeout
        if not active and self.awaits_machines:
            limit = min(limit, ABSENT_SECONDS)
        if self.peers and now - max(peer.progressed for peer in self.peers.values()) > limit:
            if active:
                slowest = min(active, key=lambda peer: peer.position[1] or 0)
                stalled = f"{slowest} has made no progress for {self._stall_timeout:.0f} s, {self._position(slowest)}"
            else:
                stalled = f"{self._missing()} {limit:.0f} s after the others"
            if self.awaits_machines:
                raise ProgramFailed(stalled, EVERYWHERE)
            raise ProgramFailed(stalled, f"measurement.stall_timeout sets the limit; {self._hint()}")

    def _have_all_steps(self) -> bool:
        """Whether the probe has ended all known ranks, so that the exit code of the program says nothing."""
        return bool(self._wanted) and all(peer.position[1] == self._wanted for peer in self.peers.values())

    def _missing(self) -> str:
        """Says that some ranks took no step, as the beginning of a message."""
        missing = [str(rank) for rank in self.ranks if rank not in self.peers]
        ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {units.listed(missing)} of {self._expected}"
        return f"{ranks} took no {self._step}"

    def _failed(self, code: int) -> ProgramFailed:
        if self.awaits_machines and (not code or self._have_all_steps()):
            return ProgramFailed(f"{self._missing()} until the program ended here", EVERYWHERE)
        if code:
            peers = list(self.peers.values())
            where = self._position(peers[0]) if peers else f"before its first {self._step}"
            hint = KILLED if code == -9 else self._hint()
            return ProgramFailed(f"the program {exit_in_words(code)} {where}", hint)
        if self.peers and len(self.peers) < self.world_size:
            return ProgramFailed(f"{self._missing()} until the program ended", self._hint())
        if self.peers:
            lost = next((peer for peer in self.peers.values() if not peer.left), next(iter(self.peers.values())))
            return ProgramFailed(f"the connection of {lost} ended {self._position(lost)}", self._hint())
        if "python" not in self._seen:
            return ProgramFailed(
                "the program cannot be measured: no Python process was seen that imports sitecustomize",
                "start it without the Python options -S, -I and -E, and let it keep PYTHONPATH, which env -i, sudo and "
                'containers remove; a command that sets it can add to it: PYTHONPATH=src:"$PYTHONPATH"',
            )
        if "torch" not in self._seen:
            return ProgramFailed("no process of the program was seen to import torch", self._hint())
        if probe.INFERENCE_VARIABLE in self._more:
            return ProgramFailed(
                "the program ended, and no call of a model in inference was seen",
                "a step is a call of a torch.nn.Module with parameters, not inside of a compiled function; in a "
                f"program that also trains, in evaluation mode or without gradients; {self._hint()}",
            )
        if probe.LOADER_VARIABLE in self._more:
            return ProgramFailed(
                "the program ended, and no optimizer step was seen, which shows which DataLoader trains",
                f"without training, give its data: gpubench loader --data module:callable; {self._hint()}",
            )
        return ProgramFailed(
            "the program ended, and no optimizer step was seen",
            "a step is a call of step() of a torch.optim optimizer, as ZeroRedundancyOptimizer is one and "
            "DistributedOptimizer is none; or of backward() in a program that makes no such optimizer, from the eighth "
            "on; neither is seen inside of a compiled function; --inference measures a program that does not train; "
            f"{self._hint()}",
        )

    def _position(self, peer: Peer) -> str:
        """The step in which a rank is, or has ended. One that has not left may have taken more than it sent."""
        if peer.position[0] != "a step":
            return f"after its first {self._step} or later"
        return peer.where if peer.done else f"{peer.where} or later"

    def _hint(self) -> str:
        ref = self._settings.ref
        without = f"{ref} runs in a clone, which has no untracked files; " if ref else ""
        found, output = f"{without}{OUTPUT} has what it printed", self.output
        first = next(filter(EXCEPTION.match, output), None)
        if first and any(TORCHRUN_FAILED in line for line in output):  # its report comes after the errors of the ranks
            return f"{found}, whose first error is {first[:200]}"
        return f"{found}, last: {line}" if (line := last_line(output)) else found

    def _awaited(self) -> str:
        """What the program may wait for, as the end of a hint."""
        return "; standard input is open: add < /dev/null if it has nothing for it" * standard_input.OWN.is_awaited
