"""One of several ranks that test_pipeline_identity.py starts.

    pipeline_worker.py RANK WORLD_SIZE FOLDER

Meets the others once, takes one pipeline after another through its repeat as `gpubench pipe-infer` does, one for each
entry of FOLDER/cases.json, and leaves what this rank told of each in FOLDER/told-RANK.json.
"""

import dataclasses
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from gpubench import events
from gpubench.channel import Activity
from gpubench.kinds.pipeline.defaults import complete
from gpubench.kinds.pipeline.settings import PipeSettings
from gpubench.kinds.pipeline.worker import packing
from gpubench.kinds.pipeline.worker import rank as worker
from gpubench.kinds.pipeline.worker.denoiser import Denoiser
from gpubench.kinds.pipeline.worker.link import Transport, connect
from gpubench.kinds.pipeline.worker.packing import PackedBatch
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler
from gpubench.ranks import Ranks
from gpubench.settings.loading import apply_overrides
from gpubench.worker import distributed

CPU = torch.device("cpu")
TAMPERED_SAMPLE = 1
JOB = events.Job("", "", {}, [0], (0.0, 0.0), machine="")


class Case(msgspec.Struct):
    """A pipeline, and on one rank something that no handshake can see."""

    settings: dict[str, Any]
    """By dot-key."""
    tampered_rank: int | None = None
    tampering: str = ""
    """Of TAMPERINGS."""


class Told(msgspec.Struct):
    """What one rank told of one case."""

    ranges: list[tuple[int, int]] = []
    sha256: dict[int, str] = {}
    """By sample; on the last rank."""
    verified: events.Verified | None = None
    """On rank 0."""


def latents_alone(batch: Batch, sampler: Sampler) -> tuple[PackedBatch, Tensor]:
    """A hand-off that forgets what the scheduler remembers."""
    if TAMPERED_SAMPLE in batch.samples:
        batch = dataclasses.replace(batch, scheduler=sampler.template)
    return PACK(batch, sampler)


def generators_anew(batch: Batch, sampler: Sampler) -> tuple[PackedBatch, Tensor]:
    """A hand-off whose generators begin again."""
    if TAMPERED_SAMPLE in batch.samples:
        anew = [torch.Generator().manual_seed(generator.initial_seed()) for generator in batch.generators]
        batch = dataclasses.replace(batch, generators=anew)
    return PACK(batch, sampler)


def a_little_off(denoiser: Denoiser, batch: Batch, sampler: Sampler) -> Tensor:
    """A prediction in which one number of the sample is not the model's."""
    output = PREDICT(denoiser, batch, sampler)
    if TAMPERED_SAMPLE in batch.samples:
        output[batch.samples.index(TAMPERED_SAMPLE)].view(-1)[0] += 1e-3
    return output


PACK = packing.pack
PREDICT = Denoiser.predict
TAMPERINGS: dict[str, tuple[object, str, object]] = {
    "latents alone": (packing, "pack", latents_alone),
    "generators anew": (packing, "pack", generators_anew),
    "a little off": (Denoiser, "predict", a_little_off),
}
"""What stands where instead of what belongs there, to the harm of TAMPERED_SAMPLE."""


def repeat(case: Case, ranks: Ranks, neighbours: tuple[Transport | None, Transport | None]) -> Told:
    told = Told()

    def take(event: events.Message) -> None:
        match event:
            case events.PipelineBuilt():
                told.ranges = event.ranges
            case events.SampleFinished(sample=sample):
                told.sha256[sample.sample] = sample.sha256
            case events.Verified():
                told.verified = event

    asked = {"device": "cpu", "distributed.world_size": ranks.world_size, "performance.cpu_threads": 1}
    settings, _ = complete(apply_overrides(PipeSettings(), asked | case.settings))
    with ExitStack() as tampered:
        if ranks.rank == case.tampered_rank:
            tampered.enter_context(patch.object(*TAMPERINGS[case.tampering]))
        for event in worker.run_repeat(settings, JOB, ranks, 0, CPU, neighbours, Activity(), take):
            take(event)
    return told


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(rank, rank, world_size, world_size)
    distributed.setup_control(ranks, FileStore(str(folder / "store"), world_size) if world_size > 1 else None)
    neighbours = connect(rank, world_size, "gloo", CPU)
    cases = msgspec.json.decode((folder / "cases.json").read_bytes(), type=dict[str, Case])
    with patch.object(worker, "time_reference_workload", return_value=0.0):  # nothing is timed here
        told = {name: repeat(case, ranks, neighbours) for name, case in cases.items()}
    (folder / f"told-{rank}.json").write_bytes(msgspec.json.encode(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.stderr.flush()
    os._exit(0)  # as ranks of gpubench itself leave
