import io
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import HandoverError
from gpubench.pipeline import wire
from gpubench.pipeline.wire import FRAME, RUN_ID, Expected, Header, Kind, Route

RUN = b"thisrun!"
ROUTE = Route(RUN, 0, 1, 2)
SENT = Header(Kind.data, RUN, 1, 2, sequence=5, sample=5, samples=1, done=12, payload_bytes=1024, payload_checksum=7)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    Header, st.sampled_from(Kind), st.binary(min_size=RUN_ID, max_size=RUN_ID), u32, u32, u64, u64, u32, u32, u64, u64
)
manifests = st.one_of(st.binary(max_size=64), st.integers(0, 3 * FRAME).map(lambda size: b"m" * size))


def decoded(frames: bytes) -> tuple[Header, bytes]:
    rest = io.BytesIO(frames)

    def frame() -> bytes:
        return rest.read(FRAME)

    found = wire.decode(frame(), frame)
    assert not rest.read(), "frames were left over"
    return found


@given(headers, manifests)
def test_a_header_and_its_manifest_arrive_as_they_were_sent_in_whole_frames(header: Header, manifest: bytes) -> None:
    frames = wire.encode(header, manifest)
    assert len(frames) == wire.frames_size(manifest)
    assert len(frames) % FRAME == 0
    assert decoded(frames) == (header, manifest)


@given(st.sampled_from([0, 100, FRAME - wire.HEAD, FRAME, 2 * FRAME]), st.data())
def test_no_byte_can_change_without_being_noticed(size: int, data: st.DataObject) -> None:
    frames = bytearray(wire.encode(SENT, b"m" * size))
    at = data.draw(st.one_of(st.integers(0, wire.HEAD - 1), st.integers(0, len(frames) - 1)))
    frames[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(HandoverError):
        decoded(bytes(frames))


@given(st.binary(max_size=2 * wire.HEAD).map(lambda start: start.ljust(FRAME, b"\0")))
def test_what_is_no_header_is_refused(frame: bytes) -> None:
    with pytest.raises(HandoverError):
        decoded(frame)


def test_another_version_is_named_before_its_layout_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(wire, "VERSION", 2)
        frames = wire.encode(SENT)
    with pytest.raises(HandoverError, match="of protocol 2, and this is protocol 1") as refused:
        decoded(frames)
    assert refused.value.hint == "use one version of gpubench"


EXPECTED = Expected(ROUTE, 5, [5], 12)
END = Expected(ROUTE, 6, ())


def test_what_was_agreed_on_passes() -> None:
    EXPECTED.check(SENT)
    END.check(Header(Kind.end, RUN, 1, 2, 6))
    Expected(ROUTE, 2, [4, 5], 12).check(replace(SENT, sequence=2, sample=4, samples=2))


@pytest.mark.parametrize(
    ("expected", "header", "message"),
    [
        (
            EXPECTED,
            replace(SENT, sequence=6, sample=6),
            "rank 2 expected sample 5 after 12 evaluations from rank 1, and got sample 6 (sequence 6 instead of 5): "
            "a hand-over was lost",
        ),
        (
            EXPECTED,
            replace(SENT, sequence=4, sample=4),
            "rank 2 expected sample 5 after 12 evaluations from rank 1, and got sample 4 (sequence 4 instead of 5): "
            "a hand-over came twice",
        ),
        (
            EXPECTED,
            replace(SENT, sample=8),
            "rank 2 expected sample 5 after 12 evaluations from rank 1, and got sample 8 (sequence 5 instead of 5): "
            "the ranks disagree on which samples are to be made",
        ),
        (
            EXPECTED,
            replace(SENT, done=1),
            "rank 2 expected sample 5 after 12 evaluations from rank 1, and got it after 1",
        ),
        (
            EXPECTED,
            Header(Kind.end, RUN, 1, 2, 6),
            "rank 2 expected sample 5 after 12 evaluations from rank 1, and got the end of the stream "
            "(sequence 6 instead of 5): a hand-over was lost",
        ),
        (
            END,
            SENT,
            "rank 2 expected the end of the stream after 6 hand-overs from rank 1, and got sample 5 "
            "(sequence 5 instead of 6): a hand-over came twice",
        ),
        (
            replace(EXPECTED, samples=[4, 5, 6], done=1),
            replace(SENT, sequence=9, sample=7, samples=3),
            "rank 2 expected samples 4 to 6 after 1 evaluation from rank 1, and got samples 7 to 9 "
            "(sequence 9 instead of 5): a hand-over was lost",
        ),
        (
            EXPECTED,
            replace(SENT, run=b"\0" * RUN_ID),
            "rank 2 refused sample 5 after 12 evaluations from rank 1: it is of run 0000000000000000, and this is run "
            "7468697372756e21",
        ),
        (
            EXPECTED,
            replace(SENT, source=0, destination=1),
            "rank 2 refused sample 5 after 12 evaluations from rank 1: it was sent by rank 0 to rank 1",
        ),
    ],
    ids=["lost", "twice", "other", "step", "last-lost", "last-twice", "micro-batch", "foreign-run", "foreign-edge"],
)
def test_anything_else_is_refused_naming_both_ranks_the_sample_and_what_differs(
    expected: Expected, header: Header, message: str
) -> None:
    with pytest.raises(HandoverError) as refused:
        expected.check(header)
    assert refused.value.message == message


@pytest.mark.parametrize("damage", [lambda payload: payload.flip(0), lambda payload: payload + 1, lambda p: p[1:]])
def test_a_payload_that_changes_has_another_checksum(damage: Callable[[torch.Tensor], torch.Tensor]) -> None:
    payload = torch.arange(100, dtype=torch.uint8)
    assert wire.checksum(damage(payload)) != wire.checksum(payload) == wire.checksum(payload.clone())


def test_no_payload_has_the_checksum_that_means_none() -> None:
    assert wire.checksum(torch.zeros(0, dtype=torch.uint8))
    assert wire.checksum(torch.zeros(8, dtype=torch.uint8))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_the_sum_that_a_gpu_makes_sees_every_altered_byte(content: bytes, data: st.DataObject) -> None:
    payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    altered = payload.clone()
    place = data.draw(st.integers(0, len(content) - 1))
    altered[place] ^= data.draw(st.integers(1, 255))
    assert wire.weighted_sum(altered) != wire.weighted_sum(payload)
    assert wire.weighted_sum(payload.clone()) == wire.weighted_sum(payload)
