"""What a hand-over says of itself: enough to refuse it, or to rebuild the batch from its bytes. Nothing is pickled."""

import math
import re
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch

from gpubench.errors import HandoverError

ALIGNMENT = 16  # bytes: the largest element there is, so that every tensor can be viewed where it lies
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: what it is, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, without gaps: a model can give other bits for the same numbers laid out differently."""
    offset: int | None
    """In the payload, in bytes; None for a tensor in host memory beside latents on a GPU."""
    data: bytes = b""
    """The bytes of such a tensor, which need not pass through the GPU."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class TensorAt(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    index: int
    """In the manifest's tensors."""


class ListOf(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    items: "tuple[Value, ...]"


class TupleOf(msgspec.Struct, frozen=True, array_like=True, tag="tuple"):
    items: "tuple[Value, ...]"


class DictOf(msgspec.Struct, frozen=True, array_like=True, tag="dict"):
    items: "dict[str, Value]"


class ArrayOf(msgspec.Struct, frozen=True, array_like=True, tag="numpy"):
    """A numpy array; with `scalar`, the numpy number in one without dimensions."""

    dtype: str
    shape: tuple[int, ...]
    scalar: bool
    data: bytes


Value = None | bool | int | float | str | TensorAt | ListOf | TupleOf | DictOf | ArrayOf


class Generator(msgspec.Struct, frozen=True, array_like=True):
    device: Literal["cpu", "cuda"]
    state: bytes


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first tensor is the latents."""

    samples: tuple[int, ...]
    done: int
    """Evaluations so far."""
    started: float
    tensors: tuple[Layout, ...]
    state: dict[str, Value]
    """Attributes of the scheduler that differ from what `set_timesteps` left."""
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
        """Of the tensors that are not the latents."""
        return sum(layout.nbytes for layout in self.tensors[1:])

    @property
    def generator_bytes(self) -> int:
        return sum(len(generator.state) for generator in self.generators)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    return _encoder.encode(manifest)


def read_manifest(data: bytes) -> Manifest:
    """Raises HandoverError for anything that is not a manifest whose parts fit each other and the payload's size."""
    try:
        manifest = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoverError(f"the manifest of a hand-over cannot be read: {error}") from error
    problem = _problem(manifest)
    if problem is not None:
        raise HandoverError(f"the manifest of a hand-over contradicts itself: {problem}")
    return manifest


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements so laid out fill their memory without gaps or overlaps, in whatever order of dimensions."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= max(size, 1)  # as torch counts where there is nothing to lay out
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
    """What is wrong with the first tensor that does not lie where it can."""
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
    """The next byte at or behind `offset` where a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


_NUMERIC = re.compile(r"[<>=|]?[biuf][1248]")


def is_numeric(dtype: str) -> bool:
    """Whether this is a numpy type of plain numbers, in numpy's short form such as `<f8`."""
    return _NUMERIC.fullmatch(dtype) is not None
