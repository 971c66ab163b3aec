import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import link_worker
import pytest
import torch
from link_worker import FAULTY_SAMPLE, SAMPLES, SCENARIOS
from links import Cable, batch_of, terms
from running import PATIENCE, ended

from gpubench import releases
from gpubench.errors import HandoffError
from gpubench.events import Handoff
from gpubench.kinds.pipeline.faults import Fault, FaultKind, before_evaluations
from gpubench.kinds.pipeline.worker.background import Receiver, Sender
from gpubench.kinds.pipeline.worker.link import FRAME, Link, Transport, _nccl_group, sending_link
from gpubench.kinds.pipeline.worker.sampler import Batch
from gpubench.releases import Release

TERMS = terms()
GENERATOR = 5056  # bytes of a CPU generator's state


def batches(count: int = SAMPLES) -> list[Batch]:
    return [batch_of(TERMS, sample) for sample in range(count)]


def receiver(
    transport: Transport,
    expected: Sequence[Sequence[int]] | None = None,
    *,
    bound: int = SAMPLES,
    now: Callable[[], float] = time.time,
    report: Callable[[Handoff], None] = lambda handoff: None,
) -> Receiver:
    expected = [[sample] for sample in range(SAMPLES)] if expected is None else expected
    return Receiver(Link(transport, TERMS, now=now, report=report), expected, bound=bound)


def sender(
    transport: Transport,
    *,
    bound: int = SAMPLES,
    fault: Fault | None = None,
    now: Callable[[], float] = time.time,
    report: Callable[[Handoff], None] = lambda handoff: None,
    inspect: Callable[[Batch], None] = lambda batch: None,
) -> Sender:
    link = sending_link(transport, TERMS, fault, now=now, report=report, inspect=inspect)
    return Sender(link, time.time, bound=bound)


def eventually(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def settle() -> None:
    """Gives the threads time for what they must not do."""
    time.sleep(0.05)


def test_what_is_put_is_taken_in_order_and_the_ends_count_alike() -> None:
    cable = Cable()
    sending, receiving = sender(cable), receiver(cable)
    for batch in batches():
        sending.put(batch)
    taken = [receiving.take() for _ in range(SAMPLES)]
    sending.close()
    receiving.close()
    assert [batch.samples for batch in taken] == [[sample] for sample in range(SAMPLES)]
    assert all((batch.latents == batch.samples[0]).all() for batch in taken)
    assert sending.sent == receiving.received == SAMPLES
    with pytest.raises(EOFError):
        receiving.take()


@pytest.mark.parametrize("bound", [1, 3])
def test_no_receive_is_posted_while_as_many_batches_as_the_bound_are_untaken(bound: int) -> None:
    cable = Cable()
    sending, receiving = sender(cable), receiver(cable, bound=bound)
    for batch in batches():
        sending.put(batch)
    eventually(lambda: receiving.received == bound)
    settle()
    assert cable.posted == 2 * bound  # a frame and a payload each
    receiving.take()
    eventually(lambda: receiving.received == bound + 1)
    settle()
    assert cable.posted == 2 * (bound + 1)


@pytest.mark.parametrize("bound", [1, 3])
def test_a_put_waits_while_as_many_batches_as_the_bound_are_unsent(bound: int) -> None:
    cable = Cable()
    sending = sender(cable, bound=bound)
    put: list[int] = []

    def put_all() -> None:
        for batch in batches():
            sending.put(batch)
            put.append(batch.samples[0])

    threading.Thread(target=put_all, daemon=True).start()
    eventually(lambda: len(put) == bound)
    settle()
    assert len(put) == bound
    receiving = receiver(cable)
    assert [receiving.take().samples[0] for _ in range(SAMPLES)] == list(range(SAMPLES))


def test_a_stream_without_a_single_hand_off_ends_well() -> None:
    cable = Cable()
    receiving = receiver(cable, [])
    sending = sender(cable)
    sending.close()
    receiving.close()
    assert sending.sent == receiving.received == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (FaultKind.drop, "expected sample 5 .* and got the end of the stream .* a hand-off was lost"),
        (FaultKind.duplicate, "expected the end of the stream .* and got sample 5 .* a hand-off came twice"),
    ],
)
def test_the_last_hand_off_can_get_lost_or_come_twice_too(kind: FaultKind, message: str) -> None:
    cable = Cable()
    receiving = receiver(cable)
    sending = sender(cable, fault=Fault(kind, TERMS.source, SAMPLES - 1))
    for batch in batches():
        sending.put(batch)
    if kind is FaultKind.drop:
        sending.close()
    for _ in range(SAMPLES - (kind is FaultKind.drop)):
        receiving.take()
    with pytest.raises(HandoffError, match=message):
        receiving.close()


