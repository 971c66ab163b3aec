"""Serialises batches for hand-overs, and proves before a run that a hand-over loses nothing.

The tensors of a batch are packed into one buffer on the latents' device, the latents first. All else is in the
manifest: numbers, the states of the generators, and tensors that are in host memory although the latents are on a GPU.

The proof checks before the run that a hand-over keeps all state that the run's scheduler and split depend on. It uses a
toy model and 8 x 8 latents, with the scheduler, steps, borders between ranks, data type and micro-batch size of the
run. It takes the time of two loops without a model on every rank.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from gpubench.errors import HandoverError, SettingsError
from gpubench.pipeline.batch import REBUILT, Batch
from gpubench.pipeline.scheduler_names import check_micro_batch
from gpubench.pipeline.schedulers import ERRORS, Sampler
from gpubench.pipeline.wire import bytes_of, tensor_of

ALIGNMENT = 16  # bytes of the largest element, so that every tensor can be a view of the buffer
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The type, shape and position of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """The dense strides in elements. A model can give other bits for the same numbers in another layout."""
    offset: int | None
    """The offset in the payload in bytes; None for a tensor in host memory while the latents are on a GPU."""
    data: bytes = b""
    """The bytes of such a tensor, which is sent without the GPU."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class TensorAt(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    index: int
    """The index in the manifest's tensors."""


