"""What is packed is what is unpacked, and what is anything else is refused."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from links import RUN, as_received, decoded, framed, handed_off
from torch import Tensor

from gpubench.errors import HandoffError, SettingsError
from gpubench.kinds.pipeline.worker import packing
from gpubench.kinds.pipeline.worker.link import Message
from gpubench.kinds.pipeline.worker.packing import PackedBatch, pack, unpack
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler, build, create
from gpubench.kinds.pipeline.worker.verification import prove

CPU = torch.device("cpu")
SEEDS = [11, 12]


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return build(create("PNDMScheduler", {"skip_prk_steps": True}, {}), 10, CPU)


def stepped(sampler: Sampler, steps: int = 4, dtype: torch.dtype = torch.float32) -> Batch:
    """Samples 4 and 5, `steps` evaluations on their way."""
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    latents = torch.cat([torch.randn(1, 4, 8, 8, generator=generator, dtype=dtype) for generator in generators])
    batch = Batch([4, 5], latents, sampler.fresh(SEEDS[0]), generators, started=123.5)
    for _ in range(steps):
        sampler.step(batch, batch.latents * 0.5)
    return batch


def reopened(batch: Batch, sampler: Sampler) -> Batch:
    return handed_off(batch, sampler, SEEDS)


def test_everything_of_a_batch_arrives(sampler: Sampler) -> None:
    batch = stepped(sampler)
    batch.extras["held"] = batch.latents * 2
    arrived = reopened(batch, sampler)
    assert (arrived.samples, arrived.done, arrived.started) == ([4, 5], 4, 123.5)
    assert torch.equal(arrived.latents, batch.latents)
    assert torch.equal(arrived.extras["held"], batch.extras["held"])
    assert arrived.scheduler.counter == batch.scheduler.counter == 4
    assert [torch.equal(*pair) for pair in zip(arrived.scheduler.ets, batch.scheduler.ets, strict=True)] == [True] * 3
    for ours, theirs, seed in zip(arrived.generators, batch.generators, SEEDS, strict=True):
        assert torch.equal(ours.get_state(), theirs.get_state())
        assert ours.initial_seed() == seed


def test_the_description_says_how_large_what_is(sampler: Sampler) -> None:
    contents, payload = pack(stepped(sampler), sampler)
    latent = 2 * 4 * 8 * 8 * 4
    assert (contents.samples, contents.done) == ((4, 5), 4)
    assert (contents.latent_shape, contents.latent_dtype) == ((2, 4, 8, 8), "float32")
    assert contents.latent_bytes == latent
    assert contents.state_bytes == 3 * latent
    assert contents.generator_bytes == 2 * 5056
    assert contents.payload_bytes == payload.numel() == 4 * latent


def test_what_happens_to_the_batch_after_packing_does_not_reach_what_was_packed(sampler: Sampler) -> None:
    batch = stepped(sampler)
    latents, history = batch.latents.clone(), batch.scheduler.ets[0].clone()
    packed, payload = pack(batch, sampler)
    batch.latents.zero_()
    batch.scheduler.ets[0].zero_()
    batch.scheduler.ets.clear()
    batch.generators[0].manual_seed(0)
    arrived = unpack(packed, payload, sampler, SEEDS)
    payload.zero_()
    assert torch.equal(arrived.latents, latents)
    assert torch.equal(arrived.scheduler.ets[0], history)
    assert not torch.equal(arrived.generators[0].get_state(), batch.generators[0].get_state())


def test_what_is_unpacked_shares_nothing_with_another_batch_of_the_sampler(sampler: Sampler) -> None:
    packed, payload = pack(stepped(sampler), sampler)
    first, second = (unpack(packed, payload, sampler, SEEDS) for _ in range(2))
    sampler.step(first, first.latents)
    assert (first.scheduler.counter, second.scheduler.counter) == (5, 4)
    assert sampler.template.ets == []


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "channels_last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "transposed": lambda tensor: tensor.transpose(1, 3),
    "view into more": lambda tensor: torch.cat([tensor, tensor])[2:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_type_and_order_in_memory_are_kept(sampler: Sampler, layout: str, dtype: torch.dtype) -> None:
    batch = stepped(sampler, 0)
    batch.latents = LAYOUTS[layout](batch.latents.to(dtype))
    latents = reopened(batch, sampler).latents
    assert torch.equal(latents, batch.latents)
    assert (latents.dtype, latents.stride()) == (dtype, batch.latents.stride())


def test_a_tensor_with_gaps_arrives_without_them(sampler: Sampler) -> None:
    batch = stepped(sampler, 0)
    batch.extras = {"half": batch.latents[:, ::2], "spread": torch.ones(1).expand(4)}
    extras = reopened(batch, sampler).extras
    assert torch.equal(extras["half"], batch.latents[:, ::2])
    assert extras["half"].is_contiguous()
    assert extras["spread"].tolist() == [1, 1, 1, 1]


def test_a_tensor_met_twice_travels_once_and_is_one_again(sampler: Sampler) -> None:
    batch = stepped(sampler, 0)
    batch.extras = {"a": batch.latents, "b": [batch.latents, torch.ones(3)]}
    packed, payload = pack(batch, sampler)
    assert packed.state_bytes == 12
    arrived = unpack(as_received(packed), payload, sampler, SEEDS)
    assert arrived.extras["a"] is arrived.extras["b"][0] is arrived.latents


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -0.0, float("inf"), "text", [], [1, [2, None]], (1, "a"), {"a": {"b": (False,)}},
        np.float64(0.1), np.int32(7), np.bool_(True), torch.Size([8, 8]),
    ],
    ids=repr,
)  # fmt: skip
def test_values_arrive_as_what_they_were(sampler: Sampler, value: Any) -> None:
    batch = stepped(sampler, 0)
    batch.scheduler.counter = batch.extras["value"] = value
    arrived = reopened(batch, sampler)
    expected = tuple if isinstance(value, torch.Size) else type(value)
    for found in (arrived.scheduler.counter, arrived.extras["value"]):
        assert (found, type(found)) == (value, expected)
        assert repr(found) == repr(expected(value) if expected is tuple else value)


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.arange(6)[::2], np.zeros(0)], ids=repr)
def test_arrays_of_numpy_arrive_as_what_they_were(sampler: Sampler, array: "np.ndarray[Any, Any]") -> None:
    batch = stepped(sampler, 0)
    batch.extras["array"] = array
    found = reopened(batch, sampler).extras["array"]
    np.testing.assert_array_equal(found, array, strict=True)
    found += 1


@pytest.mark.parametrize("shape", [(0,), (), (1, 0, 3), (3, 0), (5,)], ids=str)
def test_tensors_of_odd_sizes_arrive(sampler: Sampler, shape: tuple[int, ...]) -> None:
    batch = stepped(sampler, 0)
    batch.extras = {"odd": torch.ones(shape, dtype=torch.uint8), "after": torch.full((2,), 7.0)}
    extras = reopened(batch, sampler).extras
    assert extras["odd"].shape == shape
    assert extras["after"].tolist() == [7, 7]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        (print, "builtin_function_or_method"),
        ([{3: "a"}], "dict"),
        ({1, 2}, "set"),
        (torch.ones(2).to_sparse(), "Tensor"),
        (np.array([None]), "ndarray"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_named_with_its_type(sampler: Sampler, value: Any, kind: str) -> None:
    batch = stepped(sampler, 0)
    batch.scheduler.cache = value
    with pytest.raises(SettingsError, match=f"attribute cache of PNDMScheduler is a {kind}"):
        pack(batch, sampler)


def test_a_batch_of_inference_mode_can_be_packed_and_unpacked_outside_of_it(sampler: Sampler) -> None:
    with torch.inference_mode():
        batch = stepped(sampler)
    arrived = reopened(batch, sampler)
    with torch.inference_mode():
        sampler.step(arrived, arrived.latents * 0.5)
        sampler.step(batch, batch.latents * 0.5)
    assert torch.equal(arrived.latents, batch.latents)


def replaced(contents: PackedBatch, index: int, **fields: Any) -> tuple[packing.Layout, ...]:
    tensors = list(contents.tensors)
    tensors[index] = msgspec.structs.replace(tensors[index], **fields)
    return tuple(tensors)


ALTERATIONS: dict[str, Callable[[PackedBatch], dict[str, Any]]] = {
    "no samples": lambda contents: {"samples": (), "generators": ()},
    "a sample too many": lambda contents: {"samples": (4, 5, 6)},
    "no time": lambda contents: {"started": float("nan")},
    "no latents": lambda contents: {"tensors": ()},
    "an unknown type": lambda contents: {"tensors": replaced(contents, 0, dtype="float31")},
    "a larger type": lambda contents: {"tensors": replaced(contents, 0, dtype="float64")},
    "a smaller type": lambda contents: {"tensors": replaced(contents, 3, dtype="float16")},
    "a larger shape": lambda contents: {
        "tensors": replaced(contents, 3, shape=(2, 4, 8, 9), strides=(288, 72, 9, 1))
    },
    "a negative shape": lambda contents: {"tensors": replaced(contents, 1, shape=(-2, -4, 8, 8))},
    "strides that overlap": lambda contents: {"tensors": replaced(contents, 1, strides=(256, 0, 8, 1))},
    "strides beyond": lambda contents: {"tensors": replaced(contents, 1, strides=(2**40, 64, 8, 1))},
    "strides of another shape": lambda contents: {"tensors": replaced(contents, 1, strides=(1,))},
    "too few bytes beside the payload": lambda contents: {
        "tensors": replaced(contents, 3, data=b"123"),
    },
    "a payload of another size": lambda contents: {"tensors": contents.tensors[:3]},
    "a tensor that is not there": lambda contents: {"state": {"ets": packing.TensorAt(4)}},
    "a tensor before the first": lambda contents: {"state": {"ets": packing.TensorAt(-1)}},
    "a method's name": lambda contents: {"state": {"step": 3}},
    "the configuration": lambda contents: {"state": {"_internal_dict": 3}},
    "a name of Python's": lambda contents: {"state": {"__class__": 3}},
    "a name that steps never set": lambda contents: {"state": {"this_order": 3}},
    "an array of objects": lambda contents: {"extras": {"a": packing.ArrayOf("|O", (1,), False, b"12345678")}},
    "an array of another size": lambda contents: {"extras": {"a": packing.ArrayOf("<f8", (2,), False, b"12345678")}},
    "numbers for one": lambda contents: {"extras": {"a": packing.ArrayOf("<f4", (2,), True, b"12345678")}},
    "half a generator": lambda contents: {
        "generators": tuple(packing.GeneratorState("cpu", generator.state[:99]) for generator in contents.generators)
    },
    "no generator's state": lambda contents: {
        "generators": tuple(packing.GeneratorState("cpu", b"\xff" * 5056) for _ in contents.generators)
    },
}  # fmt: skip


@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_a_description_that_does_not_fit_is_refused(sampler: Sampler, alteration: str) -> None:
    packed, payload = pack(stepped(sampler), sampler)
    wrong = msgspec.structs.replace(packed, **ALTERATIONS[alteration](packed))
    with pytest.raises(HandoffError):
        unpack(as_received(wrong), payload, sampler, SEEDS)


@pytest.mark.parametrize(
    "payload",
    [
        torch.zeros(8191, dtype=torch.uint8),
        torch.zeros(8192, dtype=torch.int8),
        torch.zeros(1, 8192, dtype=torch.uint8),
    ],
    ids=lambda payload: f"{payload.dtype} {list(payload.shape)}",
)
def test_a_payload_that_does_not_fit_is_refused(sampler: Sampler, payload: Tensor) -> None:
    packed, _ = pack(stepped(sampler), sampler)
    with pytest.raises(HandoffError, match="needs 8192 bytes"):
        unpack(packed, payload, sampler, SEEDS)


def test_a_generator_of_a_gpu_is_refused_where_there_is_none(sampler: Sampler) -> None:
    packed, payload = pack(stepped(sampler), sampler)
    generators = tuple(packing.GeneratorState("cuda", bytes(16)) for _ in SEEDS)
    with pytest.raises(HandoffError, match="cuda generator"):
        unpack(msgspec.structs.replace(packed, generators=generators), payload, sampler, SEEDS)


def test_a_tensor_beside_the_payload_arrives_in_host_memory(sampler: Sampler) -> None:
    packed, payload = pack(stepped(sampler), sampler)
    *_, (start, end) = packing.positions(packed.tensors)
    data = payload[start:end].numpy().tobytes()
    moved = msgspec.structs.replace(packed, tensors=replaced(packed, 3, data=data))
    ours = unpack(as_received(moved), payload[:start], sampler, SEEDS)
    theirs = unpack(packed, payload, sampler, SEEDS)
    assert torch.equal(ours.scheduler.ets[2], theirs.scheduler.ets[2])


def test_a_description_nested_too_deeply_is_refused(sampler: Sampler) -> None:
    packed, _ = pack(stepped(sampler), sampler)
    encoded = b"\x92\xa4list\x91" * 100_000 + b"\x01"
    fields = msgspec.to_builtins(Message("batch", RUN, 0, 1, 0, packed))
    fields["batch"]["extras"] = {"deep": "REPLACED"}
    content = msgspec.msgpack.encode(fields).replace(b"\xa8REPLACED", encoded)
    with pytest.raises(HandoffError):
        decoded(framed(content))


@given(data=st.data())
def test_a_damaged_description_is_refused_or_harmless(sampler: Sampler, data: st.DataObject) -> None:
    """Some damage, as in the bytes of a number, is for the checksum to see."""
    packed, payload = pack(stepped(sampler), sampler)
    damaged = bytearray(msgspec.msgpack.encode(packed))
    structure = damaged.index(b"generators")  # before it is everything except the generators' states
    position = data.draw(st.integers(0, structure))
    match data.draw(st.sampled_from(["change", "cut", "insert", "remove"])):
        case "change":
            damaged[position] = data.draw(st.integers(0, 255))
        case "cut":
            del damaged[position:]
        case "insert":
            damaged[position:position] = data.draw(st.binary(min_size=1, max_size=8))
        case _:
            del damaged[position : position + data.draw(st.integers(1, 8))]
    frames = framed(
        msgspec.msgpack.encode(Message("batch", RUN, 0, 1, 0)).replace(b"\xa5batch\xc0", b"\xa5batch" + damaged)
    )
    try:
        received = decoded(frames).batch
        assert received is not None
        packing.check(received)
        if received.samples != packed.samples:  # the link refuses them
            return
        arrived = unpack(received, payload, sampler, SEEDS)
    except HandoffError:
        return
    assert len(arrived.samples) == 2


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_tensors_stay_on_the_device_that_they_were_on() -> None:
    device = torch.device("cuda")
    sampler = build(create("HeunDiscreteScheduler", {}, {}), 10, device)
    prove(sampler, [(0, 1), (1, sampler.total)], 2, torch.float16)
    batch = stepped(sampler, 0)
    batch.latents = batch.latents.to(device)
    batch.generators[1] = torch.Generator(device).manual_seed(SEEDS[1])
    sampler.scale(batch, batch.latents)
    sampler.step(batch, batch.latents * 0.5)
    packed, content = pack(batch, sampler)
    assert content.is_cuda
    for payload in (content, content.cpu()):
        arrived = unpack(as_received(packed), payload, sampler, SEEDS)
        assert torch.equal(arrived.latents, batch.latents)
        assert arrived.scheduler.dt.device == batch.scheduler.dt.device
        assert torch.equal(arrived.scheduler.prev_derivative, batch.scheduler.prev_derivative)
        assert torch.equal(arrived.generators[1].get_state(), batch.generators[1].get_state())
