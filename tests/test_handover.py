"""What is packed is what is unpacked, and what is anything else is refused."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpubench.errors import HandoverError, SettingsError
from gpubench.pipeline import handover
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.handover import Manifest, Parcel, pack, prove, read_manifest, unpack
from gpubench.pipeline.schedulers import Sampler, build, create

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
    parcel = pack(batch, sampler)
    return unpack(parcel.manifest, parcel.payload, sampler, SEEDS)


def altered(parcel: Parcel, **fields: Any) -> bytes:
    """The manifest of `parcel` with other contents."""
    return handover.encode(msgspec.structs.replace(read_manifest(parcel.manifest), **fields))


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


def test_the_manifest_says_how_large_what_is(sampler: Sampler) -> None:
    parcel = pack(stepped(sampler), sampler)
    contents = read_manifest(parcel.manifest)
    latent = 2 * 4 * 8 * 8 * 4
    assert (contents.samples, contents.done) == ((4, 5), 4)
    assert (contents.latent_shape, contents.latent_dtype) == ((2, 4, 8, 8), "float32")
    assert parcel.latent_bytes == contents.latent_bytes == latent
    assert parcel.state_bytes == contents.state_bytes == 3 * latent
    assert parcel.generator_bytes == contents.generator_bytes == 2 * 5056
    assert contents.payload_bytes == parcel.payload.numel() == 4 * latent


def test_what_happens_to_the_batch_after_packing_does_not_reach_the_parcel(sampler: Sampler) -> None:
    batch = stepped(sampler)
    latents, history = batch.latents.clone(), batch.scheduler.ets[0].clone()
    parcel = pack(batch, sampler)
    batch.latents.zero_()
    batch.scheduler.ets[0].zero_()
    batch.scheduler.ets.clear()
    batch.generators[0].manual_seed(0)
    arrived = unpack(parcel.manifest, parcel.payload, sampler, SEEDS)
    parcel.payload.zero_()
    assert torch.equal(arrived.latents, latents)
    assert torch.equal(arrived.scheduler.ets[0], history)
    assert not torch.equal(arrived.generators[0].get_state(), batch.generators[0].get_state())


def test_what_is_unpacked_shares_nothing_with_another_batch_of_the_sampler(sampler: Sampler) -> None:
    parcel = pack(stepped(sampler), sampler)
    first, second = (unpack(parcel.manifest, parcel.payload, sampler, SEEDS) for _ in range(2))
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
    parcel = pack(batch, sampler)
    assert parcel.state_bytes == 12
    arrived = unpack(parcel.manifest, parcel.payload, sampler, SEEDS)
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


def replaced(contents: Manifest, index: int, **fields: Any) -> tuple[handover.Layout, ...]:
    tensors = list(contents.tensors)
    tensors[index] = msgspec.structs.replace(tensors[index], **fields)
    return tuple(tensors)


ALTERATIONS: dict[str, Callable[[Manifest], dict[str, Any]]] = {
    "no samples": lambda contents: {"samples": (), "generators": ()},
    "samples apart": lambda contents: {"samples": (4, 6)},
    "a sample below 0": lambda contents: {"samples": (-1, 0)},
    "a sample too many": lambda contents: {"samples": (4, 5, 6)},
    "a sample and a generator too many": lambda contents: {
        "samples": (4, 5, 6),
        "generators": (*contents.generators, contents.generators[0]),
    },
    "evaluations below 0": lambda contents: {"done": -1},
    "more evaluations than there are": lambda contents: {"done": 12},
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
    "tensors that overlap": lambda contents: {"tensors": replaced(contents, 1, offset=0)},
    "a tensor before the payload": lambda contents: {"tensors": replaced(contents, 1, offset=-2048)},
    "too few bytes beside the payload": lambda contents: {
        "tensors": replaced(contents, 3, offset=None, data=b"123"),
        "payload_bytes": 3 * 2048,
    },
    "a payload of another size": lambda contents: {"payload_bytes": contents.payload_bytes + 16},
    "a tensor that is not there": lambda contents: {"state": {"ets": handover.TensorAt(4)}},
    "a tensor before the first": lambda contents: {"state": {"ets": handover.TensorAt(-1)}},
    "a method's name": lambda contents: {"state": {"step": 3}},
    "the configuration": lambda contents: {"state": {"_internal_dict": 3}},
    "a name of Python's": lambda contents: {"state": {"__class__": 3}},
    "a name that steps never set": lambda contents: {"state": {"this_order": 3}},
    "an array of objects": lambda contents: {"extras": {"a": handover.ArrayOf("|O", (1,), False, b"12345678")}},
    "an array of another size": lambda contents: {"extras": {"a": handover.ArrayOf("<f8", (2,), False, b"12345678")}},
    "numbers for one": lambda contents: {"extras": {"a": handover.ArrayOf("<f4", (2,), True, b"12345678")}},
    "half a generator": lambda contents: {
        "generators": tuple(handover.Generator("cpu", generator.state[:99]) for generator in contents.generators)
    },
    "no generator's state": lambda contents: {
        "generators": tuple(handover.Generator("cpu", b"\xff" * 5056) for _ in contents.generators)
    },
}  # fmt: skip


@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_a_manifest_that_does_not_fit_is_refused(sampler: Sampler, alteration: str) -> None:
    parcel = pack(stepped(sampler), sampler)
    wrong = altered(parcel, **ALTERATIONS[alteration](read_manifest(parcel.manifest)))
    with pytest.raises(HandoverError):
        unpack(wrong, parcel.payload, sampler, SEEDS)


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
    with pytest.raises(HandoverError, match="one of 8192 bytes"):
        unpack(pack(stepped(sampler), sampler).manifest, payload, sampler, SEEDS)


def test_a_generator_of_a_gpu_is_refused_where_there_is_none(sampler: Sampler) -> None:
    parcel = pack(stepped(sampler), sampler)
    wrong = altered(parcel, generators=tuple(handover.Generator("cuda", bytes(16)) for _ in SEEDS))
    with pytest.raises(HandoverError, match="cuda generator"):
        unpack(wrong, parcel.payload, sampler, SEEDS)


def test_a_tensor_beside_the_payload_arrives_in_host_memory(sampler: Sampler) -> None:
    parcel = pack(stepped(sampler), sampler)
    contents = read_manifest(parcel.manifest)
    inside = contents.tensors[3]
    assert inside.offset is not None
    data = parcel.payload[inside.offset :].numpy().tobytes()
    moved = altered(parcel, tensors=replaced(contents, 3, offset=None, data=data), payload_bytes=inside.offset)
    ours = unpack(moved, parcel.payload[: inside.offset], sampler, SEEDS)
    theirs = unpack(parcel.manifest, parcel.payload, sampler, SEEDS)
    assert torch.equal(ours.scheduler.ets[2], theirs.scheduler.ets[2])


@given(data=st.binary(max_size=300))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(HandoverError):
        read_manifest(data)


def test_a_manifest_nested_too_deeply_is_refused(sampler: Sampler) -> None:
    parcel = pack(stepped(sampler), sampler)
    fields = msgspec.to_builtins(read_manifest(parcel.manifest))
    encoded = msgspec.msgpack.encode(fields | {"extras": {"deep": "REPLACED"}})
    nested = b"\x92\xa4list\x91" * 100_000 + b"\x01"
    with pytest.raises(HandoverError):
        read_manifest(encoded.replace(b"\xa8REPLACED", nested))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_manifest_is_refused_or_harmless(sampler: Sampler, data: st.DataObject) -> None:
    """Some damage, as in the bytes of a number, is for the checksum on the wire to see."""
    parcel = pack(stepped(sampler), sampler)
    damaged = bytearray(parcel.manifest)
    structure = damaged.index(b"generators")  # before it lies all but the generators' states, which are most bytes
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
    try:
        arrived = unpack(bytes(damaged), parcel.payload, sampler, SEEDS)
    except HandoverError:
        return
    assert len(arrived.samples) == len(arrived.latents) == 2


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
    parcel = pack(batch, sampler)
    assert parcel.payload.is_cuda
    for payload in (parcel.payload, parcel.payload.cpu()):
        arrived = unpack(parcel.manifest, payload, sampler, SEEDS)
        assert torch.equal(arrived.latents, batch.latents)
        assert arrived.scheduler.dt.device == batch.scheduler.dt.device
        assert torch.equal(arrived.scheduler.prev_derivative, batch.scheduler.prev_derivative)
        assert torch.equal(arrived.generators[1].get_state(), batch.generators[1].get_state())
