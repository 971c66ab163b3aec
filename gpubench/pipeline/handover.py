"""A batch as bytes, and bytes as a batch: what one rank hands to the next between two evaluations.

Tensors travel in one buffer on the latents' device, one after the other, the latents first. Everything else is in the
manifest: numbers, the states of the generators, and tensors that live in host memory although the latents do not.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gpubench.errors import HandoverError, SettingsError
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.conventions import REBUILT
from gpubench.pipeline.manifest import (
    DTYPE_NAMES,
    DTYPES,
    ArrayOf,
    DictOf,
    Generator,
    Layout,
    ListOf,
    Manifest,
    TensorAt,
    TupleOf,
    Value,
    aligned,
    encode,
    is_dense,
    is_numeric,
    read_manifest,
)
from gpubench.pipeline.schedulers import Sampler
from gpubench.pipeline.wire import bytes_of, tensor_of

__all__ = ["Manifest", "Parcel", "changed", "pack", "read_manifest", "unpack"]


@dataclass(frozen=True)
class Parcel:
    """A batch ready to be sent; it shares no memory with the batch."""

    manifest: bytes
    payload: Tensor
    """(bytes,), uint8, on the latents' device."""
    latent_bytes: int
    state_bytes: int
    """Of the tensors that the scheduler and its caller keep."""
    generator_bytes: int


def changed(scheduler: Any, template: Any) -> dict[str, Any]:
    """The attributes of `scheduler` that its first steps have made other than they are in `template`.

    Tensors are compared by identity, as comparing their contents would wait for the GPU.
    """
    before = vars(template)
    return {
        name: value
        for name, value in vars(scheduler).items()
        if name not in REBUILT and not (name in before and _same(value, before[name]))
    }


def pack(batch: Batch, sampler: Sampler) -> Parcel:
    """Everything that the next evaluation of `batch` depends on. Never waits for a GPU that holds all of it.

    Raises SettingsError for a scheduler that keeps something which cannot travel, naming the attribute and its type.
    """
    luggage = _Luggage(batch.latents)
    state = {
        name: luggage.value(f"attribute {name} of {sampler.name}", value)
        for name, value in changed(batch.scheduler, sampler.template).items()
    }
    extras = {name: luggage.value(f"{name} beside {sampler.name}", value) for name, value in batch.extras.items()}
    manifest = Manifest(
        samples=tuple(batch.samples),
        done=batch.done,
        started=batch.started,
        tensors=tuple(luggage.layouts),
        state=state,
        extras=extras,
        generators=tuple(
            Generator("cuda" if generator.device.type == "cuda" else "cpu", bytes_of(generator.get_state()))
            for generator in batch.generators
        ),
        payload_bytes=luggage.size,
    )
    return Parcel(
        encode(manifest), luggage.payload(), manifest.latent_bytes, manifest.state_bytes, manifest.generator_bytes
    )


def unpack(manifest: bytes, payload: Tensor, sampler: Sampler, seeds: Sequence[int]) -> Batch:
    """The batch as it was packed, on the sampler's device; `payload` may be elsewhere and is free to be used again.

    `seeds` are those of its samples. Raises HandoverError for whatever does not fit: sizes, names, types, counts.
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


class _Luggage:
    """Gathers tensors, each once however often it is met."""

    def __init__(self, latents: Tensor) -> None:
        self.device = latents.device
        self.layouts: list[Layout] = []
        self.size = 0
        self._parts: list[Tensor] = []
        self._indices: dict[int, int] = {}
        self._tensor(latents)

    def value(self, what: str, value: Any) -> Value:
        """`value` as the manifest has it. Raises SettingsError, naming `what`, where it has no words for it."""
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
            f"{what} is a {type(value).__name__}, which cannot travel between ranks", "choose another --scheduler"
        )

    def payload(self) -> Tensor:
        """All parts in one new tensor, made on their device."""
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
    """Copies, aligned as new tensors are: some libraries' results depend on how their input is aligned."""
    for layout in layouts:
        content = (
            tensor_of(layout.data) if layout.offset is None else payload[layout.offset : layout.offset + layout.nbytes]
        )
        tensor = torch.empty_strided(layout.shape, layout.strides, dtype=DTYPES[layout.dtype], device=content.device)
        tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).copy_(content)
        yield tensor


def _check_attribute(name: str, sampler: Sampler) -> None:
    """Raises HandoverError unless such schedulers have the attribute, or the proof has seen their steps add it."""
    if name == "_internal_dict" or name not in vars(sampler.template).keys() | set(sampler.carried):
        raise HandoverError(f"a hand-over would set {name!r} of {sampler.name}, which its steps do not")


def _restored(value: Value, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, TensorAt):
        if not 0 <= value.index < len(tensors):
            raise HandoverError(f"a hand-over of {len(tensors)} tensors speaks of number {value.index}")
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
    """With its seed too, which the state does not hold and torchsde's trees grow from."""
    try:
        made = torch.Generator(device if generator.device == "cuda" else "cpu").manual_seed(seed)
        made.set_state(tensor_of(generator.state))
    except (RuntimeError, TypeError) as error:
        raise HandoverError(f"the state of a {generator.device} generator cannot be used: {error}") from error
    return made
