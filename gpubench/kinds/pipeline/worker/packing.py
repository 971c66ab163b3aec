"""Converts a batch to the form in which it is sent to another rank, and back, without changing a bit.

All tensors on the latents' device go into one buffer, the payload, so that a hand-off needs a single transfer from
device to device. A `PackedBatch` describes everything else: the layouts of these tensors, numbers, the states of the
generators, and the tensors in CPU memory where the latents are on a GPU. It is sent as MessagePack with a fixed schema.
Nothing is pickled, and unpacking sets only attributes that the scheduler's own steps set.
"""

import itertools
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from gpubench.errors import HandoffError, SettingsError
from gpubench.kinds.pipeline.worker.sampler import REBUILT, Batch, Sampler

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
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """The strides in elements, without gaps. A model can return other bits for the same numbers in another layout."""
    data: bytes | None = None
    """The bytes of a tensor in CPU memory while the latents are on a GPU; None for a tensor in the payload."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class TensorAt(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    index: int
    """The index in `PackedBatch.tensors`."""


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


class GeneratorState(msgspec.Struct, frozen=True, array_like=True):
    device: Literal["cpu", "cuda"]
    state: bytes


class PackedBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch without the bytes of its payload. The first tensor is the latents."""

    samples: tuple[int, ...]
    done: int
    """The number of evaluations so far."""
    started: float
    """The start in seconds since the epoch."""
    tensors: tuple[Layout, ...]
    state: dict[str, Value]
    """The attributes of the scheduler that differ from its state after `set_timesteps`."""
    extras: dict[str, Value]
    """The values that the caller of the scheduler keeps for it."""
    generators: tuple[GeneratorState, ...]

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

    @property
    def payload_bytes(self) -> int:
        return max((end for _, end in positions(self.tensors)), default=0)


def positions(layouts: Sequence[Layout]) -> Iterator[tuple[int, int]]:
    """Yields the bytes [start, end) of each tensor in the payload. A tensor outside the payload takes none of them."""
    end = 0
    for layout in layouts:
        start = end if layout.data is not None else aligned(end)
        end = start if layout.data is not None else start + layout.nbytes
        yield start, end


