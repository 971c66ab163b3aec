"""Diffusion inference with the UNets of SD 1.5 and SDXL."""

from collections.abc import Iterator

from gpu_jobs.job import Job, cli

PIPE = ("--repeats=1", "--steps=20", "--samples=4", "--verify", "--pipeline.deadline=120")
DRY_PIPE = (
    "--device=cpu",
    "--unet=tiny",
    "--precision=fp32",
    "--steps=4",
    "--samples=2",
    "--performance.cpu_threads=1",
)


def pipelines() -> Iterator[Job]:
    """Random weights at full size; two ranks share the GPU, so that they show what is right and not what is fast."""
    for unet, seconds in (("sd15", 60.0), ("sdxl", 120.0)):
        for precision in ("fp16", "bf16"):
            for ranks in (1, 2):
                yield Job(
                    f"pipe-{unet}-{precision}-{ranks}",
                    cli("pipe-infer", *PIPE, f"--unet={unet}", f"--precision={precision}", f"--world-size={ranks}"),
                    f"{unet} UNet, {precision}, 20 steps over {ranks} rank{'s' * (ranks > 1)} on one GPU, bit by bit",
                    ranks * seconds,
                    DRY_PIPE,
                )
