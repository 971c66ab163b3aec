"""What a pipeline loses to its hand-offs: `python benchmarks/pipeline_efficiency.py`.

Three tables, each made by `gpubench pipe-infer` or by the modules behind it:

    the pipeline itself   an evaluation of fixed latency, so that only the pipeline can be slow:
                          makespan over the ideal (M + N - 1) S/N t, for M samples over N ranks of S evaluations.
                          t is an evaluation with the scheduler's step after it, as measured in a minimal program
                          on this machine: it waits for the fixed latency as the dummy does, calls the scheduler's
                          step, and uses blocking send and recv of the latent alone. It checks nothing; what it takes
                          above the ideal is the cost of sending on this machine.
    a real UNet           the tiny one, over the ideal made of the run's own evaluations, scheduler's steps included
    a hand-off           its bytes, and the time to pack and to unpack it, by scheduler

The scheduler's step is not a loss of the pipeline: every program has it. It takes some tenths of a millisecond after a
wait of 20 ms, which is more than hand-offs cost. Bars are for the makespan of the first table.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bars
from tables import table

STEPS = 48  # divided by every world size here
BARS = {2: 1.01, 4: 1.015, 8: 1.03}
SCHEDULERS = (
    "DDIMScheduler",
    "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
    "PNDMScheduler",
    "SASolverScheduler",
)
LATENT = (4, 64, 64)  # of a 512 x 512 image
ROUNDS = 200


@dataclass(frozen=True)
class Pipeline:
    """One pipeline that was run, in seconds."""

    samples: int
    ranks: int
    makespan: float
    evaluation: float
    efficiency: float
    identical: str


@dataclass(frozen=True)
class Shortest:
    """The minimal program that does a pipeline's work, in seconds."""

    samples: int
    ranks: int
    makespan: float
    evaluation: float
    """With the scheduler's step, on average."""

    @property
    def ideal(self) -> float:
        """(M + N - 1) S/N t."""
        return (self.samples + self.ranks - 1) * STEPS / self.ranks * self.evaluation


