"""One of several ranks that test_links.py and test_handshake.py start.

    links_worker.py links|handshake RANK WORLD_SIZE FOLDER

`links` sends micro-batches down the chain of ranks, once for each entry of SCENARIOS, in the last of which a rank dies.
`handshake` goes through what ranks tell each other before the first evaluation. What each rank saw is left in
FOLDER/NAME-RANK.json.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from gpubench.errors import HandoverError
from gpubench.events import Handoff
from gpubench.pipeline import handshake
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.folders import OF_THE_RANK, Fault, FaultKind
from gpubench.pipeline.transfer import Inbox, Outbox, before_evaluations, faulty_edge, faulty_pack
from gpubench.pipeline.wire import Route, open_edges
from gpubench.ranks import Ranks
from gpubench.worker.distributed import is_broken_collective

CPU = torch.device("cpu")
SAMPLES = 6
FAULTY_RANK, FAULTY_SAMPLE = 1, 3


class Manifest(msgspec.Struct, frozen=True):
    """Stands in for the hand-over's own."""

    samples: list[int]
    done: int
    shape: list[int]
    dtype: str
    latent_bytes: int
    payload_bytes: int
    state_bytes: int = 0
    generator_bytes: int = 0
    filler: bytes = b""


@dataclass(frozen=True)
class Parcel:
    manifest: bytes
    payload: Tensor
    latent_bytes: int
    state_bytes: int = 0
    generator_bytes: int = 0


@dataclass(frozen=True)
class Scenario:
    bound: int = SAMPLES
    shape: tuple[int, ...] = (1, 4, 8, 8)
    filler: int = 0
    """Bytes that the manifest is longer."""
    fault: FaultKind | None = None

    def pack(self, batch: Batch) -> Parcel:
        latents, size = batch.latents, batch.latents.nbytes
        manifest = Manifest(
            batch.samples, batch.done, list(latents.shape), str(latents.dtype), size, size, filler=b"f" * self.filler
        )
        return Parcel(msgspec.msgpack.encode(manifest), latents.reshape(-1).view(torch.uint8), size)

    def admit(self, data: bytes) -> Manifest:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
        if (manifest.dtype, manifest.shape) != ("torch.float32", list(self.shape)):
            raise HandoverError(f"its latent is {manifest.dtype} {manifest.shape}")
        return manifest

    def unpack(self, data: bytes, payload: Tensor) -> Batch:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
        return Batch(manifest.samples, payload.view(torch.float32).reshape(self.shape), None, [], manifest.done)


SCENARIOS = {
    "one-in-flight": Scenario(bound=1),
    "three-in-flight": Scenario(bound=3),
    "long-manifest": Scenario(filler=20_000),
    "large": Scenario(bound=2, shape=(1, 5_000_000)),
    **{kind.value: Scenario(fault=kind) for kind in FaultKind if kind not in OF_THE_RANK},
    "death": Scenario(fault=FaultKind.kill),
}


class Seen(msgspec.Struct):
    """What one rank saw of one scenario."""

    samples: list[int] = []
    exact: bool = True
    """Whether each latent was what the ranks before should have made of it."""
    sent: int = 0
    received: int = 0
    handoffs: list[Handoff] = []
    error: str | None = None
    broken: bool = False
    """The error says that another rank went away."""


def links(ranks: Ranks, folder: Path) -> None:
    run = handshake.draw_run_id(ranks)
    for name, scenario in SCENARIOS.items():
        seen = Seen()
        try:
            chain(scenario, ranks, run, seen)
        except (HandoverError, RuntimeError) as error:
            seen.error = str(error)
            seen.broken = is_broken_collective(error)
        (folder / f"{name}-{ranks.rank}.json").write_bytes(msgspec.json.encode(seen))