def test_what_was_received_before_an_error_is_taken_before_it_is_raised_and_raised_again() -> None:
    cable = Cable()
    receiving = receiver(cable)
    sending = sender(cable, fault=Fault(FaultKind.corrupt, TERMS.source, 2))
    for batch in batches():
        sending.put(batch)
    assert [receiving.take().samples for _ in range(2)] == [[0], [1]]
    for _ in range(2):
        with pytest.raises(
            HandoffError,
            match="rank 2 expected sample 2 after 12 evaluations from rank 1, and its payload",
        ):
            receiving.take()


class Cut(Cable):
    """A connection that breaks."""

    def send_frames(self, frames: bytes) -> None:
        raise RuntimeError("Connection closed by peer")

    def receive_frame(self) -> bytes:
        raise RuntimeError("Connection closed by peer")


def test_a_broken_connection_reaches_whoever_waits_at_either_end() -> None:
    receiving, sending = receiver(Cut()), sender(Cut(), bound=1)
    for act in (receiving.take, receiving.close):
        with pytest.raises(RuntimeError, match="closed by peer"):
            act()
    first, second, *_ = batches()
    sending.put(first)
    for act in (lambda: sending.put(second), sending.close):
        with pytest.raises(RuntimeError, match="closed by peer"):
            act()


def test_a_batch_that_inspection_refuses_is_not_sent() -> None:
    def refuse(batch: Batch) -> None:
        raise ValueError(f"sample {batch.samples[0]}")

    cable = Cable()
    sending = sender(cable, bound=1, inspect=refuse)
    sending.put(batches()[0])
    with pytest.raises(ValueError, match="sample 0"):
        sending.close()
    assert cable.posted == sending.sent == 0


@pytest.mark.parametrize(("minor", "cache"), [(6, "0"), (7, "1")])
def test_events_of_hand_offs_are_not_cached_where_the_cache_ends_with_the_thread(
    minor: int, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "TORCH_NCCL_CUDA_EVENT_CACHE"
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(releases, "installed", lambda: Release(2, minor))
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Mock(), raising=False)  # builds for CPUs have none
    made: list[str] = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda *pair, **options: made.append(os.environ[variable]))
    _nccl_group([0, 1])
    assert made == [cache]


def test_a_receiver_is_not_closed_before_it_is_empty() -> None:
    cable = Cable()
    receiving, sending = receiver(cable), sender(cable)
    sending.put(batches()[0])
    with pytest.raises(RuntimeError, match="a batch left in it"):
        receiving.close()


def ticks() -> Iterator[float]:
    yield from map(float, range(100))


def test_a_send_is_timed_from_packing_and_its_wait_until_the_peer_takes_the_message() -> None:
    # Packing begins at 0, the message is offered at 1 and taken at 2, and the last byte is gone at 3.
    cable, clock = Cable(), ticks()
    handoffs: list[Handoff] = []
    sending = sender(cable, bound=1, now=lambda: next(clock), report=handoffs.append)
    receiving = receiver(cable)
    sending.put(batches()[0])
    receiving.take()
    eventually(lambda: sending.sent == 1)
    header = FRAME - GENERATOR
    assert handoffs == [Handoff(0, 1, 2, "send", 0, 12, 0, 0.0, 3.0, 1.0, header, 1024, 0, GENERATOR)]


