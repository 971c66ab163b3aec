"""Are two ranks measured right whose gradients, or latents, NCCL carries from one GPU to another?"""

import json
import sys
from collections.abc import Iterator

import bars
from bars import Bar

from first_checks.here import PROGRAMS, Failed, Here
from first_checks.stopwatch import TINY, agreement

RANKS = 2
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")


def check(here: Here) -> Iterator[Bar]:
    if len(here.gpus) < 2:
        yield bars.skipped("two ranks over NCCL", "one GPU is visible")
        return
    if here.wants("ddp"):
        yield from replicated(here)
    if here.wants("pipeline"):
        yield from pipelined(here)


def replicated(here: Here) -> Iterator[Bar]:
    outputs = here.folder / "replicated"
    outputs.mkdir(parents=True)
    command = (sys.executable, *TORCHRUN, str(PROGRAMS / "replicated.py"), str(outputs))
    try:
        run = here.run("train-bench", "--steps=all", "--repeats=1", program=(*command, *(TINY if here.tiny else ())))
    except Failed as failed:
        yield bars.holds("DDP: the run completes", str(failed), "it does", good=False)
        return
    for rank in range(RANKS):
        own = json.loads((outputs / f"{rank}.json").read_text())
        yield from agreement(f"DDP, rank {rank}", run, own, rank)


def pipelined(here: Here) -> Iterator[Bar]:
    size = (
        "--unet=tiny",
        "--steps=6",
        "--samples=4",
        f"--world-size={RANKS}",
        "--device=cuda",
        "--repeats=1",
        "--verify",
    )
    try:
        run = here.run("pipe-infer", *size)
    except Failed as failed:
        yield bars.holds("pipe-infer: the run completes", str(failed), "it does", good=False)
        return
    summary = run.document("summary.json")["pipeline"]
    verified = summary["verification"]
    yield bars.every("pipe-infer: samples that are bit-identical", verified["identical"], verified["samples"])
    backend = run.document("run.json")["settings"]["distributed.backend"]
    yield bars.holds("pipe-infer: backend", str(backend), "nccl", good=backend == "nccl")