class ListOf(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    items: "tuple[Value, ...]"


class TupleOf(msgspec.Struct, frozen=True, array_like=True, tag="tuple"):
    items: "tuple[Value, ...]"


class DictOf(msgspec.Struct, frozen=True, array_like=True, tag="dict"):
    items: "dict[str, Value]"


class ArrayOf(msgspec.Struct, frozen=True, array_like=True, tag="numpy"):
    """A numpy array; with `scalar`, a numpy number."""

    dtype: str
    shape: tuple[int, ...]
    scalar: bool
    data: bytes


Value = None | bool | int | float | str | TensorAt | ListOf | TupleOf | DictOf | ArrayOf


class Generator(msgspec.Struct, frozen=True, array_like=True):
    device: Literal["cpu", "cuda"]
    state: bytes


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a batch in a hand-over. The first tensor is the latents."""

    samples: tuple[int, ...]
    done: int
    """The number of evaluations so far."""
    started: float
    tensors: tuple[Layout, ...]
    state: dict[str, Value]
    """The attributes of the scheduler that differ from its state after `set_timesteps`."""
    extras: dict[str, Value]
    generators: tuple[Generator, ...]
    payload_bytes: int

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.tensors[0].shape

    @property
    def latent_dtype(self) -> str:
        return self.tensors[0].dtype

    @property
    def latent_bytes(self) -> int:
        return self.tensors[0].nbytes

    @property
    def state_bytes(self) -> int:
        """The size of the tensors other than the latents, in bytes."""
        return sum(layout.nbytes for layout in self.tensors[1:])

    @property
    def generator_bytes(self) -> int:
        return sum(len(generator.state) for generator in self.generators)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    return _encoder.encode(manifest)


def read_manifest(data: bytes) -> Manifest:
    """Parses a manifest. Raises HandoverError if it is invalid or contradicts itself or the payload's size."""
    try:
        manifest = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoverError(f"the manifest of a hand-over cannot be read: {error}") from error
    problem = _problem(manifest)
    if problem is not None:
        raise HandoverError(f"the manifest of a hand-over contradicts itself: {problem}")
    return manifest


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether such elements fill their memory without gaps or overlaps, in any order of dimensions."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= max(size, 1)  # as torch does for empty dimensions
    return all(0 <= number < 2**62 for number in (*shape, *strides))


def _problem(manifest: Manifest) -> str | None:
    first = manifest.samples[0] if manifest.samples else 0
    if manifest.samples != tuple(range(first, first + len(manifest.samples))) or first < 0 or not manifest.samples:
        return f"its samples are {list(manifest.samples)}"
    if manifest.done < 0 or not math.isfinite(manifest.started):
        return f"{manifest.done} evaluations since {manifest.started}"
    if len(manifest.generators) != len(manifest.samples):
        return f"{len(manifest.generators)} generators for {len(manifest.samples)} samples"
    if not manifest.tensors or manifest.tensors[0].offset is None:
        return "it has no latents"
    if manifest.latent_shape[:1] != (len(manifest.samples),):
        return f"latents of shape {list(manifest.latent_shape)} for {len(manifest.samples)} samples"
    return _misplaced(manifest)


def _misplaced(manifest: Manifest) -> str | None:
    """Returns what is wrong with the first tensor that has an invalid position, or None."""
    end = 0
    for number, layout in enumerate(manifest.tensors):
        if layout.dtype not in DTYPES:
            return f"tensor {number} is of type {layout.dtype!r}"
        if not is_dense(layout.shape, layout.strides):
            return f"tensor {number} of shape {list(layout.shape)} has strides {list(layout.strides)}"
        if layout.offset is None:
            if len(layout.data) != layout.nbytes:
                return f"tensor {number} has {len(layout.data)} bytes instead of {layout.nbytes}"
        elif layout.offset != aligned(end) or layout.data:
            return f"tensor {number} begins at byte {layout.offset} instead of {aligned(end)}"
        else:
            end = layout.offset + layout.nbytes
    return None if end == manifest.payload_bytes else f"{manifest.payload_bytes} bytes announced, {end} described"


def aligned(offset: int) -> int:
    """Returns the smallest aligned offset that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


_NUMERIC = re.compile(r"[<>=|]?[biuf][1248]")


def is_numeric(dtype: str) -> bool:
    """Returns whether this is the short name of a numpy type of plain numbers, such as `<f8`."""
    return _NUMERIC.fullmatch(dtype) is not None


__all__ = ["Manifest", "Parcel", "changed", "pack", "read_manifest", "unpack"]


@dataclass(frozen=True)
class Parcel:
    """A serialised batch, which shares no memory with the batch."""

    manifest: bytes
    payload: Tensor
    """The tensors as uint8, shape (bytes,), on the latents' device."""
    latent_bytes: int
    state_bytes: int
    """The size of the tensors that the scheduler and its caller keep, in bytes."""
    generator_bytes: int


def changed(scheduler: Any, template: Any) -> dict[str, Any]:
    """Returns the attributes of `scheduler` that differ from those of `template`.

    Tensors are compared by identity, because a comparison of their contents would synchronise with the GPU.
    """
    before = vars(template)
    return {
        name: value
        for name, value in vars(scheduler).items()
        if name not in REBUILT and not (name in before and _same(value, before[name]))
    }


def pack(batch: Batch, sampler: Sampler) -> Parcel:
    """Serialises all that the next evaluation of `batch` depends on, without synchronising if all of it is on the GPU.

    Raises SettingsError with the attribute and its type if the scheduler keeps something that cannot be handed over.
    """
    packer = _Packer(batch.latents)
    state = {
        name: packer.value(f"attribute {name} of {sampler.name}", value)
        for name, value in changed(batch.scheduler, sampler.template).items()
    }
    extras = {name: packer.value(f"{name} beside {sampler.name}", value) for name, value in batch.extras.items()}
    manifest = Manifest(
        samples=tuple(batch.samples),
        done=batch.done,
        started=batch.started,
        tensors=tuple(packer.layouts),
        state=state,
        extras=extras,
        generators=tuple(
            Generator("cuda" if generator.device.type == "cuda" else "cpu", bytes_of(generator.get_state()))
            for generator in batch.generators
        ),
        payload_bytes=packer.size,
    )
    return Parcel(
        encode(manifest), packer.payload(), manifest.latent_bytes, manifest.state_bytes, manifest.generator_bytes
    )


def unpack(manifest: bytes, payload: Tensor, sampler: Sampler, seeds: Sequence[int]) -> Batch:
    """Restores a batch on the sampler's device. `payload` may be on another device and may be reused afterwards.

    `seeds` are those of its samples. Raises HandoverError if sizes, names, types or counts do not fit.
    """
    contents = read_manifest(manifest)
    if payload.dtype is not torch.uint8 or payload.shape != (contents.payload_bytes,):
        raise HandoverError(
            f"a hand-over of {payload.dtype} {list(payload.shape)} came with a manifest of one of "
            f"{contents.payload_bytes} bytes"
        )
    if contents.done > sampler.total or len(seeds) != len(contents.samples):
        raise HandoverError(
            f"a hand-over of {len(contents.samples)} samples after {contents.done} evaluations came where there are "
            f"{len(seeds)} samples and {sampler.total} evaluations"
        )
    tensors = list(_tensors(contents.tensors, payload.to(sampler.device)))
    scheduler = sampler.fresh(seeds[0])
    for name, value in contents.state.items():
        _check_attribute(name, sampler)
        setattr(scheduler, name, _restored(value, tensors))
    return Batch(
        samples=list(contents.samples),
        latents=tensors[0],
        scheduler=scheduler,
        generators=[
            _generator(generator, seed, sampler.device)
            for generator, seed in zip(contents.generators, seeds, strict=True)
        ],
        done=contents.done,
        extras={name: _restored(value, tensors) for name, value in contents.extras.items()},
        started=contents.started,
    )


class _Packer:
    """Collects the tensors of a batch, each of them once."""

    def __init__(self, latents: Tensor) -> None:
        self.device = latents.device
        self.layouts: list[Layout] = []
        self.size = 0
        self._parts: list[Tensor] = []
        self._indices: dict[int, int] = {}
        self._tensor(latents)

    def value(self, what: str, value: Any) -> Value:
        """Returns `value` in the form of the manifest. Raises SettingsError with `what` if its type is unsupported."""
        if value is None or type(value) in (bool, int, float, str):
            return cast("Value", value)
        if isinstance(value, Tensor) and value.dtype in DTYPE_NAMES and value.layout is torch.strided:
            return TensorAt(self._tensor(value))
        if isinstance(value, np.ndarray | np.generic) and is_numeric(value.dtype.str):
            return ArrayOf(value.dtype.str, value.shape, isinstance(value, np.generic), value.tobytes())
        if type(value) is list:
            return ListOf(tuple(self.value(what, item) for item in value))
        if type(value) in (tuple, torch.Size):
            return TupleOf(tuple(self.value(what, item) for item in value))
        if type(value) is dict and all(type(key) is str for key in value):
            return DictOf({key: self.value(what, item) for key, item in value.items()})
        raise SettingsError(
            f"{what} is a {type(value).__name__}, which cannot be handed over between ranks",
            "choose another --scheduler",
        )

    def payload(self) -> Tensor:
        """Returns all tensors in one new tensor on their device."""
        return torch.cat(self._parts)

    def _tensor(self, tensor: Tensor) -> int:
        if id(tensor) in self._indices:
            return self._indices[id(tensor)]
        dense = tensor.detach()
        if not is_dense(dense.shape, dense.stride()):
            dense = dense.contiguous()
        content = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        if tensor.device == self.device:
            offset, data = self._place(content), b""
        else:
            offset, data = None, bytes_of(content)
        self._indices[id(tensor)] = len(self.layouts)
        self.layouts.append(Layout(DTYPE_NAMES[dense.dtype], tuple(dense.shape), tuple(dense.stride()), offset, data))
        return len(self.layouts) - 1

    def _place(self, content: Tensor) -> int:
        offset = aligned(self.size)
        if offset > self.size:
            self._parts.append(content.new_zeros(offset - self.size))
        self._parts.append(content)
        self.size = offset + content.numel()
        return offset


def _same(value: Any, before: Any) -> bool:
    if value is before:
        return True
    if type(value) is not type(before) or isinstance(value, Tensor | np.ndarray):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(before) and all(itertools.starmap(_same, zip(value, before, strict=True)))
    if isinstance(value, Mapping):
        return value.keys() == before.keys() and all(_same(item, before[key]) for key, item in value.items())
    return isinstance(value, bool | int | float | str) and value == before


def _tensors(layouts: Sequence[Layout], payload: Tensor) -> Iterator[Tensor]:
    """Yields copies with the alignment of new tensors, because some libraries' results depend on the alignment.

    They are made on the current stream. Their memory is not reused before the default stream, which evaluates them, has
    finished with them.
    """
    for layout in layouts:
        content = (
            tensor_of(layout.data) if layout.offset is None else payload[layout.offset : layout.offset + layout.nbytes]
        )
        tensor = torch.empty_strided(layout.shape, layout.strides, dtype=DTYPES[layout.dtype], device=content.device)
        tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).copy_(content)
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.default_stream(tensor.device))
        yield tensor


