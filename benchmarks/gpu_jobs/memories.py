"""Predictions of memory, held to what is measured."""

from collections.abc import Iterator

from gpu_jobs.job import GPU_TESTS, RUNS, Job

MEMORY_TESTS = "tests/test_gpu_memory.py"
MEMORY_DRY = ("--device=cpu", "--performance.cpu_threads=1", "--batch-size=4")
MEMORY_CASES: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, str, bool], ...]], ...] = (
    (
        "resnet50",
        (*MEMORY_DRY, "--model=resnet-tiny", "--data.image_size=32"),
        (("fp32", "sgd", False), ("bf16", "adamw", False), ("bf16", "sgd", True)),
    ),
    (
        "gpt2",
        (*MEMORY_DRY, "--model=gpt2-tiny", "--data.sequence_length=32"),
        (("fp32", "sgd", False), ("bf16", "adamw", False), ("fp32", "adamw", True)),
    ),
    (
        "bert-large",
        (*MEMORY_DRY, "--model=bert-tiny", "--data.sequence_length=32"),
        (("bf16", "adamw", False), ("fp32", "adamw", True), ("bf16", "sgd", True)),
    ),
    (
        "sd15-unet",
        (*MEMORY_DRY, "--model=sd15-unet-tiny", "--data.image_size=64"),
        (("fp32", "sgd", False), ("bf16", "adamw", False), ("bf16", "sgd", True)),
    ),
)
"""By preset: how it runs dry, and (precision, optimizer, checkpointing). Of all eight cases, the four in which any two
levels of different factors meet, less one."""
READ_BACK = "memory-gpt2-bf16-adamw"


def memories() -> Iterator[Job]:
    """Three steps each, at the preset's own batch; the prediction runs beside the measurement."""
    yield Job("memory-tests", (*GPU_TESTS, MEMORY_TESTS), "the tests of memory that need a GPU", 150.0)
    for preset, dry, cases in MEMORY_CASES:
        for precision, optimizer, checkpointing in cases:
            name = f"memory-{preset}-{precision}-{optimizer}{'-checkpointing' * checkpointing}"
            options = (
                *("benchmarks/memory_check.py", "--results", RUNS, f"--config={preset}", f"--precision={precision}"),
                *(f"--training.optimizer={optimizer}", "--logging.graph=false"),
                *("--model.activation_checkpointing=true",) * checkpointing,
                *("--read-back",) * (name == READ_BACK),
            )
            shows = f"{preset}, {precision}, {optimizer}{', checkpointing' * checkpointing}: predicted and measured"
            yield Job(name, options, shows, 40.0, dry)
