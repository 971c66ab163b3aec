"""What has to travel between ranks for each scheduler of diffusers, and what becomes of a sample if it does not.

    .venv/bin/python benchmarks/schedulers.py

Writes docs/schedulers.md. A loop with a toy model in the place of the denoiser is cut once at every border between two
of its evaluations, continued by a scheduler built anew, and compared with the loop in one piece, bit by bit: once with
the latents alone and a generator seeded anew, once with all that gpubench hands over. Bar: that is exact everywhere.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import bars
import torch

from gpubench.diffusion.scheduler_names import parse_options, scheduler_names
from gpubench.errors import SettingsError
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.handover import pack, unpack
from gpubench.pipeline.proof import TOY_LATENT, prove, toy_model
from gpubench.pipeline.schedulers import Sampler, build, create

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
"""Settings that change what a class keeps or draws; eta is the run's. A class not named here has only its defaults."""


@dataclass(frozen=True)
class Row:
    """One line of the table; borders are those between two evaluations."""

    scheduler: str
    options: str
    steps: int
    evaluations: int
    carried: tuple[str, ...]
    state: float
    """Most that any border's hand-over has beside the latents and the generator's state, in units of the latents."""
    exact_alone: int
    """Borders where the latents alone suffice."""
    exact: int
    """Borders where everything that is handed over does."""

    @property
    def suffices(self) -> bool:
        """The latents alone do, everywhere."""
        return self.exact_alone == self.evaluations - 1

    @property
    def holds(self) -> bool:
        """All that is handed over does, everywhere."""
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
        parcel = pack(sender, ours)
        state = max(state, parcel.state_bytes / parcel.latent_bytes)
        bare = start(theirs)
        bare.latents, bare.done = sender.latents.clone(), border
        alone += finish(theirs, bare) == whole
        exact += finish(theirs, unpack(parcel.manifest, parcel.payload, theirs, [SEED])) == whole
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
    """The bytes of the final latents; None where the scheduler, wrongly resumed, breaks."""
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

What has to travel with a sample from one rank to the next, for every scheduler of diffusers, so that the sample comes
out as it would from one process, bit for bit.

    .venv/bin/python benchmarks/schedulers.py

Made by that script with {versions} on a CPU, in fp32, with a toy model in the place
of the denoiser. For each line a loop was cut once at every border between two of its evaluations, and continued by a
scheduler and a generator made anew. Of {len(rows)} configurations {whole} are exact at every border with the hand-over;
{silent} are not with the latents alone.

- **evaluations**: how often the model is asked; this is what is split over ranks, and not the number of steps.
- **draws**: whether steps draw from the sample's generator. Its state always travels, whatever it says here: 5056 bytes
  for a generator of the CPU, 16 for one of a GPU.
- **carried**: attributes of the scheduler (and for `old_pred_original_sample`, of its caller) that differ from what
  `set_timesteps` left at one border or another.
- **size**: of latents and carried tensors at the border where they are largest, in units of the latents.
- **latents alone**, **hand-over**: borders where the result is the same bit for bit, of all borders.

Options are what `--sampling.options` takes; `eta` is `--sampling.eta`. Every line of this table is tested.

| scheduler | options | steps | evaluations | draws | carried | size | latents alone | hand-over |
|---|---|---|---|---|---|---|---|---|"""
    for row in rows:
        yield row.line
    yield """
CosineDPMSolverMultistepScheduler and DPMSolverSDEScheduler draw from a Brownian tree of torchsde, and so need
`pip install 'gpubench[torchsde]'`. The tree does not travel: it grows again, the same, from the sample's seed.
DPMSolverSDEScheduler has one seed for its whole batch, and so takes one sample at a time. SCMScheduler turns latents
into fp32, and so needs `--precision fp32`.

A scheduler that cannot be used with the model, because it does not take the model's own schedule or raises an error
at a step, is refused with its reason before anything is timed.

## Refused

| scheduler | why |
|---|---|"""
    for scheduler, reason in refused.items():
        yield f"| {scheduler} | {reason} |"


def main() -> int:
    torch.set_num_threads(1)
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
        [bars.every("exact at every border with the hand-over", sum(row.holds for row in rows), len(rows))]
    )


if __name__ == "__main__":
    sys.exit(main())
