import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import links_worker
import pytest
import torch
from links_worker import FAULTY_SAMPLE, SAMPLES, SCENARIOS, Parcel, Scenario
from running import PATIENCE, ended
from torch import Tensor

from gpubench.errors import HandoverError
from gpubench.events import Handoff
from gpubench.pipeline import wire
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.folders import Fault, FaultKind
from gpubench.pipeline.transfer import Inbox, Outbox, before_evaluations, faulty_edge, faulty_pack
from gpubench.pipeline.wire import FRAME, Edge, Route

ROUTE = Route(b"thisrun!", 0, 1, 2)
SCENARIO = Scenario()
Message = bytes | Tensor


class Cable:
    """An edge within this process, both ends in one. Whoever sends waits for the receive, as over gloo."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.posted = 0
        """Hand-overs, and the end of the stream, that somebody began to receive."""
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._ready = threading.Semaphore(0)

    def send_frames(self, frames: bytes) -> None:
        for start in range(0, len(frames), FRAME):
            self._send(frames[start : start + FRAME])

    def receive_frame(self) -> bytes:
        frame = self._receive()
        assert isinstance(frame, bytes)
        return frame

    def stage(self, payload: Tensor) -> Tensor:
        return payload.clone()

    def send_payload(self, payload: Tensor) -> None:
        self._send(payload)

    def receive_payload(self, size: int) -> Tensor:
        payload = self._receive()
        assert isinstance(payload, Tensor)
        assert payload.numel() == size
        return payload

    def _send(self, message: Message) -> None:
        self._ready.acquire()
        self._messages.put(message)

    def _receive(self) -> Message:
        self.posted += 1
        self._ready.release()
        return self._messages.get()


def batches(count: int = SAMPLES) -> list[Batch]:
    return [Batch([sample], torch.full((1, 4, 8, 8), float(sample)), None, [], done=12) for sample in range(count)]


def inbox(edge: Edge, expected: Sequence[Sequence[int]] | None = None, *, bound: int = SAMPLES) -> Inbox:
    expected = [[sample] for sample in range(SAMPLES)] if expected is None else expected
    return Inbox(
        edge,
        ROUTE,
        expected,
        12,
        bound=bound,
        admit=SCENARIO.admit,
        unpack=SCENARIO.unpack,
        tell=lambda handoff: None,
        now=time.time,
    )


def outbox(
    edge: Edge, *, bound: int = SAMPLES, fault: Fault | None = None, tell: Callable[[Handoff], None] = lambda _: None
) -> Outbox:
    return Outbox(
        faulty_edge(edge, fault, ROUTE.source),
        ROUTE,
        bound=bound,
        pack=faulty_pack(SCENARIO.pack, fault, ROUTE.source),
        tell=tell,
        now=time.time,
    )


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
    sending, receiving = outbox(cable), inbox(cable)
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
    sending, receiving = outbox(cable), inbox(cable, bound=bound)
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
    sending = outbox(cable, bound=bound)
    put: list[int] = []

    def put_all() -> None:
        for batch in batches():
            sending.put(batch)
            put.append(batch.samples[0])

    threading.Thread(target=put_all, daemon=True).start()
    eventually(lambda: len(put) == bound)
    settle()
    assert len(put) == bound
    receiving = inbox(cable)
    assert [receiving.take().samples[0] for _ in range(SAMPLES)] == list(range(SAMPLES))


def test_a_stream_without_a_single_hand_over_ends_well() -> None:
    cable = Cable()
    receiving = inbox(cable, [])
    sending = outbox(cable)
    sending.close()
    receiving.close()
    assert sending.sent == receiving.received == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (FaultKind.drop, "expected sample 5 .* and got the end of the stream .* a hand-over was lost"),
        (FaultKind.duplicate, "expected the end of the stream .* and got sample 5 .* a hand-over came twice"),
    ],
)
def test_the_last_hand_over_can_get_lost_or_come_twice_too(kind: FaultKind, message: str) -> None:
    cable = Cable()
    receiving = inbox(cable)
    sending = outbox(cable, fault=Fault(kind, ROUTE.source, SAMPLES - 1))
    for batch in batches():
        sending.put(batch)
    if kind is FaultKind.drop:
        sending.close()
    for _ in range(SAMPLES - (kind is FaultKind.drop)):
        receiving.take()
    with pytest.raises(HandoverError, match=message):
        receiving.close()


def test_what_was_received_before_an_error_is_taken_before_it_is_raised_and_raised_again() -> None:
    cable = Cable()
    receiving = inbox(cable)
    sending = outbox(cable, fault=Fault(FaultKind.corrupt, ROUTE.source, 2))
    for batch in batches():
        sending.put(batch)
    assert [receiving.take().samples for _ in range(2)] == [[0], [1]]
    for _ in range(2):
        with pytest.raises(HandoverError, match="rank 2 refused sample 2 after 12 evaluations from rank 1"):
            receiving.take()


def test_a_payload_of_another_size_than_its_manifest_says_is_refused_before_it_is_received() -> None:
    cable = Cable()
    receiving = inbox(cable)
    (batch,) = batches(1)
    parcel = SCENARIO.pack(batch)
    header = wire.Header(wire.Kind.data, ROUTE.run, 1, 2, 0, sample=0, samples=1, done=12, payload_bytes=999)
    cable.send_frames(wire.encode(header, parcel.manifest))
    with pytest.raises(HandoverError, match="its header announces 999 bytes, its manifest 1024"):
        receiving.take()
    assert cable.posted == 1


class Cut(Cable):
    """A connection that breaks."""

    def send_frames(self, frames: bytes) -> None:
        raise RuntimeError("Connection closed by peer")

    def receive_frame(self) -> bytes:
        raise RuntimeError("Connection closed by peer")


def test_a_broken_connection_reaches_whoever_waits_at_either_end() -> None:
    receiving, sending = inbox(Cut()), outbox(Cut(), bound=1)
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
    sending = Outbox(
        cable, ROUTE, bound=1, pack=SCENARIO.pack, tell=lambda handoff: None, now=time.time, inspect=refuse
    )
    sending.put(batches()[0])
    with pytest.raises(ValueError, match="sample 0"):
        sending.close()
    assert cable.posted == sending.sent == 0


def test_an_inbox_is_not_closed_before_it_is_empty() -> None:
    cable = Cable()
    receiving, sending = inbox(cable), outbox(cable)
    sending.put(batches()[0])
    with pytest.raises(RuntimeError, match="a batch left in it"):
        receiving.close()


def ticks() -> Iterator[float]:
    yield from map(float, range(100))


def test_a_hand_over_is_timed_from_packing_and_its_wait_by_the_peer_taking_the_header() -> None:
    # Packing from 0, header offered at 1 and taken at 2, the last byte gone at 3.
    cable, clock = Cable(), ticks()
    handoffs: list[Handoff] = []
    sending = Outbox(cable, ROUTE, bound=1, pack=SCENARIO.pack, tell=handoffs.append, now=lambda: next(clock))
    receiving = inbox(cable)
    sending.put(batches()[0])
    receiving.take()
    eventually(lambda: sending.sent == 1)
    assert handoffs == [Handoff(0, 1, 2, "send", 0, 12, 0, 0.0, 3.0, 1.0, FRAME, 1024, 0, 0)]


def test_a_receive_is_timed_from_the_headers_arrival_and_its_wait_until_then() -> None:
    # Posted at 0, the header is there at 1, the batch unpacked at 2.
    cable, clock = Cable(), ticks()
    handoffs: list[Handoff] = []
    sending = outbox(cable)
    receiving = Inbox(
        cable,
        ROUTE,
        [[0]],
        12,
        bound=1,
        admit=SCENARIO.admit,
        unpack=SCENARIO.unpack,
        tell=handoffs.append,
        now=lambda: next(clock),
    )
    sending.put(batches()[0])
    receiving.take()
    assert handoffs == [Handoff(0, 2, 1, "recv", 0, 12, 0, 1.0, 1.0, 1.0, FRAME, 1024, 0, 0)]


def test_a_late_hand_over_is_held_back_for_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []
    cable = Cable()
    receiving = inbox(cable, [[0], [1]])
    with monkeypatch.context() as patched:
        patched.setattr("gpubench.pipeline.transfer.time.sleep", held.append)
        sending = outbox(cable, fault=Fault(FaultKind.late, ROUTE.source, 1, seconds=7.5))
        for batch in batches(2):
            sending.put(batch)
        sending.close()
    receiving.take()
    receiving.take()
    receiving.close()
    assert held == [7.5]


def test_a_fault_of_another_rank_changes_nothing_here() -> None:
    cable = Cable()
    for kind in FaultKind:
        fault = Fault(kind, rank=0, sample=0)
        assert faulty_edge(cable, fault, 1) is cable
        assert faulty_pack(SCENARIO.pack, fault, 1) == SCENARIO.pack
        before_evaluations(fault, 1, [0])
    assert faulty_edge(cable, None, 0) is cable
    assert faulty_pack(SCENARIO.pack, None, 0) == SCENARIO.pack
    before_evaluations(None, 0, [0])


def test_faults_of_the_rank_strike_before_the_evaluations_of_their_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[object] = []
    monkeypatch.setattr("gpubench.pipeline.transfer.os.kill", lambda pid, number: struck.append(number))
    monkeypatch.setattr("gpubench.pipeline.transfer.time.sleep", struck.append)
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
    packed: list[Batch] = []

    def pack(batch: Batch) -> Parcel:
        packed.append(batch)
        return SCENARIO.pack(batch)

    right = Batch([0, 1], torch.ones(2, 4, 8, 8, dtype=dtype), None, [])
    faulty_pack(pack, Fault(kind, 0, 1), 0)(right)
    (wrong,) = packed
    assert len(wrong.latents) == len(right.latents)
    assert wrong.latents.nbytes == right.latents.nbytes
    assert (wrong.latents.shape == right.latents.shape) == (kind is FaultKind.dtype)
    assert (wrong.latents.dtype == right.latents.dtype) == (kind is FaultKind.shape)


# What follows happened over gloo, between three processes.

Results = dict[tuple[str, int], Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank saw of each scenario."""
    folder = tmp_path_factory.mktemp("links")
    codes = start_ranks("links", 3, folder)
    assert codes == [0, -signal.SIGKILL, 0]
    return {
        (path.stem.rpartition("-")[0], int(path.stem.rpartition("-")[2])): json.loads(path.read_text())
        for path in folder.glob("*.json")
    }


