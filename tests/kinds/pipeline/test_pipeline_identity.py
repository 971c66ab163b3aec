"""Every sample of a pipeline of ranks is, bit for bit, the one that diffusers makes in a single process."""

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pipeline_worker
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from pipeline_worker import TAMPERED_SAMPLE, Case, Told
from places import SUPPORT
from running import PATIENCE, ended, gpubench
from test_schedulers import ROWS, Row, names

from gpubench.events import Verified

WORLD_SIZES = (1, 2, 3, 4)
ONE_OF_A_KIND, EVERY_LINE = False, True
"""Which lines of docs/schedulers.md are run. test_schedulers.py takes every line over every border, in one process."""
ALONE = (1, ONE_OF_A_KIND)
SEVERAL = [
    (3, ONE_OF_A_KIND),
    *(pytest.param(size, EVERY_LINE, marks=pytest.mark.stress) for size in WORLD_SIZES[1:]),
]
QUICK = {"measurement.baseline": "off", "verify": True}
SMALL = QUICK | {"model.height": 64, "model.width": 64}
DUMMY = SMALL | {"model.unet": "dummy", "model.step_ms": 0}
TINY = SMALL | {"model.unet": "tiny", "sampling.guidance_scale": 7.5}
STEPS = {"ConsistencyDecoderScheduler": 2, "MiniMaxH3Scheduler": 9, "PNDMScheduler": 9}
"""8 for all others: evaluations that some world sizes divide and some do not, however many a step takes."""
TERMS: tuple[dict[str, Any], ...] = (
    {"pipeline.split": "even", "pipeline.in_flight": 1, "work.samples": 2},
    {"pipeline.split": "balanced", "pipeline.in_flight": 2, "work.samples": 3},
)
OF_TINY = (
    "PNDMScheduler",
    "DDIMScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
    "HeunDiscreteScheduler",
)
MUCH_PATIENCE = 4 * PATIENCE  # each start is some hundred pipelines


def tampered(name: str, scheduler: str, micro_batch: int) -> Case:
    work = {"sampling.scheduler": scheduler, "sampling.steps": 7, "work.samples": 3, "work.micro_batch": micro_batch}
    return Case(TINY | work, TAMPERED_RANK, name)


TAMPERED_WORLD_SIZE, TAMPERED_RANK = 3, 1
TAMPERED = {
    "latents alone": tampered("latents alone", "PNDMScheduler", 1),
    "generators anew": tampered("generators anew", "EulerAncestralDiscreteScheduler", 1),
    "a little off": tampered("a little off", "DDIMScheduler", 2),
}


@dataclass(frozen=True)
class Start:
    """Some ranks that went through some cases, and what each of them told."""

    cases: dict[str, Case]
    ranks: list[dict[str, Told]]

    def samples(self, name: str) -> dict[int, str]:
        """sha256 of what the pipeline made."""
        return self.ranks[-1][name].sha256

    def verified(self, name: str) -> Verified:
        found = self.ranks[0][name].verified
        assert found
        return found

    def references(self, name: str) -> dict[int, str]:
        """sha256 of what diffusers made."""
        verified = self.verified(name)
        return dict(zip(verified.samples, verified.sha256, strict=True))


Starts = Callable[[int, bool], Start]
"""By world size, and with ONE_OF_A_KIND or EVERY_LINE."""


def cases(folder: Path, lines: bool) -> dict[str, Case]:
    """Lines of docs/schedulers.md, and a few schedulers with a real UNet under guidance."""
    variance_learner = QUICK | {"model.name": str(save_variance_learner(folder))}
    found = {}
    for place, row in enumerate(ROWS if lines == EVERY_LINE else one_of_each_kind()):
        model = variance_learner if "learned" in row.options else DUMMY
        found[names(row)] = Case(model | sampling(row) | TERMS[place % len(TERMS)])
    for place, scheduler in enumerate(OF_TINY):
        for micro_batch in (1, 2) if lines == EVERY_LINE else (1 + place % 2,):
            work = {"sampling.scheduler": scheduler, "sampling.steps": 5, "work.samples": 3}
            name = f"tiny {scheduler}, {micro_batch} at a time"
            found[name] = Case(TINY | work | {"work.micro_batch": micro_batch})
    return found


def one_of_each_kind() -> list[Row]:
    """A line for each set of what hand-offs carry, unless those of another line carry all of it and more."""
    kinds = {(row.draws, "learned" in row.options, row.carried): row for row in reversed(ROWS)}
    return [
        row
        for (*rest, carried), row in kinds.items()
        if not any(rest == others and carried < more for *others, more in kinds)
    ]


def sampling(row: Row) -> dict[str, Any]:
    return {
        "sampling.scheduler": row.scheduler,
        "sampling.options": ",".join(f"{key}={value}" for key, value in row.given.items()),
        "sampling.eta": row.eta,
        "sampling.steps": STEPS.get(row.scheduler, 8),
    }


def save_variance_learner(folder: Path) -> Path:
    """A model with an output for the variance too."""
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        out_channels=6,
        block_out_channels=(4, 8),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=2,
    )
    DDPMPipeline(unet=unet, scheduler=DDPMScheduler(variance_type="learned_range")).save_pretrained(folder)
    return folder