def _check_attribute(name: str, sampler: Sampler) -> None:
    """Raises HandoverError unless the scheduler has the attribute, or its steps added it in the proof."""
    if name == "_internal_dict" or name not in vars(sampler.template).keys() | set(sampler.carried):
        raise HandoverError(f"a hand-over would set {name!r} of {sampler.name}, which its steps do not")


def _restored(value: Value, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, TensorAt):
        if not 0 <= value.index < len(tensors):
            raise HandoverError(f"a hand-over of {len(tensors)} tensors refers to tensor {value.index}")
        return tensors[value.index]
    if isinstance(value, ListOf):
        return [_restored(item, tensors) for item in value.items]
    if isinstance(value, TupleOf):
        return tuple(_restored(item, tensors) for item in value.items)
    if isinstance(value, DictOf):
        return {key: _restored(item, tensors) for key, item in value.items.items()}
    return _array(value) if isinstance(value, ArrayOf) else value


def _array(value: ArrayOf) -> Any:
    try:
        if not is_numeric(value.dtype) or (value.scalar and value.shape):
            raise ValueError("neither an array of numbers nor a number")
        array = np.frombuffer(value.data, np.dtype(value.dtype)).reshape(value.shape)
    except (ValueError, TypeError) as error:
        raise HandoverError(
            f"a hand-over has {len(value.data)} bytes for an array {list(value.shape)} of {value.dtype!r}"
        ) from error
    return array[()] if value.scalar else array.copy()


