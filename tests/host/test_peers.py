"""Which rank is to blame when nothing moves: the one that stopped, and not those that wait for it."""

import socket

import msgspec
import pytest

from gpubench.channel import EVERYONE, Activity, Doing
from gpubench.errors import WorkerLost
from gpubench.events import Failed, Hello
from gpubench.host import supervision
from gpubench.host.supervision import Peer, Setups, blame, last_line, stalled
from gpubench.ranks import machine

NOW = 1000.0
PATIENCE = 600.0
DEADLINE = 60.0


def peer(
    rank: int,
    words: str,
    idle: float,
    *,
    waits_for: int | None = None,
    within: float | None = None,
    done: bool = False,
    silent: float = 0.0,
    patience_factor: float = 1.0,
) -> Peer:
    """A rank that has been at `words` for `idle` seconds."""
    connection = socket.socket()
    connection.close()
    return Peer(
        connection,
        Hello(rank=rank, world_size=3, pid=100 + rank, host="here", machine="here", secret=""),
        heard=NOW - silent,
        progressed=NOW - idle,
        position=(words, None),
        waits_for=waits_for,
        within=within,
        done=done,
        patience_factor=patience_factor,
    )


def blamed(*peers: Peer) -> WorkerLost | None:
    return stalled(dict(enumerate(peers)), len(peers), NOW, 0.0, PATIENCE)


def test_a_rank_that_waits_for_one_that_gets_on_is_only_late() -> None:
    filling = peer(2, "waiting for sample 0 from rank 1", 900, waits_for=1, within=DEADLINE)
    between = peer(1, "waiting for sample 0 from rank 0", 900, waits_for=0, within=DEADLINE)
    assert blamed(peer(0, "evaluation 17 of 50 of sample 0", 2, within=DEADLINE), between, filling) is None


def test_the_rank_at_the_end_of_the_chain_is_blamed_and_all_that_wait_for_it_are_named() -> None:
    found = blamed(
        peer(0, "evaluation 17 of 50 of sample 5", 61, within=DEADLINE),
        peer(1, "waiting for sample 5 from rank 0", 40, waits_for=0, within=DEADLINE),
        peer(2, "waiting for sample 4 from rank 1", 70, waits_for=1, within=DEADLINE),
    )
    assert found
    assert found.message == (
        "rank 0 (pid 100 on here) has made no progress for 61 s, in evaluation 17 of 50 of sample 5; "
        "rank 1 has been waiting for sample 5 from rank 0 for 40 s; "
        "rank 2 has been waiting for sample 4 from rank 1 for 70 s"
    )
    assert found.hint
    assert "pipeline.deadline" in found.hint


def test_a_rank_that_has_finished_and_left_another_waiting_is_blamed() -> None:
    found = blamed(
        peer(0, "leaving", 90, done=True), peer(1, "waiting for sample 7 from rank 0", 61, waits_for=0, within=DEADLINE)
    )
    assert found
    assert found.message.startswith("rank 0 (pid 100 on here) has finished; rank 1 has been waiting for sample 7")


def test_who_waits_for_everyone_is_stuck_only_with_all_of_them() -> None:
    patient = peer(0, "waiting for all ranks", 900, waits_for=EVERYONE)
    assert blamed(patient, peer(1, "evaluation 3 of 9 of sample 1", 50, within=DEADLINE)) is None
    found = blamed(patient, peer(1, "evaluation 3 of 9 of sample 1", 61, within=DEADLINE))
    assert found
    assert found.message.startswith("rank 1 ")
    assert blamed(patient, peer(1, "waiting for all ranks", 700, waits_for=EVERYONE))


def test_without_a_deadline_of_its_own_a_rank_has_the_patience_of_the_run() -> None:
    assert blamed(peer(0, "building the model", 599)) is None
    found = blamed(peer(0, "building the model", 601))
    assert found
    assert found.hint
    assert "measurement.stall_timeout" in found.hint


def test_a_rank_that_compiles_with_autotuning_may_take_three_times_as_long() -> None:
    assert blamed(peer(0, "forward", 3 * PATIENCE - 1, patience_factor=3.0)) is None
    found = blamed(peer(0, "forward", 3 * PATIENCE + 1, patience_factor=3.0))
    assert found
    assert "measurement.stall_timeout" in (found.hint or "")
    silent = blamed(peer(0, "forward", 40, patience_factor=3.0, silent=31))
    assert silent, "the heartbeat goes on while it compiles"