def start_ranks(what: str, world_size: int, folder: Path) -> list[int]:
    """The exit codes of all ranks of links_worker.py."""
    script = [sys.executable, links_worker.__file__, what]
    return ended([*script, str(rank), str(world_size), str(folder)] for rank in range(world_size))


@pytest.mark.parametrize("name", ["one-in-flight", "three-in-flight", "long-manifest", "large", "late"])
def test_samples_pass_down_the_chain_in_order_and_what_is_sent_and_received_pairs_up(name: str, seen: Results) -> None:
    ranks = [seen[name, rank] for rank in range(3)]
    assert [rank["samples"] for rank in ranks] == [list(range(SAMPLES))] * 3
    assert all(rank["exact"] and rank["error"] is None for rank in ranks)
    assert [(rank["sent"], rank["received"]) for rank in ranks] == [(SAMPLES, 0), (SAMPLES, SAMPLES), (0, SAMPLES)]


@pytest.mark.parametrize("name", ["three-in-flight", "long-manifest", "large"])
def test_both_ends_of_a_hand_over_tell_the_same_of_it(name: str, seen: Results) -> None:
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
    assert header_bytes == (3 * FRAME if scenario.filler else FRAME)
    assert latent_bytes == torch.Size(scenario.shape).numel() * 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            FaultKind.drop,
            "rank 2 expected sample 3 after 2 evaluations from rank 1, and got sample 4 (sequence 4 instead of 3): "
            "a hand-over was lost",
        ),
        (
            FaultKind.duplicate,
            "rank 2 expected sample 4 after 2 evaluations from rank 1, and got sample 3 (sequence 3 instead of 4): "
            "a hand-over came twice",
        ),
        (FaultKind.step, "rank 2 expected sample 3 after 2 evaluations from rank 1, and got it after 3"),
        (
            FaultKind.corrupt,
            "rank 2 refused sample 3 after 2 evaluations from rank 1: its payload was damaged in transit: "
            "the checksum does not fit",
        ),
        (
            FaultKind.shape,
            "rank 2 refused sample 3 after 2 evaluations from rank 1: its latent is torch.float32 [1, 1, 4, 8, 8]",
        ),
        (
            FaultKind.dtype,
            "rank 2 refused sample 3 after 2 evaluations from rank 1: its latent is torch.int32 [1, 4, 8, 8]",
        ),
    ],
)
def test_a_wrong_hand_over_is_refused_and_what_came_before_it_is_kept(
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
