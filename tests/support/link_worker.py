"""One of several ranks that pipeline/test_link.py and test_collectives.py start.

    link_worker.py link|collectives RANK WORLD_SIZE FOLDER

`link` sends micro-batches down the chain of ranks, once for each entry of SCENARIOS, in the last of which a rank dies.
`collectives` exchanges what ranks know before the first evaluation. What each rank saw is left in
FOLDER/NAME-RANK.json.
"""

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from links import CPU, batch_of, terms
from torch._C._distributed_c10d import FileStore

from gpubench.errors import HandoffError
from gpubench.events import Handoff
from gpubench.kinds.pipeline.faults import OF_THE_RANK, Fault, FaultKind, before_evaluations
from gpubench.kinds.pipeline.worker import collectives
from gpubench.kinds.pipeline.worker.background import Receiver, Sender
from gpubench.kinds.pipeline.worker.link import Link, LinkTerms, connect, sending_link
from gpubench.kinds.pipeline.worker.sampler import Batch
from gpubench.ranks import Ranks
from gpubench.worker.distributed import is_broken_collective

SAMPLES = 6
FAULTY_RANK, FAULTY_SAMPLE = 1, 3


@dataclass(frozen=True)
class Scenario:
    bound: int = SAMPLES
    shape: tuple[int, ...] = (4, 8, 8)
    filler: int = 0
    """Bytes that the message is longer."""
    fault: FaultKind | None = None


SCENARIOS = {
    "one-in-flight": Scenario(bound=1),
    "three-in-flight": Scenario(bound=3),
    "long-message": Scenario(filler=20_000),
    "large": Scenario(bound=2, shape=(5_000_000,)),
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


def chains(ranks: Ranks, folder: Path) -> None:
    run = collectives.draw_run_id(ranks)
    for name, scenario in SCENARIOS.items():
        seen = Seen()
        try:
            chain(scenario, ranks, run, seen)
        except (HandoffError, RuntimeError) as error:
            seen.error = str(error)
            seen.broken = is_broken_collective(error)
        (folder / f"{name}-{ranks.rank}.json").write_bytes(msgspec.json.encode(seen))


def chain(scenario: Scenario, ranks: Ranks, run: bytes, seen: Seen) -> None:
    """Every rank adds 1 to each sample, whose first latent is its own number everywhere."""
    rank = ranks.rank
    fault = Fault(scenario.fault, FAULTY_RANK, FAULTY_SAMPLE, seconds=0.1) if scenario.fault else None
    before, after = connect(rank, ranks.world_size, "gloo", CPU)
    receiver = sender = None
    own = terms(scenario.shape, run=run, source=rank, done=rank + 1)
    if before:
        received = replace(own, source=rank - 1, destination=rank, done=rank)
        link = Link(before, received, now=time.time, report=seen.handoffs.append)
        receiver = Receiver(link, [[sample] for sample in range(SAMPLES)], bound=scenario.bound)
    if after:
        link = sending_link(after, own, fault, now=time.time, report=seen.handoffs.append)
        sender = Sender(link, time.time, bound=scenario.bound)
    for sample in range(SAMPLES):
        batch = receiver.take() if receiver else first_batch(scenario, own, sample)
        before_evaluations(fault, rank, batch.samples)
        seen.samples += batch.samples
        seen.exact &= bool((batch.latents == sample + rank).all())
        batch.latents += 1
        batch.done += 1
        if sender:
            sender.put(batch)
    if receiver:
        receiver.close()
        seen.received = receiver.received
    if sender and (rank != FAULTY_RANK or scenario.fault in (None, FaultKind.late)):  # else nobody takes the rest
        sender.close()
        seen.sent = sender.sent


def first_batch(scenario: Scenario, own: LinkTerms, sample: int) -> Batch:
    batch = batch_of(own, sample)
    batch.done = 0
    if scenario.filler:
        batch.extras["filler"] = "f" * scenario.filler
    return batch


class Told(msgspec.Struct):
    """What one rank came to know in the collectives."""

    gathered: list[str]
    run: str
    conditioning: list[dict[str, tuple[str, list[int], float]]]
    """Type, shape and sum of each tensor."""
    nothing: list[str]
    errors: dict[str, str]


FACTS: dict[str, collectives.Fact] = {
    "world_size": 3,
    "weights": "3fa1" * 16,
    "timesteps": [801.0, 401.0, 1.0],
    "scheduler": "A" * 100 + "beta_start=0.00085" + "B" * 100,
}
DIFFERENT: dict[str, collectives.Fact] = {
    "weights": "9bc2" * 16,
    "timesteps": [801.0, 400.0, 1.0],
    "scheduler": "A" * 100 + "beta_start=0.0001" + "B" * 100,
    "threads": 2,
}


def exchange(ranks: Ranks, folder: Path) -> None:
    collectives.agree(FACTS, ranks)
    odd_one = ranks.rank == ranks.world_size - 1
    differing = {name: {name: value} for name, value in DIFFERENT.items()} | {"fewer": {"timesteps": [801.0]}}
    errors = {}
    for name, change in differing.items():
        try:
            collectives.agree(FACTS | change if odd_one else FACTS, ranks)
        except HandoffError as error:
            errors[name] = error.message
    embeddings = torch.arange(12.0).reshape(3, 4).T  # not contiguous, and shared by two prompts
    prompts = [
        {"prompt_embeds": embeddings, "negative_prompt_embeds": torch.ones(1, 2, dtype=torch.bfloat16)},
        {"prompt_embeds": embeddings},
    ]
    told = Told(
        gathered=[data.decode() for data in collectives.gather_bytes(b"x" * 1000 * ranks.rank, ranks)],
        run=collectives.draw_run_id(ranks).hex(),
        conditioning=[
            {name: (str(value.dtype), list(value.shape), float(value.sum())) for name, value in prompt.items()}
            for prompt in collectives.broadcast_conditioning(prompts if ranks.is_rank_zero else None, ranks)
        ],
        nothing=[str(one) for one in collectives.broadcast_conditioning([] if ranks.is_rank_zero else None, ranks)],
        errors=errors,
    )
    (folder / f"told-{ranks.rank}.json").write_bytes(msgspec.json.encode(told))


def main(what: str, rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    act = {"link": chains, "collectives": exchange}[what]
    act(Ranks(rank, rank, world_size, world_size), folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    sys.stderr.flush()
    os._exit(0)  # threads of the faulty scenarios are still waiting for their peers