def test_a_heartbeat_carries_how_much_patience_its_rank_needs() -> None:
    activity = Activity()
    assert activity.heartbeat(0).patience_factor == 1.0
    activity.patience_factor = 3.0
    activity.doing = "forward"
    assert activity.heartbeat(0).patience_factor == 3.0


def test_a_silent_rank_is_blamed_before_those_that_it_holds_up() -> None:
    found = blamed(
        peer(0, "waiting for rank 1 to take sample 3", 61, waits_for=1, within=DEADLINE),
        peer(1, "evaluation 9 of 12 of sample 2", 31, within=DEADLINE, silent=31),
    )
    assert found
    assert found.message.startswith("rank 1 (pid 101 on here) has been silent for 31 s, in evaluation 9 of 12")


def test_the_last_word_of_the_loop_stands_whatever_another_thread_said_before() -> None:
    activity = Activity()
    activity.watch(lambda: Doing("waiting for rank 1 to take sample 3", 1, DEADLINE))
    beat = activity.heartbeat(0)
    assert (beat.doing, beat.waits_for, beat.within) == ("waiting for rank 1 to take sample 3", 1, DEADLINE)
    activity.enter("evaluation 1 of 4 of sample 4", within=5.0)
    beat = activity.heartbeat(0)
    assert (beat.doing, beat.waits_for, beat.within) == ("evaluation 1 of 4 of sample 4", None, 5.0)
    activity.doing = "forward"
    assert activity.heartbeat(0).within is None


def failed(rank: int, message: str, kind: str = "RunFailed", *, secondary: bool = False) -> tuple[float, Failed]:
    """A failure that was heard `rank` seconds late."""
    told = Failed(
        rank=rank, kind=kind, message=message, hint=None, traceback=None, doing="", step=None, secondary=secondary
    )
    return NOW + rank, told


def explained(*failures: tuple[float, Failed], world_size: int = 3, machine: str = "here") -> str:
    peers = {rank: peer(rank, "evaluation 1 of 4 of sample 0", 0) for rank in range(world_size)}
    assert peers[1].hello
    peers[1].hello = msgspec.structs.replace(peers[1].hello, machine=machine)
    return blame(peers, world_size, failures, [], []).message


def test_an_error_of_one_rank_is_that_ranks_and_one_of_all_is_nobodys() -> None:
    assert explained(failed(2, "out of memory")) == "rank 2: out of memory"
    assert explained(failed(2, "KeyError: 'a'"), failed(0, "KeyError: 'a'")) == "ranks 0 and 2: KeyError: 'a'"
    assert explained(*(failed(rank, "KeyError: 'a'") for rank in (2, 0, 1))) == "KeyError: 'a'"


def test_the_rank_that_noticed_a_broken_connection_first_is_not_to_blame() -> None:
    closed = failed(0, "RuntimeError: Connection closed by peer", secondary=True)
    assert explained(closed, failed(2, "out of memory", "OutOfMemory")) == "rank 2: out of memory"


def test_ranks_that_disagree_are_both_in_the_message_and_whoever_said_so_first_is_not() -> None:
    message = "the ranks cannot work together: rank 2 has threads 2, rank 0 has threads 1"
    assert explained(failed(1, message, "HandoffError")) == message


def test_what_a_machine_lacks_is_its_ranks_trouble_only_where_there_are_several_machines() -> None:
    message = "folder model has no weights"
    assert explained(failed(1, message, "ModelError")) == message
    assert explained(failed(1, message, "ModelError"), machine="there") == f"rank 1: {message}"


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ([0, None], "rank 0 exited with code 0 before it reported"),
        ([None, -11], "rank 1 was killed by SIGSEGV before it reported"),
        ([-40, None], "rank 0 was killed by signal 40 before it reported"),
    ],
)
def test_how_a_rank_ended_is_named_by_its_exit_code(codes: list[int | None], said: str) -> None:
    assert blame({}, 2, [], codes, []).message == said


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (["step 1", "Traceback (most recent call last):", "KeyError: 'x'", "profiler_stop"], "KeyError: 'x'"),
        (
            ["Traceback (most recent call last):", "torch.OutOfMemoryError: no", "---"],
            "torch.OutOfMemoryError: no",
        ),
        (["ValueError: mentioned in a log", "cannot open x"], "cannot open x"),
        (["Traceback (most recent call last):", "Odd: end"], "Odd: end"),
        (["---"], ""),
    ],
)
def test_the_line_that_says_why_a_program_ended_is_that_of_its_exception(output: list[str], line: str) -> None:
    assert last_line(output) == line


