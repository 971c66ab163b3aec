"""Exchanges facts, prompts' embeddings and bytes between all ranks, over the default process group."""

import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from gpubench.errors import HandoffError
from gpubench.kinds.pipeline.worker.link import RUN_ID
from gpubench.kinds.pipeline.worker.packing import bytes_of, tensor_of
from gpubench.ranks import Ranks

Fact = str | int | float | Sequence[str] | Sequence[int] | Sequence[float]
SHOWN = 40  # characters of a value in a message


def agree(facts: Mapping[str, Fact], ranks: Ranks) -> None:
    """Compares the facts of all ranks. A collective.

    Raises HandoffError, on every rank, naming the first rank and fact that differ from rank 0's.
    """
    everyone = [msgspec.json.decode(data) for data in gather_bytes(msgspec.json.encode(dict(facts)), ranks)]
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise HandoffError(
                f"the ranks cannot work together: {_first_difference(rank, theirs, everyone[0])}",
                "all ranks need the same settings, files and installed versions",
            )


def _first_difference(rank: int, theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    name = next(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    there, here = theirs.get(name), ours.get(name)
    if isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            return f"rank {rank} has {len(there)} {name}, rank 0 has {len(here)}"
        at = _common_prefix(there, here)
        name, there, here = f"{name}[{at}]", there[at], here[at]
    same = _common_prefix(str(there), str(here))
    return f"rank {rank} has {name} {_excerpt(str(there), same)}, rank 0 has {_excerpt(str(here), same)}"


def _common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _excerpt(text: str, same: int) -> str:
    """The text, or the part of a long one around index `same`, where the difference begins."""
    if len(text) <= SHOWN:
        return text
    start = max(0, same - SHOWN // 2)
    return f"{'…' if start else ''}{text[start : start + SHOWN]}{'…' if start + SHOWN < len(text) else ''}"


def draw_run_id(ranks: Ranks) -> bytes:
    """Returns RUN_ID random bytes of rank 0 on every rank, which identify the hand-offs of one pass."""
    return broadcast_bytes(os.urandom(RUN_ID) if ranks.is_rank_zero else None, ranks)


def broadcast_conditioning(
    conditioning: Sequence[Mapping[str, Tensor]] | None, ranks: Ranks
) -> list[dict[str, Tensor]]:
    """Returns rank 0's `conditioning` (tensors by name for each prompt; None on other ranks) on every rank's CPU."""
    if ranks.world_size == 1:
        return [dict(prompt) for prompt in conditioning or ()]
    data = _as_safetensors(conditioning or ()) if ranks.is_rank_zero else None
    prompts: dict[int, dict[str, Tensor]] = {}
    for key, tensor in safetensors.torch.load(broadcast_bytes(data, ranks)).items():
        number, _, name = key.partition("/")
        prompts.setdefault(int(number), {})[name] = tensor
    return [prompts[number] for number in sorted(prompts)]


def _as_safetensors(conditioning: Sequence[Mapping[str, Tensor]]) -> bytes:
    """One safetensors file, with names such as `3/prompt_embeds` for prompt 3."""
    tensors = {
        # the format does not support shared memory
        f"{number}/{name}": tensor.cpu().clone(memory_format=torch.contiguous_format)
        for number, prompt in enumerate(conditioning)
        for name, tensor in prompt.items()
    }
    return safetensors.torch.save(tensors)


def gather_bytes(data: bytes, ranks: Ranks) -> list[bytes]:
    """Returns every rank's `data`, in order of rank, on every rank."""
    if ranks.world_size == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world_size)]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(padded, tensor_of(data.ljust(longest, b"\0")))
    return [bytes_of(mine[: int(size)]) for mine, size in zip(padded, sizes, strict=True)]


def pass_to_rank_zero(data: bytes, source: int, ranks: Ranks) -> bytes:
    """Returns the data of rank `source` on rank 0, and b"" on the others. These two ranks must call it."""
    if source == 0 or ranks.rank not in (0, source):
        return data if source == ranks.rank else b""
    if ranks.rank == source:
        dist.send(torch.tensor([len(data)]), 0)
        dist.send(tensor_of(data), 0)
        return b""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source)
    whole = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(whole, source)
    return bytes_of(whole)


def broadcast_bytes(data: bytes | None, ranks: Ranks) -> bytes:
    """Returns rank 0's `data` (None on the other ranks) on every rank."""
    if ranks.world_size == 1:
        return data or b""
    size = torch.tensor([len(data or b"")])
    dist.broadcast(size, 0)
    whole = tensor_of(data or bytes(int(size)))
    dist.broadcast(whole, 0)
    return bytes_of(whole)