def run(folder: Path, samples: int, ranks: int, *arguments: str) -> Pipeline:
    """Run `gpubench pipe-infer` and return its best repeat, as only other work on the machine makes one slower."""
    print(f"{samples} samples over {ranks} ranks {' '.join(arguments)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "gpubench", "pipe-infer", "--quiet", "--json", "--results", str(folder)]
    command += ["--device", "cpu", "--performance.cpu_threads=1", "--samples", str(samples), "--steps", str(STEPS)]
    command += ["--world-size", str(ranks), "--baseline", "off", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{finished.stderr}")
    summary = json.loads(finished.stdout)["runs"][0]
    metrics = {metric["name"]: metric["repeats"] for metric in summary["metrics"]}
    best = min(range(len(metrics["makespan"])), key=metrics["makespan"].__getitem__)
    verified = summary["pipeline"]["verification"]
    return Pipeline(
        samples,
        ranks,
        metrics["makespan"][best],
        metrics["evaluation_time"][best],
        metrics["pipeline_efficiency"][best],
        f"{verified['identical']}/{verified['samples']}" if verified else "not verified",
    )


def shortest(samples: int, ranks: int, repeats: int, latency: float) -> Shortest:
    """Return the best of several rounds of the minimal program, with evaluations of `latency` seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    arguments = ["--bare", str(samples), str(repeats), str(latency)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(Path(__file__).resolve()), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    makespan, evaluation = map(float, finished.stdout.split()[-2:])
    return Shortest(samples, ranks, makespan, evaluation)


def bare_rank(samples: int, repeats: int, latency: float) -> None:
    """One rank of the minimal program. The first rank prints makespan and mean evaluation of the best round."""
    import torch
    import torch.distributed as dist
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    from gpubench.kinds.pipeline.worker.models import _sleep_until

    torch.set_num_threads(1)
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(STEPS)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = STEPS // ranks * rank
    own = scheduler.timesteps[first : first + STEPS // ranks]
    latent = torch.zeros(1, *LATENT)
    rounds = []
    for _ in range(1 + repeats):  # the first round opens the connections
        dist.barrier()
        began, evaluating = time.perf_counter(), 0.0
        for _ in range(samples):
            if rank > 0:
                dist.recv(latent, rank - 1)
            for timestep in own:
                begun = time.perf_counter()
                output = latent * 0.1
                _sleep_until(begun + latency)
                latent = scheduler.step(output, timestep, latent, return_dict=False)[0]
                evaluating += time.perf_counter() - begun
            if rank < ranks - 1:
                dist.send(latent, rank + 1)
        makespan = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        evaluation = torch.tensor(evaluating / samples / STEPS, dtype=torch.float64)  # of all ranks, once summed
        dist.all_reduce(makespan, dist.ReduceOp.MAX)
        dist.all_reduce(evaluation)
        rounds.append((float(makespan), float(evaluation)))
    if rank == 0:
        print(*min(rounds[1:]), flush=True)
    dist.barrier()
    os._exit(0)


def fixed_latency(
    folder: Path, counts: list[int], repeats: int, latency: float
) -> Iterator[tuple[list[str], bars.Bar]]:
    """Rows of the first table, each with its verdict."""
    for ranks, bar in BARS.items():
        for samples in counts:
            options = ("--unet", "dummy", "--step-ms", str(latency * 1e3), "--repeats", str(repeats))
            loop = shortest(samples, ranks, repeats, latency)
            found = run(folder, samples, ranks, *options)
            ratio, own = found.makespan / loop.ideal, loop.makespan / loop.ideal
            times = [f"{one.evaluation * 1e3:.3f}" for one in (loop, found)]
            row = [str(ranks), str(samples), *times, f"{loop.ideal:.3f}", f"{found.makespan:.3f}"]
            judged = bars.at_most(f"over ideal, {ranks} ranks, {samples} samples", ratio, bar, "{:.4f}")
            yield [*row, f"{ratio:.4f}", f"{own:.4f}", found.identical], judged


def real_model(folder: Path, counts: list[int], repeats: int) -> Iterator[list[str]]:
    """Rows of the second table."""
    for ranks in BARS:
        for samples in counts:
            options = ("--unet", "tiny", "--repeats", str(repeats), "--scheduler", "DDIMScheduler")
            found = run(folder, samples, ranks, *options)
            row = [str(ranks), str(samples), f"{found.evaluation * 1e3:.2f}", f"{found.makespan:.3f}"]
            yield [*row, f"{1 / found.efficiency:.4f}", found.identical]


def handoffs() -> Iterator[list[str]]:
    """Rows of the third table."""
    import msgspec
    import torch

    from gpubench.kinds.pipeline.worker.packing import pack, unpack
    from gpubench.kinds.pipeline.worker.sampler import Batch, build, create
    from gpubench.kinds.pipeline.worker.verification import prove

    torch.set_num_threads(1)
    for name in SCHEDULERS:
        sampler = build(create(name, {}, {}), 20, torch.device("cpu"))
        prove(sampler, [(0, 1), (1, sampler.total)], 1, torch.float32)
        generators = [torch.Generator().manual_seed(0)]
        batch = Batch([0], torch.randn(1, *LATENT, generator=generators[0]), sampler.fresh(0), generators)
        for _ in range(min(11, sampler.total - 1)):  # histories are full, and a second-order step is half done
            sampler.step(batch, sampler.scale(batch, batch.latents) * 0.1)
        packed, payload = pack(batch, sampler)
        packing = typical(partial(pack, batch, sampler))
        unpacking = typical(partial(unpack, packed, payload, sampler, [0]))
        described = len(msgspec.msgpack.encode(packed))
        sizes = [packed.latent_bytes, packed.state_bytes, packed.generator_bytes, described]
        yield [name, *map(str, sizes), f"{packing * 1e6:.0f}", f"{unpacking * 1e6:.0f}"]


def typical(work: Callable[[], Any]) -> float:
    """Median seconds of `ROUNDS` calls."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=2, help="fresh processes for each cell")
    parser.add_argument("--step-ms", type=float, default=20.0, help="the fixed latency")
    parser.add_argument("--bare", nargs=3, metavar=("SAMPLES", "REPEATS", "SECONDS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        bare_rank(int(given.bare[0]), int(given.bare[1]), float(given.bare[2]))
    with tempfile.TemporaryDirectory() as folder:
        fixed = list(fixed_latency(Path(folder), given.samples, given.repeats, given.step_ms / 1e3))
        real = list(real_model(Path(folder), given.samples, given.repeats))
    print(f"{STEPS} evaluations of {given.step_ms:g} ms each, and the scheduler's step after each\n")
    heads = ["ranks", "samples", "evaluation + step ms", "gpubench's", "ideal s", "makespan s", "over ideal"]
    heads += ["shortest", "bit-identical"]
    print(table([heads, *(row for row, _ in fixed)]))
    heads = ["ranks", "samples", "evaluation ms", "makespan s", "over ideal", "bit-identical"]
    print(f"\ntiny UNet, {STEPS} evaluations, {os.cpu_count()} cores: over the ideal made of its own evaluations\n")
    print(table([heads, *real]))
    heads = ["scheduler", "latent B", "state B", "generator B", "description B", "pack us", "unpack us"]
    print("\none hand-off of one 4 x 64 x 64 fp32 latent\n")
    print(table([heads, *handoffs()]))
    return bars.conclude([judged for _, judged in fixed])


if __name__ == "__main__":
    sys.exit(main())
