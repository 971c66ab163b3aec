"""What must be handed over between ranks for each scheduler of diffusers, and the effect of leaving it out.

    .venv/bin/python benchmarks/schedulers.py [--pipelines]

Writes docs/schedulers.md. A loop with a toy model as the denoiser is cut once at every border between two evaluations,
continued by a new scheduler, and compared bit by bit with the uncut loop: once with the latents alone and a newly
seeded generator, once with everything that gpubench hands over. Bar: the latter is exact everywhere.

With --pipelines it compares small pipelines with random weights instead, of six families, in bf16 and fp16, with each
of these schedulers, over 1, 2 and 3 ranks: the reference is `from_pretrained(folder, torch_dtype=...)` of diffusers, a
scheduler by `from_config`, and the pipeline's call. It takes minutes. Bar: every final latent is equal in every bit.
"""

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bars
import torch
from tables import table

from gpubench.errors import SettingsError
from gpubench.kinds.pipeline.schedulers import parse_options, scheduler_names
from gpubench.kinds.pipeline.split import assign
from gpubench.kinds.pipeline.worker.denoiser import LOOP, Denoiser
from gpubench.kinds.pipeline.worker.models import load, load_reference
from gpubench.kinds.pipeline.worker.packing import pack, unpack
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler, build, create, quiet
from gpubench.kinds.pipeline.worker.verification import TOY_LATENT, prove, toy_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

PAGE = Path(__file__).resolve().parent.parent / "docs" / "schedulers.md"
SEED = 7
KARRAS = "use_karras_sigmas=true"
FLOW = "prediction_type=flow_prediction,use_flow_sigmas=true"

OPTIONS: dict[str, tuple[str, ...]] = {
    "DDIMParallelScheduler": ("", "eta=0.8"),
    "DDIMScheduler": ("", "eta=0.8", "prediction_type=v_prediction,rescale_betas_zero_snr=true"),
    "DDPMScheduler": ("", "variance_type=learned_range"),
    "DEISMultistepScheduler": ("solver_order=1", "", "solver_order=3", KARRAS),
    "DPMSolverMultistepScheduler": (
        "solver_order=1",
        "",
        "solver_order=3",
        KARRAS,
        "use_lu_lambdas=true",
        "euler_at_final=true",
        "solver_type=heun",
        "algorithm_type=dpmsolver,final_sigmas_type=sigma_min",
        "algorithm_type=sde-dpmsolver,final_sigmas_type=sigma_min",
        "algorithm_type=sde-dpmsolver++",
        f"algorithm_type=sde-dpmsolver++,{KARRAS}",
        "algorithm_type=sde-dpmsolver++,solver_order=3",
        FLOW,
    ),
    "DPMSolverMultistepInverseScheduler": ("", "solver_order=3"),
    "DPMSolverSDEScheduler": ("", KARRAS),
    "DPMSolverSinglestepScheduler": (
        "solver_order=1",
        "lower_order_final=true",
        "lower_order_final=true,solver_order=3",
        "algorithm_type=sde-dpmsolver++,lower_order_final=true",
    ),
    "EDMDPMSolverMultistepScheduler": ("", "solver_order=3", "algorithm_type=sde-dpmsolver++"),
    "EulerDiscreteScheduler": ("", KARRAS, "use_beta_sigmas=true", "timestep_spacing=trailing"),
    "FlowMatchEulerDiscreteScheduler": ("", "shift=3.0", "stochastic_sampling=true", KARRAS),
    "HeliosScheduler": ("stages=1", "stages=1,scheduler_type=euler", ""),
    "HeunDiscreteScheduler": ("", KARRAS),
    "KDPM2AncestralDiscreteScheduler": ("", KARRAS),
    "KDPM2DiscreteScheduler": ("", KARRAS),
    "LMSDiscreteScheduler": ("", KARRAS),
    "PNDMScheduler": ("", "skip_prk_steps=true,steps_offset=1"),
    "SASolverScheduler": ("", "predictor_order=3,corrector_order=4", "algorithm_type=noise_prediction"),
    "TCDScheduler": ("", "eta=0.3"),
    "UniPCMultistepScheduler": (
        "solver_order=1",
        "",
        "solver_order=3",
        "solver_type=bh1,final_sigmas_type=sigma_min",
        KARRAS,
        FLOW,
    ),
}
"""Settings that change what a class keeps or draws; eta is the run's. Classes not listed have only their defaults."""


