"""Diffusion inference with the UNets of SD 1.5 and SDXL, with random weights at full size."""

from gpu_jobs.card import Card
from gpu_jobs.job import OUTPUT, VERIFY, Job, cli

PIPE = ("--repeats=1", VERIFY, "--pipeline.deadline=120")
TINY = ("--device=cpu", "--unet=tiny", "--precision=fp32", "--steps=4", "--samples=2", "--performance.cpu_threads=1")


def pipelines(card: Card) -> tuple[Job, ...]:
    """Two ranks share the GPU, so that they show whether the result is right, and not what is fast."""
    one, two = _pipe("sd15", "fp16", 1, 20, 4, 45.0), _pipe("sd15", "fp16", 2, 20, 4, 60.0)
    judged = Job(
        "compare-ranks",
        ("-m", "gpubench", "compare", f"{OUTPUT}/{one.name}", f"{OUTPUT}/{two.name}"),
        "one rank against two that share the GPU, judged",
        5.0,
        after=(one.name, two.name),
    )
    return (two, one, judged, _pipe("sdxl", "bf16" if card.modern else "fp16", 2, 8, 2, 90.0))


def _pipe(unet: str, precision: str, ranks: int, steps: int, samples: int, seconds: float) -> Job:
    size = (f"--unet={unet}", f"--precision={precision}", f"--steps={steps}", f"--samples={samples}")
    return Job(
        f"pipe-{unet}-{precision}-{ranks}",
        cli("pipe-infer", *PIPE, *size, f"--world-size={ranks}"),
        f"{unet} UNet, {precision}, {steps} steps over {ranks} rank{'s' * (ranks > 1)} on one GPU, bit by bit",
        seconds,
        TINY,
    )
