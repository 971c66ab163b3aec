"""Profiles: of programs with a planted fault, which has to be found, and of programs as they are."""

from collections.abc import Iterator

from gpu_jobs.job import DRY, DRY_BERT, DRY_GPT2, DRY_RESNET, GPU_TESTS, Job, cli
from gpu_jobs.pipelines import DRY_PIPE

PROFILE_TESTS = "tests/test_gpu_profile.py"

PROFILE = ("--repeats=1", "--training.warmup_steps=10", "--training.seconds=3", "--logging.graph=false")
NO_SHAPES = "--profiling.record_shapes=false"  # and so no finding on memory, whose fix would compile for a minute
BF16 = "--precision=bf16"


def planted() -> Iterator[Job]:
    """Each with a fault that is worth more than noise on an H200, and sized so that others do not hide it."""

    def job(name: str, shows: str, finds: tuple[str, ...], seconds: float, dry: tuple[str, ...], *options: str) -> Job:
        return Job(f"planted-{name}", cli("profile", "--verify", *PROFILE, *options), shows, seconds, dry, finds=finds)

    slow = ("--model=resnet50", BF16, "--batch-size=128", "--data=synthetic-host", "--data.workers=0")
    yield job(
        *("loader", "batches made by the training process, in pageable memory", ("too-few-workers", "pinning"), 130.0),
        (*DRY_RESNET, "--data.samples=400"),
        *(*slow, "--data.pin_memory=false", NO_SHAPES),
    )
    resnet18 = ("--model=resnet18", BF16, NO_SHAPES)
    yield job(
        *("synchronisation", "the loss read after every step", ("synchronisation",), 60.0, DRY_RESNET),
        *(*resnet18, "--batch-size=64", "--training.read_loss=true", "--profiling.modules=false"),
    )
    yield job(
        *("optimizer", "an optimizer that loops over parameters", ("unfused-optimizer",), 60.0, DRY_RESNET),
        *(*resnet18, "--batch-size=192", "--training.optimizer_impl=loop"),
    )
    yield job(
        *("nchw", "bf16 convolutions in NCHW", ("nchw-convolutions",), 70.0, DRY_RESNET),
        *("--model=resnet50", BF16, "--batch-size=128", "--performance.channels_last=false", NO_SHAPES),
    )
    yield job(
        *("fp32-resnet50", "convolutions in full fp32", ("fp32-products",), 70.0, DRY_RESNET),
        *("--model=resnet50", "--precision=fp32", "--batch-size=128", NO_SHAPES),
    )
    yield job(
        *("fp32-gpt2", "matrix products in full fp32", ("fp32-products",), 70.0, DRY_GPT2),
        *("--model=gpt2", "--precision=fp32", "--batch-size=8", NO_SHAPES),
    )
    yield job(
        *("launches", "a batch too small for its launches", ("launch-bound",), 130.0, DRY_BERT),
        *("--model=bert-base", BF16, "--batch-size=1", NO_SHAPES),
    )


def profiles() -> Iterator[Job]:
    """Programs as they are: does their profile sum, what does it cost, how large is it?"""
    yield Job("profile-tests", (*GPU_TESTS, PROFILE_TESTS), "the tests of profiles that need a GPU", 170.0)
    for model, batch_size, dry in (
        ("resnet50", 256, DRY_RESNET),
        ("gpt2", 32, DRY_GPT2),
        ("bert-base", 128, DRY_BERT),
        ("sd15-unet", 8, (*DRY, "--model=sd15-unet-tiny")),
    ):
        yield Job(
            f"profile-{model}",
            cli("profile", *PROFILE, f"--model={model}", BF16, f"--batch-size={batch_size}"),
            f"{model}, bf16, eager: where a step goes",
            40.0,
            dry,
        )
    recorded = ("--profiling.enabled=true", "--profiling.all_ranks=true", "--baseline=off")
    yield Job(
        "profile-pipe",
        cli("pipe-infer", "--repeats=1", "--steps=20", "--samples=4", "--unet=sd15", "--world-size=2", *recorded),
        "sd15 UNet, 20 steps over 2 ranks on one GPU: where an evaluation goes",
        60.0,
        (*DRY_PIPE, "--steps=12"),
    )
