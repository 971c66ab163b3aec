"""Profiles: of programs with a planted fault, which has to be found, and of programs as they are.

The tests that only a real device can judge plant others: a slow loader, a loss that is read after every step, an
optimizer that loops.
"""

from collections.abc import Iterator

from gpu_jobs.card import Card
from gpu_jobs.job import REHEARSED, TINY_BERT, TINY_GPT2, TINY_RESNET, VERIFY, Job, cli

PROFILE = ("--repeats=1", "--training.warmup_steps=10", "--training.seconds=3", "--logging.graph=false")
NO_SHAPES = "--profiling.record_shapes=false"  # for smaller traces


def profiles(card: Card) -> Iterator[Job]:
    """Each fault is worth more than noise on an H200, and sized so that others do not hide it.

    Fixes are tried in turns, among them torch.compile, which takes a minute.
    """
    resnet, gpt2, unet = card.batch("resnet50", 128), card.batch("gpt2", 8), card.batch("sd15-unet", 8)
    for name, shows, finds, seconds, tiny, options in (
        (
            "nchw",
            f"{card.half} convolutions in NCHW, batch {resnet}",
            "nchw-convolutions",
            100.0,
            TINY_RESNET,
            (
                "--model=resnet50",
                f"--precision={card.half}",
                f"--batch-size={resnet}",
                "--performance.channels_last=false",
            ),
        ),
        (
            "fp32",
            f"matrix products in full fp32, batch {gpt2}",
            "fp32-products",
            100.0,
            TINY_GPT2,
            ("--model=gpt2", "--precision=fp32", f"--batch-size={gpt2}"),
        ),
        (
            "launches",
            "a batch too small for its launches",
            "launch-bound",
            110.0,
            TINY_BERT,
            ("--model=bert-base", f"--precision={card.half}", "--batch-size=1"),
        ),
    ):
        arguments = cli("profile", VERIFY, *PROFILE, *options, NO_SHAPES)
        yield Job(f"planted-{name}", arguments, shows, seconds, tiny, finds=(finds,), fits=bool(resnet and gpt2))
    yield Job(
        "profile-sd15-unet",
        cli("profile", *PROFILE, "--model=sd15-unet", f"--precision={card.half}", f"--batch-size={unet}"),
        f"sd15-unet, {card.half}, eager, batch {unet}: where a step goes",
        40.0,
        (*REHEARSED, "--model=sd15-unet-tiny"),
        fits=bool(unet),
    )