def aligned(offset: int) -> int:
    """The smallest multiple of `ALIGNMENT` that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether such elements fill their memory without gaps or overlaps, in any order of dimensions."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= max(size, 1)  # as torch does for empty dimensions
    return all(0 <= number < 2**62 for number in (*shape, *strides))


def changed(scheduler: Any, template: Any) -> dict[str, Any]:
    """The attributes of `scheduler` that differ from those of `template`.

    Tensors are compared by identity, because a comparison of their contents would synchronise with the GPU.
    """
    before = vars(template)
    return {
        name: value
        for name, value in vars(scheduler).items()
        if name not in REBUILT and not (name in before and _same(value, before[name]))
    }


def pack(batch: Batch, sampler: Sampler) -> tuple[PackedBatch, Tensor]:
    """Returns all that the next evaluation of `batch` depends on: a description, and the payload.

    The payload is a uint8 tensor of shape (bytes,) on the latents' device. The result shares no memory with the batch.
    Packing does not synchronise if all tensors are on the GPU. Raises SettingsError with the attribute and its type if
    the scheduler keeps something that cannot be sent.
    """
    packer = _Packer(batch.latents)
    state = {
        name: packer.value(f"attribute {name} of {sampler.name}", value)
        for name, value in changed(batch.scheduler, sampler.template).items()
    }
    extras = {name: packer.value(f"{name} beside {sampler.name}", value) for name, value in batch.extras.items()}
    generators = tuple(
        GeneratorState("cuda" if generator.device.type == "cuda" else "cpu", bytes_of(generator.get_state()))
        for generator in batch.generators
    )
    tensors = tuple(packer.layouts)
    packed = PackedBatch(tuple(batch.samples), batch.done, batch.started, tensors, state, extras, generators)
    return packed, packer.payload()


def check(packed: PackedBatch) -> None:
    """Raises HandoffError if the description contradicts itself, so that it cannot describe any batch."""
    if problem := _contradiction(packed):
        raise HandoffError(f"its description contradicts itself: {problem}")


def unpack(packed: PackedBatch, payload: Tensor, sampler: Sampler, seeds: Sequence[int]) -> Batch:
    """Restores a batch on the sampler's device. `payload` may be on another device and may be reused afterwards.

    `packed` must have passed `check`, and `seeds` are those of its samples. Raises HandoffError if the payload has
    another size, or if a name, type or state does not suit the sampler.
    """
    if payload.dtype is not torch.uint8 or payload.shape != (packed.payload_bytes,):
        raise HandoffError(
            f"its payload is {payload.dtype} {list(payload.shape)}, and its description needs {packed.payload_bytes} "
            "bytes"
        )
    tensors = list(_tensors(packed.tensors, payload.to(sampler.device)))
    scheduler = sampler.fresh(seeds[0])
    for name, value in packed.state.items():
        _check_attribute(name, sampler)
        setattr(scheduler, name, _restored(value, tensors))
    return Batch(
        samples=list(packed.samples),
        latents=tensors[0],
        scheduler=scheduler,
        generators=[
            _generator(generator, seed, sampler.device)
            for generator, seed in zip(packed.generators, seeds, strict=True)
        ],
        done=packed.done,
        extras={name: _restored(value, tensors) for name, value in packed.extras.items()},
        started=packed.started,
    )


def checksum(payload: Tensor) -> int:
    """A checksum of a uint8 tensor of shape (bytes,): CRC-32 (zlib) on a CPU, `weighted_sum` on a GPU."""
    if payload.device.type != "cpu":
        return weighted_sum(payload)
    return zlib.crc32(payload.numpy().data)


def weighted_sum(payload: Tensor) -> int:
    """The sum of every byte times its position, modulo 2**32, which detects a changed byte and a swap of two.

    Positions restart at 65521, as in Adler-32 (zlib), so that the change of a byte cannot wrap around to 0.
    """
    places = torch.arange(payload.numel(), device=payload.device) % 65521 + 1
    return int((payload.to(torch.int64) * places).sum()) & 0xFFFFFFFF


def tensor_of(data: bytes) -> Tensor:
    """A uint8 tensor of shape (bytes,) on the CPU."""
    # frombuffer needs a writable buffer, and refuses an empty one.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def bytes_of(content: Tensor) -> bytes:
    data: bytes = content.cpu().numpy().tobytes()
    return data


class _Packer:
    """Collects the tensors of a batch, each of them once."""

    def __init__(self, latents: Tensor) -> None:
        self.layouts: list[Layout] = []
        self._device = latents.device
        self._parts: list[Tensor] = []
        self._size = 0
        self._indices: dict[int, int] = {}
        self._tensor(latents)

    def value(self, what: str, value: Any) -> Value:
        """The value as it is sent. Raises SettingsError with `what` if its type is not supported."""
        if value is None or type(value) in (bool, int, float, str):
            return cast("Value", value)
        if isinstance(value, Tensor) and value.dtype in DTYPE_NAMES and value.layout is torch.strided:
            return TensorAt(self._tensor(value))
        if isinstance(value, np.ndarray | np.generic) and _is_numeric(value.dtype.str):
            return ArrayOf(value.dtype.str, value.shape, isinstance(value, np.generic), value.tobytes())
        if type(value) is list:
            return ListOf(tuple(self.value(what, item) for item in value))
        if type(value) in (tuple, torch.Size):
            return TupleOf(tuple(self.value(what, item) for item in value))
        if type(value) is dict and all(type(key) is str for key in value):
            return DictOf({key: self.value(what, item) for key, item in value.items()})
        raise SettingsError(
            f"{what} is a {type(value).__name__}, which cannot be sent to another rank", "choose another --scheduler"
        )

    def payload(self) -> Tensor:
        return torch.cat(self._parts)

    def _tensor(self, tensor: Tensor) -> int:
        if id(tensor) in self._indices:
            return self._indices[id(tensor)]
        dense = tensor.detach()
        if not is_dense(dense.shape, dense.stride()):
            dense = dense.contiguous()
        content = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        data = None
        if tensor.device == self._device:
            self._append(content)
        else:
            data = bytes_of(content)
        self._indices[id(tensor)] = len(self.layouts)
        self.layouts.append(Layout(DTYPE_NAMES[dense.dtype], tuple(dense.shape), tuple(dense.stride()), data))
        return len(self.layouts) - 1

    def _append(self, content: Tensor) -> None:
        """Appends a tensor to the payload at the position that `positions` gives it."""
        start = aligned(self._size)
        if start > self._size:
            self._parts.append(content.new_zeros(start - self._size))
        self._parts.append(content)
        self._size = start + content.numel()


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


def _contradiction(packed: PackedBatch) -> str | None:
    if not packed.samples or not math.isfinite(packed.started):
        return f"{len(packed.samples)} samples since {packed.started}"
    if len(packed.generators) != len(packed.samples):
        return f"{len(packed.generators)} generators for {len(packed.samples)} samples"
    for number, layout in enumerate(packed.tensors):
        if layout.dtype not in DTYPES:
            return f"tensor {number} is of type {layout.dtype!r}"
        if not is_dense(layout.shape, layout.strides):
            return f"tensor {number} of shape {list(layout.shape)} has strides {list(layout.strides)}"
        if layout.data is not None and len(layout.data) != layout.nbytes:
            return f"tensor {number} has {len(layout.data)} bytes instead of {layout.nbytes}"
    return None if packed.tensors and packed.tensors[0].data is None else "it has no latents"


def _tensors(layouts: Sequence[Layout], payload: Tensor) -> Iterator[Tensor]:
    """Yields copies with the alignment of new tensors, because some libraries' results depend on the alignment.

    They are made on the current stream. Their memory is not reused before the default stream, which evaluates them, has
    finished with them.
    """
    for layout, (start, end) in zip(layouts, positions(layouts), strict=True):
        content = payload[start:end] if layout.data is None else tensor_of(layout.data)
        tensor = torch.empty_strided(layout.shape, layout.strides, dtype=DTYPES[layout.dtype], device=content.device)
        tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).copy_(content)
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.default_stream(tensor.device))
        yield tensor


def _check_attribute(name: str, sampler: Sampler) -> None:
    """Raises HandoffError unless the scheduler has the attribute, or its steps added it in the proof."""
    if name == "_internal_dict" or name not in vars(sampler.template).keys() | set(sampler.carried):
        raise HandoffError(f"it would set {name!r} of {sampler.name}, which the scheduler's steps do not set")


def _restored(value: Value, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, TensorAt):
        if not 0 <= value.index < len(tensors):
            raise HandoffError(f"it has {len(tensors)} tensors and refers to tensor {value.index}")
        return tensors[value.index]
    if isinstance(value, ListOf):
        return [_restored(item, tensors) for item in value.items]
    if isinstance(value, TupleOf):
        return tuple(_restored(item, tensors) for item in value.items)
    if isinstance(value, DictOf):
        return {key: _restored(item, tensors) for key, item in value.items.items()}
    return _array(value) if isinstance(value, ArrayOf) else value


_NUMERIC = re.compile(r"[<>=|]?[biuf][1248]")


def _is_numeric(dtype: str) -> bool:
    """Whether this is the short name of a numpy type of plain numbers, such as `<f8`."""
    return _NUMERIC.fullmatch(dtype) is not None


def _array(value: ArrayOf) -> Any:
    try:
        if not _is_numeric(value.dtype) or (value.scalar and value.shape):
            raise ValueError("neither an array of numbers nor a number")
        array = np.frombuffer(value.data, np.dtype(value.dtype)).reshape(value.shape)
    except (ValueError, TypeError) as error:
        raise HandoffError(
            f"it has {len(value.data)} bytes for an array {list(value.shape)} of {value.dtype!r}"
        ) from error
    return array[()] if value.scalar else array.copy()


def _generator(generator: GeneratorState, seed: int, device: torch.device) -> torch.Generator:
    """Restores a generator with its seed, which its state does not contain and torchsde's trees need."""
    try:
        made = torch.Generator(device if generator.device == "cuda" else "cpu").manual_seed(seed)
        made.set_state(tensor_of(generator.state))
    except (RuntimeError, TypeError) as error:
        raise HandoffError(f"its {generator.device} generator has a state that cannot be used: {error}") from error
    return made