def chain(scenario: Scenario, ranks: Ranks, run: bytes, seen: Seen) -> None:
    """Every rank adds 1 to each sample, whose first latent is its own number everywhere."""
    rank = ranks.rank
    fault = Fault(scenario.fault, FAULTY_RANK, FAULTY_SAMPLE, seconds=0.1) if scenario.fault else None
    before, after = open_edges(rank, ranks.world_size, "gloo", CPU)
    inbox = outbox = None
    if before:
        inbox = Inbox(
            before,
            Route(run, 0, rank - 1, rank),
            [[sample] for sample in range(SAMPLES)],
            rank,
            bound=scenario.bound,
            admit=scenario.admit,
            unpack=scenario.unpack,
            tell=seen.handoffs.append,
            now=time.time,
        )
    if after:
        outbox = Outbox(
            faulty_edge(after, fault, rank),
            Route(run, 0, rank, rank + 1),
            bound=scenario.bound,
            pack=faulty_pack(scenario.pack, fault, rank),
            tell=seen.handoffs.append,
            now=time.time,
        )
    for sample in range(SAMPLES):
        batch = inbox.take() if inbox else Batch([sample], torch.full(scenario.shape, float(sample)), None, [])
        before_evaluations(fault, rank, batch.samples)
        seen.samples += batch.samples
        seen.exact &= bool((batch.latents == sample + rank).all())
        batch.latents += 1
        batch.done += 1
        if outbox:
            outbox.put(batch)
    if inbox:
        inbox.close()
        seen.received = inbox.received
    if outbox and (rank != FAULTY_RANK or scenario.fault in (None, FaultKind.late)):  # else nobody takes the rest
        outbox.close()
        seen.sent = outbox.sent


class Told(msgspec.Struct):
    """What one rank came to know in the handshake."""

    gathered: list[str]
    run: str
    conditioning: list[dict[str, tuple[str, list[int], float]]]
    """Type, shape and sum of each tensor."""
    nothing: list[str]
    errors: dict[str, str]


FACTS: dict[str, handshake.Fact] = {
    "world_size": 3,
    "weights": "3fa1" * 16,
    "timesteps": [801.0, 401.0, 1.0],
    "scheduler": "A" * 100 + "beta_start=0.00085" + "B" * 100,
}
DIFFERENT: dict[str, handshake.Fact] = {
    "weights": "9bc2" * 16,
    "timesteps": [801.0, 400.0, 1.0],
    "scheduler": "A" * 100 + "beta_start=0.0001" + "B" * 100,
    "threads": 2,
}


def shake_hands(ranks: Ranks, folder: Path) -> None:
    handshake.agree(FACTS, ranks)
    odd_one = ranks.rank == ranks.world_size - 1
    differing = {name: {name: value} for name, value in DIFFERENT.items()} | {"fewer": {"timesteps": [801.0]}}
    errors = {}
    for name, change in differing.items():
        try:
            handshake.agree(FACTS | change if odd_one else FACTS, ranks)
        except HandoverError as error:
            errors[name] = error.message
    embeddings = torch.arange(12.0).reshape(3, 4).T  # not contiguous, and shared by two prompts
    prompts = [
        {"prompt_embeds": embeddings, "negative_prompt_embeds": torch.ones(1, 2, dtype=torch.bfloat16)},
        {"prompt_embeds": embeddings},
    ]
    told = Told(
        gathered=[data.decode() for data in handshake.gather_bytes(b"x" * 1000 * ranks.rank, ranks)],
        run=handshake.draw_run_id(ranks).hex(),
        conditioning=[
            {name: (str(value.dtype), list(value.shape), float(value.sum())) for name, value in prompt.items()}
            for prompt in handshake.broadcast_conditioning(prompts if ranks.is_rank_zero else None, ranks)
        ],
        nothing=[str(prompt) for prompt in handshake.broadcast_conditioning([] if ranks.is_rank_zero else None, ranks)],
        errors=errors,
    )
    (folder / f"told-{ranks.rank}.json").write_bytes(msgspec.json.encode(told))


def main(what: str, rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    act = {"links": links, "handshake": shake_hands}[what]
    act(Ranks(rank, rank, world_size, world_size), folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    sys.stderr.flush()
    os._exit(0)  # threads of the faulty scenarios are still waiting for their peers