def test_a_receive_is_timed_from_the_messages_arrival_and_its_wait_until_then() -> None:
    # Posted at 0, the message is there at 1, and the batch is unpacked at 2.
    cable, clock = Cable(), ticks()
    handoffs: list[Handoff] = []
    sending = sender(cable)
    receiving = receiver(cable, [[0]], bound=1, now=lambda: next(clock), report=handoffs.append)
    sending.put(batches()[0])
    receiving.take()
    header = FRAME - GENERATOR
    assert handoffs == [Handoff(0, 2, 1, "recv", 0, 12, 0, 1.0, 1.0, 1.0, header, 1024, 0, GENERATOR)]


def test_a_late_hand_off_is_held_back_for_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []
    cable = Cable()
    receiving = receiver(cable, [[0], [1]])
    with monkeypatch.context() as patched:
        patched.setattr("gpubench.kinds.pipeline.worker.link.time.sleep", held.append)
        sending = sender(cable, fault=Fault(FaultKind.late, TERMS.source, 1, seconds=7.5))
        for batch in batches(2):
            sending.put(batch)
        sending.close()
    receiving.take()
    receiving.take()
    receiving.close()
    assert held == [7.5]


def test_a_fault_of_another_rank_changes_nothing_here() -> None:
    for kind in FaultKind:
        fault = Fault(kind, rank=0, sample=0)
        assert type(sending_link(Cable(), TERMS, fault, now=time.time, report=print)) is Link
        before_evaluations(fault, 1, [0])
    before_evaluations(None, 0, [0])


def test_faults_of_the_rank_strike_before_the_evaluations_of_their_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[object] = []
    monkeypatch.setattr("gpubench.kinds.pipeline.faults.os.kill", lambda pid, number: struck.append(number))
    monkeypatch.setattr("gpubench.kinds.pipeline.faults.time.sleep", struck.append)
    for kind in (FaultKind.kill, FaultKind.stop, FaultKind.slow):
        fault = Fault(kind, rank=0, sample=3, seconds=2.5)
        before_evaluations(fault, 0, [1, 2])
        before_evaluations(fault, 0, [3, 4])
    assert struck == [signal.SIGKILL, signal.SIGSTOP, 2.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [FaultKind.shape, FaultKind.dtype])
def test_a_latent_of_the_wrong_shape_or_type_has_as_many_bytes_as_the_right_one(
    kind: FaultKind, dtype: torch.dtype
) -> None:
    right = batch_of(TERMS, 0, 1)
    right.latents = right.latents.to(dtype)
    faulty = sending_link(Cable(), TERMS, Fault(kind, 1, 1), now=time.time, report=print)
    wrong = faulty.pack(right).message.batch
    assert wrong
    assert wrong.latent_shape[0] == len(right.latents)
    assert wrong.latent_bytes == right.latents.nbytes
    assert (wrong.latent_shape == right.latents.shape) == (kind is FaultKind.dtype)
    assert (wrong.latent_dtype == str(dtype).removeprefix("torch.")) == (kind is FaultKind.shape)


# What follows happened over gloo, between three processes.

