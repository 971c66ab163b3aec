"""The tokens that a host sends to the ranks of its machine, whose clocks are compared with its own by them.

See `gpubench.runs.clocks` for what follows from them. A rank on another machine exchanges them with the host there,
which relays the times with the steps: only differences between times of one host count.
"""

import socket
import time
from contextlib import suppress

import msgspec

from gpubench import events
from gpubench.host.supervision import Peer

SUSPENDED = 0.1
"""The seconds from which on the machine counts as having been suspended."""


class Tokens:
    """When each token was sent to each rank, and what that tells of its reports."""

    def __init__(self) -> None:
        self._sent: dict[int, list[float]] = {}
        """The times by the number of the token, by the rank. That with the number 0 is the job."""
        self._suspended: dict[int, float] = {}
        """For how long the machine had been suspended at the last report, by the rank."""

    def begin(self, rank: int) -> None:
        """Notes that the rank is about to get its job."""
        self._sent[rank], self._suspended[rank] = [time.monotonic()], suspended()

    def exchange(self, peer: Peer, report: events.StepsMeasured) -> events.StepsMeasured:
        """Returns the report with the times that bound its steps, and sends the rank another token.

        A token for which there is no room is left out, so that this never waits.
        """
        sent = self._sent[report.rank]
        number = report.token[1] if report.token else None
        report = msgspec.structs.replace(
            report,
            sent=sent[number] if number is not None and number < len(sent) else None,
            read=peer.heard,
            anew=report.anew or self._was_suspended(report.rank),
        )
        token = events.encode(events.Token(len(sent)))
        sent.append(time.monotonic())
        with suppress(OSError):
            peer.connection.send(token, socket.MSG_DONTWAIT)
        return report

    def _was_suspended(self, rank: int) -> bool:
        """Whether the machine was suspended since the last report. The clock of a GPU may count that time."""
        before, now = self._suspended[rank], suspended()
        self._suspended[rank] = max(before, now)
        return now > before + SUSPENDED


def suspended() -> float:
    """Returns for how many seconds this machine has been suspended, as far as its clocks tell. It may be less if this
    process is interrupted."""
    with_suspension = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
    return with_suspension - time.monotonic()