def start(todo: dict[str, Case], world_size: int, folder: Path) -> list[dict[str, Told]]:
    """What each rank of pipeline_worker.py told of each case."""
    folder.joinpath("cases.json").write_bytes(msgspec.json.encode(todo))
    script = [sys.executable, pipeline_worker.__file__]
    commands = [[*script, str(rank), str(world_size), str(folder)] for rank in range(world_size)]
    assert ended(commands, MUCH_PATIENCE) == [0] * world_size
    told = [folder.joinpath(f"told-{rank}.json").read_bytes() for rank in range(world_size)]
    return [msgspec.json.decode(data, type=dict[str, Told]) for data in told]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    @functools.cache
    def started(world_size: int, lines: bool) -> Start:
        every = cases(tmp_path_factory.mktemp("variance-learner"), lines)
        if (world_size, lines) == ALONE:  # a rank that hands nothing over; with EVERY_LINE it takes all of them
            every = {name: every[name] for name in [*every][::2]}
        todo = {name: case for name, case in every.items() if case.settings["sampling.steps"] >= world_size}
        more = TAMPERED if world_size == TAMPERED_WORLD_SIZE else {}
        return Start(todo, start(todo | more, world_size, tmp_path_factory.mktemp(f"identity-{world_size}")))

    return started


@pytest.mark.parametrize(
    ("world_size", "lines"), [ALONE, *SEVERAL, pytest.param(1, EVERY_LINE, marks=pytest.mark.stress)]
)
def test_every_sample_of_every_scheduler_is_the_one_of_a_single_process(
    world_size: int, lines: bool, starts: Starts
) -> None:
    started = starts(world_size, lines)
    for name, case in started.cases.items():
        assert started.verified(name).divergence is None, name
        assert started.samples(name) == started.references(name), name
        assert sorted(started.samples(name)) == list(range(case.settings["work.samples"])), name


@pytest.mark.parametrize(("world_size", "lines"), SEVERAL)
def test_a_sample_is_the_same_over_any_number_of_ranks(world_size: int, lines: bool, starts: Starts) -> None:
    alone, started = starts(1, lines), starts(world_size, lines)
    both = alone.cases.keys() & started.cases.keys()
    assert len(both) > 10
    assert {name: started.samples(name) for name in both} == {name: alone.samples(name) for name in both}


def test_the_samples_of_a_run_are_all_different(starts: Starts) -> None:
    alone = starts(*ALONE)
    for name in alone.cases:
        made = alone.samples(name).values()
        assert len(set(made)) == len(made), name


@pytest.mark.stress
def test_every_scheduler_met_steps_that_divide_and_steps_that_do_not(starts: Starts) -> None:
    met: dict[str, set[bool]] = {names(row): set() for row in ROWS if row.evaluations > max(WORLD_SIZES)}
    for world_size in WORLD_SIZES[1:]:
        ranks = starts(world_size, EVERY_LINE).ranks
        for name, kinds in met.items():
            total = ranks[0][name].ranges[-1][1]
            kinds.add(total % world_size == 0)
    assert [name for name, kinds in met.items() if len(kinds) < 2] == []


@pytest.mark.parametrize(
    ("name", "rank"),
    [("latents alone", TAMPERED_RANK + 1), ("generators anew", TAMPERED_RANK + 1), ("a little off", TAMPERED_RANK)],
)
def test_verification_names_the_sample_the_evaluation_and_the_rank_where_it_parts(
    name: str, rank: int, starts: Starts
) -> None:
    tampered = starts(TAMPERED_WORLD_SIZE, ONE_OF_A_KIND)
    made, references = tampered.samples(name), tampered.references(name)
    assert [sample for sample in references if made[sample] != references[sample]] == [TAMPERED_SAMPLE]
    divergence = tampered.verified(name).divergence
    assert divergence
    first, _ = tampered.ranks[0][name].ranges[rank]
    assert (divergence.sample, divergence.step, divergence.rank) == (TAMPERED_SAMPLE, first, rank)
    assert divergence.largest_difference > 0
    assert divergence.step_difference
    assert divergence.step_difference > 0


TAMPERING = """
import os
if os.environ.get("RANK") == "0":  # a worker; the command itself has no rank
    import pipeline_worker
    pipeline_worker.packing.pack = pipeline_worker.latents_alone
"""


def test_a_run_with_a_sample_that_diffusers_would_not_make_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(TAMPERING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(SUPPORT)]))
    size = ("--model.height=64", "--model.width=64", "--steps", "5", "--samples", "2")
    run = ("--device", "cpu", "--world-size", "2", "--repeats", "1", "--baseline", "off", "--performance.cpu_threads=1")
    done = gpubench("pipe-infer", "--unet", "tiny", "--verify", *size, *run, results=tmp_path / "results")
    assert done.code == 1, done.stderr
    message = "1 of 2 samples differ from diffusers StableDiffusionPipeline.__call__"
    assert f"error: {message}" in done.stderr
    record = done.document("run.json")
    assert (record["status"], record["error"]["message"]) == ("failed", message)
    found = done.document("summary.json")["pipeline"]["verification"]
    assert (found["samples"], found["identical"]) == (2, 1)
    assert (found["divergence"]["sample"], found["divergence"]["step"], found["divergence"]["rank"]) == (1, 3, 1)
    assert "1 of 2 samples is bit-identical" in done.stdout
    assert [line["sample"] for line in done.lines("samples.jsonl")] == [0, 1]