Results = dict[tuple[str, int], Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank saw of each scenario."""
    folder = tmp_path_factory.mktemp("link")
    codes = start_ranks("link", 3, folder)
    assert codes == [0, -signal.SIGKILL, 0]
    return {
        (path.stem.rpartition("-")[0], int(path.stem.rpartition("-")[2])): json.loads(path.read_text())
        for path in folder.glob("*.json")
    }


def start_ranks(what: str, world_size: int, folder: Path) -> list[int]:
    """The exit codes of all ranks of link_worker.py."""
    script = [sys.executable, link_worker.__file__, what]
    return ended([*script, str(rank), str(world_size), str(folder)] for rank in range(world_size))


@pytest.mark.parametrize("name", ["one-in-flight", "three-in-flight", "long-message", "large", "late"])
def test_samples_pass_down_the_chain_in_order_and_what_is_sent_and_received_pairs_up(name: str, seen: Results) -> None:
    ranks = [seen[name, rank] for rank in range(3)]
    assert [rank["samples"] for rank in ranks] == [list(range(SAMPLES))] * 3
    assert all(rank["exact"] and rank["error"] is None for rank in ranks)
    assert [(rank["sent"], rank["received"]) for rank in ranks] == [(SAMPLES, 0), (SAMPLES, SAMPLES), (0, SAMPLES)]


@pytest.mark.parametrize("name", ["three-in-flight", "long-message", "large"])
def test_both_ends_of_a_hand_off_report_the_same_of_it(name: str, seen: Results) -> None:
    handoffs = [handoff for rank in range(3) for handoff in seen[name, rank]["handoffs"]]
    ends = {(handoff["rank"], handoff["direction"], handoff["sequence"]): handoff for handoff in handoffs}
    assert len(ends) == len(handoffs) == 4 * SAMPLES
    own = {"rank", "peer", "direction", "time", "total", "waited"}
    for source in (0, 1):
        for sequence in range(SAMPLES):
            sent, received = ends[source, "send", sequence], ends[source + 1, "recv", sequence]
            assert (sent["peer"], received["peer"]) == (source + 1, source)
            assert {key: sent[key] for key in sent.keys() - own} == {key: received[key] for key in sent.keys() - own}
            assert sent["waited"] <= sent["total"]
    scenario = SCENARIOS[name]
    sizes = {(handoff["header_bytes"], handoff["latent_bytes"]) for handoff in handoffs}
    ((header_bytes, latent_bytes),) = sizes
    assert header_bytes == (4 * FRAME if scenario.filler else FRAME) - GENERATOR
    assert latent_bytes == torch.Size(scenario.shape).numel() * 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            FaultKind.drop,
            "rank 2 expected sample 3 after 2 evaluations from rank 1, and got sample 4 (sequence 4 instead of 3): "
            "a hand-off was lost",
        ),
        (
            FaultKind.duplicate,
            "rank 2 expected sample 4 after 2 evaluations from rank 1, and got sample 3 (sequence 3 instead of 4): "
            "a hand-off came twice",
        ),
        (FaultKind.step, "rank 2 expected sample 3 after 2 evaluations from rank 1, and got it after 3"),
        (
            FaultKind.corrupt,
            "rank 2 expected sample 3 after 2 evaluations from rank 1, and its payload was damaged in transit: "
            "the checksum does not match",
        ),
        (
            FaultKind.shape,
            "rank 2 expected sample 3 after 2 evaluations from rank 1, and its latent is float32 [1, 1, 4, 8, 8] "
            "instead of float32 [1, 4, 8, 8]",
        ),
        (
            FaultKind.dtype,
            "rank 2 expected sample 3 after 2 evaluations from rank 1, and its latent is int32 [1, 4, 8, 8] "
            "instead of float32 [1, 4, 8, 8]",
        ),
    ],
)
def test_a_wrong_hand_off_is_refused_and_what_came_before_it_is_kept(
    fault: FaultKind, message: str, seen: Results
) -> None:
    receiver = seen[fault, 2]
    assert receiver["error"] == message
    assert receiver["samples"] == list(range(FAULTY_SAMPLE + (fault is FaultKind.duplicate)))
    assert receiver["exact"]
    assert seen[fault, 0]["error"] is None


def test_the_neighbours_of_a_rank_that_dies_see_a_broken_connection(seen: Results) -> None:
    assert ("death", 1) not in seen
    assert seen["death", 2]["broken"], seen["death", 2]["error"]
    first = seen["death", 0]
    handed_over = first["error"] is None and len(first["samples"]) == SAMPLES  # all of it, before its neighbour died
    assert first["broken"] or handed_over, first["error"]
    assert set(seen["death", 2]["samples"]) <= set(range(FAULTY_SAMPLE))
