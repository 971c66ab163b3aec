"""What the host does for each report of a rank: it says when it read it, and sends a token without waiting."""

import json
import socket
import time
from collections.abc import Iterator

import pytest
from recorded_runs import step

from gpubench import events
from gpubench.host.supervision import Peer
from gpubench.kinds.program import tokens
from gpubench.kinds.program.tokens import Tokens

Pair = tuple[Peer, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The host's connection to a rank, and that of the rank."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.setblocking(False)
    with ours, theirs:
        yield Peer(ours), theirs


def report(**fields: object) -> events.StepsMeasured:
    return events.StepsMeasured(rank=0, steps=[step(0)], **fields)  # type: ignore[arg-type]


def test_a_report_gets_the_times_of_its_token_and_of_its_arrival(pair: Pair) -> None:
    peer, rank = pair
    made = Tokens()
    moments = [time.monotonic()]
    made.begin(0)
    for number in range(3):
        moments.append(time.monotonic())
        peer.heard = time.monotonic()
        found = made.exchange(peer, report(token=(0, number)))
        assert found.sent is not None
        assert moments[number] <= found.sent <= moments[number + 1]
        assert found.read == peer.heard
    assert [json.loads(line) for line in rank.recv(4096).splitlines()] == [{"token": n} for n in (1, 2, 3)]


def test_what_a_rank_claims_of_the_times_of_its_host_does_not_count(pair: Pair) -> None:
    peer, _ = pair
    peer.heard = 7.0
    made = Tokens()
    made.begin(0)
    for token in (None, (0, 9), (0, 2**31 - 1)):  # none, and some that were not sent
        found = made.exchange(peer, report(token=token, sent=5.0, read=6.0))
        assert (found.sent, found.read) == (None, 7.0)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_that_reads_no_tokens_or_is_gone_is_not_waited_for(pair: Pair, leaves: bool) -> None:
    peer, rank = pair
    made = Tokens()
    made.begin(0)
    if leaves:
        rank.close()
    for _ in range(20_000 if not leaves else 10):
        made.exchange(peer, report())
    if not leaves:
        lines = rank.recv(1 << 20).splitlines()
        assert 10 < len(lines) < 20_000
        assert json.loads(lines[-1]) == {"token": len(lines)}, "those for which there is no room are left out whole"


def test_the_clocks_are_compared_anew_once_the_machine_was_suspended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, _ = pair
    asleep = [10.0, 10.0, 310.0, 309.0, 310.0]  # the reading before the last one was interrupted for a second
    monkeypatch.setattr(tokens, "suspended", lambda: asleep.pop(0))
    made = Tokens()
    made.begin(0)
    assert [made.exchange(peer, report()).anew for _ in range(4)] == [False, True, False, False]


def test_the_times_reach_the_host_of_another_machine_with_the_steps(pair: Pair) -> None:
    peer, _ = pair
    made = Tokens()
    made.begin(0)
    found = made.exchange(peer, report(token=(0, 0), anew=True))
    assert events.decode_of(0, events.encode(found)) == found
