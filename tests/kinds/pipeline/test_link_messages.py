from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from links import RUN, Cable, batch_of, decoded, framed, terms
from torch import Tensor

from gpubench.errors import HandoffError
from gpubench.kinds.pipeline.worker import link
from gpubench.kinds.pipeline.worker.link import FRAME, HEAD, RUN_ID, Link, Message, encode
from gpubench.kinds.pipeline.worker.packing import PackedBatch, checksum, pack, weighted_sum

TERMS = terms()
END = Message("end", RUN, 1, 2, 5)

numbers = st.integers(0, 2**63)
messages = st.builds(
    Message,
    st.sampled_from(["hello", "batch", "end"]),
    st.binary(min_size=RUN_ID, max_size=RUN_ID),
    numbers,
    numbers,
    numbers,
    st.none(),
    numbers,
)


def message(*samples: int, sequence: int = 5, **fields: Any) -> Message:
    """A hand-off as rank 1 sends it, except for `fields` of the message or of its batch."""
    packed, payload = pack(batch_of(TERMS, *samples), TERMS.sampler)
    own = {name: fields.pop(name) for name in tuple(fields) if name in PackedBatch.__struct_fields__}
    packed = msgspec.structs.replace(packed, **own)
    whole = Message("batch", RUN, 1, 2, sequence, packed, checksum(payload))
    return msgspec.structs.replace(whole, **fields)


@given(messages)
def test_a_message_arrives_as_it_was_sent_in_whole_frames(sent: Message) -> None:
    frames = encode(sent)
    assert len(frames) % FRAME == 0
    assert decoded(frames) == sent


@given(st.integers(0, 3 * FRAME))
def test_a_message_of_any_size_arrives(size: int) -> None:
    sent = message(0, extras={"text": "m" * size})
    assert decoded(encode(sent)) == sent


@given(st.sampled_from([0, 100, FRAME - HEAD, FRAME, 2 * FRAME]), st.data())
def test_no_byte_can_change_without_being_noticed(size: int, data: st.DataObject) -> None:
    frames = bytearray(encode(message(0, extras={"text": "m" * size})))
    at = data.draw(st.one_of(st.integers(0, HEAD - 1), st.integers(0, len(frames) - 1)))
    frames[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(HandoffError):
        decoded(bytes(frames))


@given(st.binary(max_size=2 * HEAD).map(lambda start: start.ljust(FRAME, b"\0")))
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(HandoffError):
        decoded(frame)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_message_are_refused_although_their_checksum_matches(content: bytes) -> None:
    with pytest.raises(HandoffError, match="cannot be read"):
        decoded(framed(content))


def test_another_version_is_named_before_its_layout_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(link, "VERSION", 3)
        frames = encode(END)
    with pytest.raises(HandoffError, match="of protocol 3, and this is protocol 2") as refused:
        decoded(frames)
    assert refused.value.hint == "use one version of gpubench on all machines"


class Replay(Cable):
    """A connection on which these frames have arrived, and a payload must not be received."""

    def __init__(self, frames: bytes) -> None:
        super().__init__()
        self._frames = frames

    def receive_frame(self) -> bytes:
        frame, self._frames = self._frames[:FRAME], self._frames[FRAME:]
        return frame

    def receive_payload(self, size: int) -> Tensor:
        raise AssertionError("a payload was received before its message was checked")


def refusal(samples: list[int], sent: Message) -> HandoffError:
    """The error of rank 2, which has received five hand-offs and expects these samples."""
    receiving = Link(Replay(encode(sent)), TERMS, now=lambda: 0.0, report=lambda handoff: None)
    receiving.transferred = 5
    with pytest.raises(HandoffError) as refused:
        receiving.receive(samples) if samples else receiving.receive_end()
    assert refused.value.hint == "the samples finished so far are kept, and --resume makes the others"
    return refused.value


@pytest.mark.parametrize(
    ("samples", "sent", "message"),
    [
        ([5], message(6, sequence=6), "got sample 6 (sequence 6 instead of 5): a hand-off was lost"),
        ([5], message(4, sequence=4), "got sample 4 (sequence 4 instead of 5): a hand-off came twice"),
        (
            [5],
            message(8),
            "got sample 8 (sequence 5 instead of 5): the ranks disagree on which samples are to be made",
        ),
        ([5], message(5, done=1), "got it after 1"),
        (
            [5],
            Message("end", RUN, 1, 2, 6),
            "got the end of the stream (sequence 6 instead of 5): a hand-off was lost",
        ),
        ([], message(4, sequence=4), "got sample 4 (sequence 4 instead of 5): a hand-off came twice"),
        (
            [4, 5, 6],
            message(7, 8, 9, sequence=9),
            "got samples 7 to 9 (sequence 9 instead of 5): a hand-off was lost",
        ),
        ([5], message(5, run=bytes(RUN_ID)), "it is of run 0000000000000000, and this is run 7468697372756e21"),
        ([5], message(5, source=0, destination=1), "it was sent by rank 0 to rank 1"),
        ([5], message(5, kind="hello"), "got a hello (sequence 5 instead of 5): the ranks disagree on which samples"),
        ([5], message(5, tensors=()), "its description contradicts itself: it has no latents"),
        ([5], message(5, generators=()), "its description contradicts itself: 0 generators for 1 samples"),
    ],
    ids=[
        "lost", "twice", "other", "step", "last-lost", "last-twice", "micro-batch", "foreign-run", "foreign-edge",
        "hello", "no-latents", "no-generator",
    ],
)  # fmt: skip
def test_anything_else_is_refused_naming_both_ranks_the_sample_and_what_differs(
    samples: list[int], sent: Message, message: str
) -> None:
    what = {0: "the end of the stream after 5 hand-offs", 1: "sample 5 after 12 evaluations"}
    expected = what.get(len(samples), "samples 4 to 6 after 12 evaluations")
    assert refusal(samples, sent).message.startswith(f"rank 2 expected {expected} from rank 1, and {message}")


def test_a_latent_of_another_shape_or_type_is_refused() -> None:
    sent = message(5)
    assert sent.batch
    (layout,) = sent.batch.tensors
    for fields, found in (
        ({"shape": (1, 1, 4, 8, 8), "strides": (256, 256, 64, 8, 1)}, "float32 [1, 1, 4, 8, 8]"),
        ({"dtype": "int32"}, "int32 [1, 4, 8, 8]"),
        ({"shape": (2, 4, 8, 8)}, "float32 [2, 4, 8, 8]"),
    ):
        wrong = message(5, tensors=(msgspec.structs.replace(layout, **fields),))
        assert refusal([5], wrong).message == (
            "rank 2 expected sample 5 after 12 evaluations from rank 1, and its latent is "
            f"{found} instead of float32 [1, 4, 8, 8]"
        )


@pytest.mark.parametrize("damage", [lambda payload: payload.flip(0), lambda payload: payload + 1, lambda p: p[1:]])
def test_a_payload_that_changes_has_another_checksum(damage: Callable[[torch.Tensor], torch.Tensor]) -> None:
    payload = torch.arange(100, dtype=torch.uint8)
    assert checksum(damage(payload)) != checksum(payload) == checksum(payload.clone())


@given(st.binary(min_size=1, max_size=300), st.data())
def test_the_sum_that_a_gpu_makes_sees_every_altered_byte(content: bytes, data: st.DataObject) -> None:
    payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    altered = payload.clone()
    place = data.draw(st.integers(0, len(content) - 1))
    altered[place] ^= data.draw(st.integers(1, 255))
    assert weighted_sum(altered) != weighted_sum(payload)
    assert weighted_sum(payload.clone()) == weighted_sum(payload)