@dataclass(frozen=True)
class Row:
    """One line of the table; borders are those between two evaluations."""

    scheduler: str
    options: str
    steps: int
    evaluations: int
    carried: tuple[str, ...]
    state: float
    """Most that any border's hand-off has beside the latents and the generator's state, in units of the latents."""
    exact_alone: int
    """Borders where the latents alone suffice."""
    exact: int
    """Borders where the whole hand-off suffices."""

    @property
    def suffices(self) -> bool:
        """Whether the latents alone suffice everywhere."""
        return self.exact_alone == self.evaluations - 1

    @property
    def holds(self) -> bool:
        """Whether the whole hand-off suffices everywhere."""
        return self.exact == self.evaluations - 1

    @property
    def line(self) -> str:
        borders = self.evaluations - 1
        carried = ", ".join(f"`{name}`" for name in self.carried if name != "generator") or "nothing"
        cells = (
            self.scheduler,
            f"`{self.options}`" if self.options else "",
            f"{self.steps}",
            f"{self.evaluations}",
            "yes" if "generator" in self.carried else "no",
            carried,
            f"{1 + self.state:.2f}",
            f"{self.exact_alone}/{borders}",
            f"{self.exact}/{borders}",
        )
        return f"| {' | '.join(cells)} |"


def measure(scheduler: str, options: str) -> Row:
    """Raises SettingsError for a scheduler that gpubench refuses."""
    steps = 2 if scheduler == "ConsistencyDecoderScheduler" else 10  # it knows no other number
    given = parse_options(options)
    eta = float(given.pop("eta", 0.0))

    def sampler() -> Sampler:
        built = build(create(scheduler, given, {}), steps, torch.device("cpu"), eta=eta)
        prove(built, [(step, step + 1) for step in range(built.total)], 1, torch.float32)
        return built

    ours, theirs = sampler(), sampler()
    whole = finish(ours, start(ours))
    sender = start(ours)
    alone = exact = 0
    state = 0.0
    for border in range(1, ours.total):
        advance(ours, sender, border)
        packed, payload = pack(sender, ours)
        state = max(state, packed.state_bytes / packed.latent_bytes)
        bare = start(theirs)
        bare.latents, bare.done = sender.latents.clone(), border
        alone += finish(theirs, bare) == whole
        exact += finish(theirs, unpack(packed, payload, theirs, [SEED])) == whole
    return Row(scheduler, options, steps, ours.total, ours.carried, state, alone, exact)


def start(sampler: Sampler) -> Batch:
    generator = torch.Generator().manual_seed(SEED)
    latents = torch.randn((1, *TOY_LATENT), generator=generator) * sampler.noise_scale
    return Batch([0], latents, sampler.fresh(SEED), [generator])


def advance(sampler: Sampler, batch: Batch, end: int) -> None:
    while batch.done < end:
        scaled = sampler.scale(batch, batch.latents)
        sampler.step(batch, toy_model(scaled, sampler.timesteps[batch.done], sampler))


def finish(sampler: Sampler, batch: Batch) -> bytes | None:
    """Return the bytes of the final latents; None if the wrongly resumed scheduler raises an error."""
    try:
        advance(sampler, batch, sampler.total)
    except (IndexError, TypeError, AttributeError, ValueError, RuntimeError):
        return None
    data: bytes = batch.latents.numpy().tobytes()
    return data