STARTED = NOW - 100


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The process ids of what a signal has stopped; a test may add to them."""
    pids: set[int] = set()
    monkeypatch.setattr(supervision, "is_stopped", lambda pid: pid in pids)
    return pids


def test_a_rank_that_is_stopped_before_it_connects_is_lost_as_soon_as_a_silent_one(
    stopped: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    watch = Setups(STARTED)
    stopped.add(101)
    assert watch.check({0: 100, 1: 101}, {}, NOW, PATIENCE) is None
    assert watch.check({0: 100, 1: 101}, {}, NOW + 29, PATIENCE) is None
    found = watch.check({0: 100, 1: 101}, {}, NOW + 31, PATIENCE)
    assert found
    assert found.message.startswith("rank 1 (pid 101) has been stopped for 31 s, before it connected: ")
    named = [record.getMessage().partition(" is slow")[0] for record in caplog.records]
    assert named == ["rank 0 (pid 100)"]  # which still runs


def test_a_rank_that_is_continued_in_time_is_not_lost(stopped: set[int]) -> None:
    watch = Setups(STARTED)
    for second in range(0, 200, 10):
        stopped ^= {101} if second % 30 == 0 else set()
        assert watch.check({1: 101}, {}, NOW + second, PATIENCE) is None, second


def test_a_slow_start_is_named_once_and_not_ended(stopped: set[int], caplog: pytest.LogCaptureFixture) -> None:
    watch = Setups(STARTED)
    for second in range(400):
        assert watch.check({1: 101}, {}, STARTED + second, PATIENCE) is None
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 (pid 101) is slow: it is still starting or importing torch; the run waits up to 600 s for it"
    ]


@pytest.mark.parametrize(("ready", "halted", "lost"), [(False, False, False), (False, True, True), (True, False, True)])
def test_a_silence_is_explained_by_loading_only_while_the_process_runs(
    stopped: set[int], caplog: pytest.LogCaptureFixture, *, ready: bool, halted: bool, lost: bool
) -> None:
    loading = peer(1, "building the model", 50, silent=50)
    assert loading.hello
    loading.hello = msgspec.structs.replace(loading.hello, machine=machine())
    loading.ready = ready
    stopped |= {loading.hello.pid} if halted else set()
    peers = {0: peer(0, "waiting for all ranks to agree", 50, waits_for=EVERYONE), 1: loading}
    assert Setups(STARTED).check({}, peers, NOW, PATIENCE) is None
    found = stalled(peers, 2, NOW, STARTED, PATIENCE)
    assert (found is not None) == lost
    assert bool(caplog.records) == (not ready)
    if found:
        assert found.message.startswith("rank 1 (pid 101 on here) has been silent for 50 s, in building the model")


def test_a_silence_in_loading_has_an_end() -> None:
    loading = peer(0, "building the model", 601, silent=601)
    assert loading.hello
    loading.hello = msgspec.structs.replace(loading.hello, machine=machine())
    found = stalled({0: loading}, 1, NOW, STARTED, PATIENCE)
    assert found
    assert "in building the model" in found.message


def test_who_waits_for_a_rank_that_still_imports_is_not_to_blame_for_it() -> None:
    waiting = {0: peer(0, "connecting to the other ranks", 99, waits_for=EVERYONE)}
    assert stalled(waiting, 2, NOW, STARTED, 10.0) is None
    late = stalled(waiting, 2, NOW, NOW - 130, 10.0)
    assert late
    assert late.message.startswith("rank 1 has not connected 130 s after the start")


def test_a_rank_that_hangs_while_it_imports_is_named_and_not_those_that_wait_for_it(
    stopped: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    hanging = peer(1, "importing the libraries of the run", 31)
    peers = {0: peer(0, "connecting to the other ranks", 50, waits_for=EVERYONE), 1: hanging}
    assert Setups(STARTED).check({}, peers, NOW, PATIENCE) is None
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 (pid 101 on here) is slow: it is still importing the libraries of the run; the run waits up to 600 s "
        "for it"
    ]
    caplog.clear()
    hanging.ready = True  # a long evaluation
    assert Setups(STARTED).check({}, peers, NOW, PATIENCE) is None
    assert not caplog.records