def _generator(generator: Generator, seed: int, device: torch.device) -> torch.Generator:
    """Restores a generator with its seed, which its state does not contain and torchsde's trees need."""
    try:
        made = torch.Generator(device if generator.device == "cuda" else "cpu").manual_seed(seed)
        made.set_state(tensor_of(generator.state))
    except (RuntimeError, TypeError) as error:
        raise HandoverError(f"the state of a {generator.device} generator cannot be used: {error}") from error
    return made


TOY_LATENT = (4, 8, 8)


def prove(sampler: Sampler, ranges: Sequence[tuple[int, int]], micro_batch: int, dtype: torch.dtype) -> None:
    """Compares a loop that is split at the borders of `ranges`, evaluations [start, end) per rank, with an unsplit one.

    Sets `sampler.carried` to the contents of the hand-overs besides the latents: the attributes of the scheduler and
    the values of its caller in alphabetical order, and "generator" if steps draw noise. Raises SettingsError with
    scheduler and border if a bit differs, or if the scheduler does not support splitting.
    """
    check_micro_batch(sampler.name, micro_batch)
    whole = _start(sampler, micro_batch, dtype)
    states = [generator.get_state() for generator in whole.generators]
    parts = _start(sampler, micro_batch, dtype)
    sampler.carried = ()
    for start, end in ranges:
        if start > 0:
            travels = changed(parts.scheduler, sampler.template).keys() | parts.extras.keys()
            sampler.carried = tuple(sorted(travels.union(sampler.carried)))
            parcel = pack(parts, sampler)
            parts = unpack(parcel.manifest, parcel.payload, sampler, parts.samples)
        _advance(sampler, parts, end)
        _advance(sampler, whole, end)
        if not _same_bits(parts.latents, whole.latents):
            raise SettingsError(
                f"{sampler.name} cannot be split between evaluations {start - 1} and {start}: latents handed over "
                "there do not become what they become in one piece",
                "choose another --split or --scheduler",
            )
    drew = any(
        not torch.equal(generator.get_state(), state) for generator, state in zip(whole.generators, states, strict=True)
    )
    if drew and len(ranges) > 1:
        sampler.carried += ("generator",)


def toy_model(latents: Tensor, timestep: Tensor, sampler: Sampler) -> Tensor:
    """Returns an output that depends non-linearly on every number of its input, and does not grow faster than it."""
    neighbours = latents.roll(1, dims=1)
    output = torch.tanh(0.7 * neighbours + 0.001 * timestep.to(latents.dtype)) + 0.1 * latents.clamp(-1, 1)
    return torch.cat([output, output], dim=1) if sampler.learns_variance else output


def _start(sampler: Sampler, micro_batch: int, dtype: torch.dtype) -> Batch:
    samples = list(range(micro_batch))
    generators = [torch.Generator().manual_seed(sample) for sample in samples]
    noise = [torch.randn((1, *TOY_LATENT), generator=generator, dtype=dtype) for generator in generators]
    latents = torch.cat(noise).to(sampler.device) * sampler.noise_scale
    return Batch(samples, latents, sampler.fresh(samples[0]), generators)


def _advance(sampler: Sampler, batch: Batch, end: int) -> None:
    shape, dtype = batch.latents.shape, batch.latents.dtype
    while batch.done < end:
        try:
            scaled = sampler.scale(batch, batch.latents)
            sampler.step(batch, toy_model(scaled, sampler.timesteps[batch.done], sampler))
        except torch.OutOfMemoryError:
            raise
        except ERRORS as error:
            raise SettingsError(
                f"{sampler.name} so configured fails in its evaluation {batch.done}: {' '.join(str(error).split())}",
                "change --sampling.options, or choose another --scheduler",
            ) from error
        if batch.latents.shape != shape or batch.latents.dtype != dtype:
            raise SettingsError(
                f"{sampler.name} turns latents of {list(shape)} {dtype} into {list(batch.latents.shape)} "
                f"{batch.latents.dtype} at evaluation {batch.done - 1}",
                "choose another --scheduler, or --precision fp32",
            )
    if not batch.latents.isfinite().all():  # with NaN everywhere, no difference could be found
        raise SettingsError(
            f"{sampler.name} so configured makes NaN or infinity of a toy model's output by evaluation {end - 1}",
            "change --sampling.options, or choose another --scheduler",
        )


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Returns whether two tensors are equal as by `torch.equal`, but with 0 different from -0."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