def page(rows: list[Row], refused: dict[str, str]) -> Iterator[str]:
    silent = sum(not row.suffices for row in rows)
    whole = sum(row.holds for row in rows)
    versions = f"diffusers {version('diffusers')} and torch {version('torch').partition('+')[0]}"
    yield f"""# Schedulers

`gpubench pipe-infer --scheduler NAME` splits the evaluations of any scheduler listed below over ranks. Every
sample is bit-identical to that of one process. [Other schedulers](#refused) are refused. Without `--scheduler`, the
model's own is used. `--sampling.options` takes the options of a row, and `--sampling.eta` takes `eta`.

The number of evaluations determines how long a sample takes. The size determines how much each hand-off sends.

| column | meaning |
|---|---|
| steps | denoising steps, as in `--steps` |
| evaluations | calls of the model in these steps. Evaluations are split over ranks, not steps |
| draws | whether steps draw from the sample's generator. Its state is always handed over: 5056 bytes on a CPU, \
16 on a GPU |
| carried | attributes that differ from what `set_timesteps` left, at any border: of the scheduler, and \
`old_pred_original_sample` of its caller |
| size | latents and carried tensors at the border where they are largest, in multiples of the latents |
| latents alone | borders where the result is bit-identical if only the latents are handed over, of all borders |
| hand-off | borders where the result is bit-identical with the whole hand-off, of all borders |

Of {len(rows)} configurations, {whole} are exact at every border with the hand-off.
With the latents alone, {silent} are not.

| scheduler | options | steps | evaluations | draws | carried | size | latents alone | hand-off |
|---|---|---|---|---|---|---|---|---|"""
    for row in rows:
        yield row.line
    yield """
| scheduler | condition |
|---|---|
| CosineDPMSolverMultistepScheduler | `pip install torchsde`, for its Brownian tree. The tree is not \
handed over: each rank makes the same tree from the sample's seed |
| DPMSolverSDEScheduler | the same; one sample at a time (`--micro-batch 1`), because a batch has one seed |
| SCMScheduler | `--precision fp32`, because it converts latents to fp32 |

A scheduler that does not accept the model's own schedule, or raises an error at a step, is refused with the reason
before anything is timed.

## Refused

| scheduler | why |
|---|---|"""
    for scheduler, reason in refused.items():
        yield f"| {scheduler} | {reason} |"
    yield f"""
## How it was measured

    .venv/bin/python benchmarks/schedulers.py

This script writes the page. The figures were measured with {versions} on a CPU, in fp32, with a toy
model as the denoiser. For each row, the loop is cut once at every border between two evaluations, and continued with a
new scheduler and a new generator. The tests check every row (`tests/kinds/pipeline/test_schedulers.py`)."""


CPU = torch.device("cpu")
FAMILIES = ("stable_diffusion", "stable_diffusion_xl", "stable_diffusion_3", "pixart_alpha", "pixart_sigma", "flux")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WORLD_SIZES = (1, 2, 3)
STEPS = 4
PROMPT = "two dogs"
SIZE = 32
"""The size in pixels that all but Flux were trained on, for which PixArt holds the positions of its patches."""


@dataclass(frozen=True)
class Compared:
    """One scheduler in one pipeline and precision."""

    family: str
    precision: str
    scheduler: str
    outcome: str
    """"call": equal to the pipeline's call; "loop": equal to a plain loop, since diffusers' pipeline does not run this
    scheduler as it should be; "refused"; "differs"."""
    why: str = ""


def compare(folder: Path, family: str, precision: str, scheduler: str) -> Compared:
    """Makes one sample over each number of ranks, one rank after another, and the reference."""
    from cases_made import completed_pipeline

    dtype = HALVES[precision]
    given = {"model.name": folder, "model.height": SIZE, "model.width": SIZE, "precision": precision, "seed": SEED}
    given |= {"sampling.scheduler": scheduler, "sampling.steps": STEPS, "sampling.guidance_scale": 4.5}
    settings = completed_pipeline(given)
    try:
        loaded = load(settings, CPU, dtype, first=True, last=False, images=False)
        loaded.set_conditioning(loaded.encode([PROMPT]))
        made = [split(loaded, world_size, dtype) for world_size in WORLD_SIZES]
    except SettingsError as error:
        return Compared(family, precision, scheduler, "refused", error.message)
    if loaded.reference_name == LOOP:
        reference = load_reference(settings, CPU, dtype)
        reference.set_conditioning(reference.encode([PROMPT]))
        theirs = reference.reference(sampler_for(reference), [0], [SEED])
    else:
        theirs = called(folder, scheduler, dtype)
    apart = [world_size for world_size, ours in zip(WORLD_SIZES, made, strict=True) if bits_of(ours) != bits_of(theirs)]
    if apart or not theirs.isfinite().all():
        return Compared(family, precision, scheduler, "differs", f"over {apart} ranks" if apart else "it is not finite")
    return Compared(family, precision, scheduler, "loop" if loaded.reference_name == LOOP else "call")


