"""Training at full size, what measuring it costs, and whether equal runs come out equal."""

from gpu_jobs.card import Card
from gpu_jobs.job import COMPILED, TINY_GPT2, TINY_RESNET, Job, Reference, cli

SHORT = ("--repeats=2", "--training.warmup_steps=5", "--training.seconds=6", "--logging.graph=false")
PEAK = "--measurement.measure_peak=true"

LAMBDA_DEVICE, LAMBDA_BATCH = "NVIDIA H200", 2560
LAMBDA = Reference(
    3091.0, "median of the per-step rates in Lambda's public ResNet-50 AMP log of one NVIDIA H200, batch 2560"
)


def speed(card: Card) -> tuple[Job, ...]:
    """One transformer in each precision of the card at one batch size, and convolutions in both memory formats."""
    batch = card.batch("resnet50", LAMBDA_BATCH)
    published = card.name == LAMBDA_DEVICE and batch == LAMBDA_BATCH
    resnet = Job(
        "resnet50-amp",
        cli(
            *("train-bench", *SHORT, PEAK, "--model=resnet50", "--precision=amp", f"--batch-size={batch}"),
            *("--performance.channels_last=false", "--vs=performance.channels_last=true"),
        ),
        f"ResNet-50, AMP, eager, batch {batch}: NCHW, then NHWC",
        120.0,
        TINY_RESNET,
        LAMBDA if published else None,
        fits=bool(batch),
    )
    precisions = ("bf16", "tf32", "fp32", "amp") if card.modern else ("fp32", "amp")
    return (*(_gpt2(card, precision) for precision in precisions), resnet)


def _gpt2(card: Card, precision: str) -> Job:
    batch = card.batch("gpt2", 32)
    return Job(
        f"gpt2-{precision}",
        cli("train-bench", *SHORT, PEAK, "--config=gpt2", f"--precision={precision}", f"--batch-size={batch}"),
        f"GPT-2 124M, {precision}, eager, 1024 tokens, batch {batch}: MFU against the published and the measured peak",
        40.0,
        (*TINY_GPT2, *("--precision=fp32",) * (precision == "tf32")),  # a CPU has no TF32
        fits=bool(batch),
    )


def overhead(card: Card) -> tuple[Job, ...]:
    batch = card.batch("gpt2", 16)
    return (
        Job(
            "overhead",
            (
                *("benchmarks/overhead.py", "--device=cuda", "--quick", "--peers=none"),
                *("--model=resnet50", "--image-size=224", f"--batch-size={card.batch('resnet50', 128)}"),
            ),
            "what measuring costs, against the bare loop",
            50.0,
            ("--device=cpu", "--model=resnet-tiny", "--image-size=32", "--batch-size=4"),
        ),
        Job(
            "equal-runs",
            (
                *(
                    "benchmarks/compare_equal.py",
                    "--runs=4",
                    "--repeats=2",
                    "--",
                    "--model=gpt2",
                    f"--precision={card.half}",
                ),
                *(f"--batch-size={batch}", "--steps=30", "--logging.graph=false"),
            ),
            f"runs that are all alike against each other, GPT-2, batch {batch}: how often they are called different",
            125.0,
            (
                *("--device=cpu", "--model=gpt2-tiny", "--performance.cpu_threads=1", "--steps=10"),
                *("--training.warmup_steps=2", "--batch-size=4", "--precision=fp32"),
            ),
            fits=bool(batch),
        ),
    )


def compilation(card: Card) -> tuple[Job, ...]:
    batch = card.batch("gpt2", 32)
    return (
        Job(
            "gpt2-compile",
            cli("train-bench", *SHORT, "--config=gpt2", f"--precision={card.half}", f"--batch-size={batch}", COMPILED),
            f"GPT-2 124M, {card.half}, 1024 tokens, batch {batch}: eager, then compiled",
            110.0,
            TINY_GPT2,
            fits=bool(batch),
        ),
    )