def sampler_for(loaded: Denoiser) -> Sampler:
    return build(loaded.scheduler(), STEPS, CPU, **loaded.set_timesteps_kwargs(STEPS))


def split(loaded: Denoiser, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the final latents after `world_size` ranks, between which the batch is packed and unpacked."""
    sampler = sampler_for(loaded)
    ranges = assign(sampler.total, world_size, "balanced")
    prove(sampler, ranges, 1, dtype)
    batch = loaded.prepare(sampler, [0], [SEED])
    for begin, end in ranges:
        if begin:
            packed, payload = pack(batch, sampler)
            batch = unpack(packed, payload, sampler, [SEED])
        while batch.done < end:
            sampler.step(batch, loaded.predict(batch, sampler))
    return batch.latents


def called(folder: Path, scheduler: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns the latents that a user of diffusers gets."""
    import diffusers

    with quiet(transformers=True):
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, local_files_only=True)
        if "StableDiffusion3" in type(pipe).__name__:
            pipe.transformer.to(dtype)  # without accelerate, diffusers leaves it in fp32, in which it cannot run
        pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config)
        pipe.set_progress_bar_config(disable=True)
        if scheduler == "DPMSolverSDEScheduler":
            pipe.scheduler.noise_sampler_seed = SEED
        given: dict[str, Any] = {"use_resolution_binning": False} if "PixArt" in type(pipe).__name__ else {}
        latents: torch.Tensor = pipe(
            PROMPT,
            height=SIZE,
            width=SIZE,
            num_inference_steps=STEPS,
            guidance_scale=4.5,
            generator=[torch.Generator().manual_seed(SEED)],
            output_type="latent",
            return_dict=False,
            **given,
        )[0]
    return latents


def bits_of(latents: torch.Tensor) -> tuple[torch.dtype, bytes]:
    return latents.dtype, latents.contiguous().view(torch.uint8).numpy().tobytes()


def compare_pipelines() -> int:
    import pipelines_made

    found = []
    with TemporaryDirectory() as folder:
        for family in FAMILIES:
            path = getattr(pipelines_made, family)(Path(folder) / family)
            for precision in HALVES:
                found += [compare(path, family, precision, scheduler) for scheduler in scheduler_names()]
    rows = [["family", "precision", "equal to its call", "equal to a loop", "refused"]]
    for family in FAMILIES:
        for precision in HALVES:
            count = Counter(one.outcome for one in found if (one.family, one.precision) == (family, precision))
            rows.append([family, precision, *(str(count[outcome]) for outcome in ("call", "loop", "refused"))])
    print(table(rows))
    for one in found:
        if one.outcome == "differs":
            print(f"{one.family} {one.precision} {one.scheduler}: {one.why}")
    for (scheduler, why), times in Counter(
        (one.scheduler, one.why) for one in found if one.outcome == "refused"
    ).items():
        print(f"refused {times} times: {scheduler}: {why}")
    run = [one for one in found if one.outcome != "refused"]
    return bars.conclude(
        [bars.every("equal to diffusers over 1, 2 and 3 ranks", sum(one.outcome != "differs" for one in run), len(run))]
    )


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--pipelines", action="store_true", help="compare pipelines of diffusers")
    torch.set_num_threads(1)
    if parser.parse_args().pipelines:
        return compare_pipelines()
    rows, refused = [], {}
    for scheduler in scheduler_names():
        for options in OPTIONS.get(scheduler, ("",)):
            try:
                rows.append(measure(scheduler, options))
            except SettingsError as error:
                refused[scheduler] = error.message.partition(": ")[2]
    PAGE.write_text("\n".join(page(rows, refused)) + "\n", encoding="utf-8")
    silent = sum(not row.suffices for row in rows)
    print(f"{len(rows)} configurations, {len(refused)} refused; {silent} are not exact with the latents alone")
    return bars.conclude(
        [bars.every("exact at every border with the hand-off", sum(row.holds for row in rows), len(rows))]
    )


if __name__ == "__main__":
    sys.exit(main())
