"""Training at full size, what measuring it costs, and whether equal runs come out equal."""

from gpu_jobs.job import DRY_BERT, DRY_GPT2, DRY_RESNET, GPU_TESTS, Job, Reference, cli
from gpu_jobs.memories import MEMORY_TESTS
from gpu_jobs.profiles import PROFILE_TESTS

SHORT = ("--repeats", "2", "--training.warmup_steps=5", "--training.seconds=8", "--logging.graph=false")

RESNET = cli("train-bench", *SHORT, "--model", "resnet50", "--precision", "amp", "--batch-size", "2560")
LAMBDA = Reference(
    3091.0, "median of the per-step rates in Lambda's public ResNet-50 AMP log of one NVIDIA H200, batch 2560"
)

TRAINING = (
    Job(
        "resnet50-nchw",
        (*RESNET, "--performance.channels_last=false", "--measurement.measure_peak=true"),
        "the published configuration: AMP, NCHW, eager, batch 2560",
        75,
        DRY_RESNET,
        LAMBDA,
    ),
    Job(
        "resnet50-channels-last",
        (*RESNET, "--performance.channels_last=true"),
        "the same in NHWC: what the memory format gives",
        60,
        (*DRY_RESNET, "--performance.channels_last=true"),
        LAMBDA,
    ),
    Job(
        "gpu-tests",
        (*GPU_TESTS, "tests", f"--ignore={PROFILE_TESTS}", f"--ignore={MEMORY_TESTS}"),
        "the tests that need a GPU",
        90,
    ),
    Job(
        "gpt2-compile",
        cli(
            "train-bench",
            *SHORT,
            "--model=gpt2",
            "--precision=bf16",
            "--data.sequence_length=1024",
            "--batch-size=32",
            "--performance.compile=true",
            "--measurement.measure_peak=true",
        ),
        "GPT-2 124M, bf16, compiled, 1024 tokens: MFU of a transformer, against both peaks",
        85,
        DRY_GPT2,
    ),
    Job(
        "bert-large",
        cli("train-bench", *SHORT, "--model=bert-large", "--precision=bf16", "--batch-size=256"),
        "BERT-large, bf16, eager, 128 tokens",
        50,
        DRY_BERT,
    ),
    Job(
        "overhead",
        ("benchmarks/overhead.py", "--device", "cuda", "--quick", "--peers", "none"),
        "what measuring costs, against the bare loop",
        50,
        ("--device=cpu", "--model=resnet-tiny", "--image-size=32", "--batch-size=4"),
    ),
    Job(
        "equal-runs",
        (
            *("benchmarks/compare_equal.py", "--runs", "4", "--repeats", "3", "--"),
            *("--model=gpt2", "--precision=bf16", "--batch-size=16", "--steps=60", "--logging.graph=false"),
        ),
        "runs that are all alike against each other: how often they are called different here",
        150,
        ("--device=cpu", "--model=gpt2-tiny", "--performance.cpu_threads=1", "--steps=10", "--training.warmup_steps=2"),
    ),
    Job(
        "resnet50-compile",
        (*RESNET, "--performance.channels_last=true", "--performance.compile=true"),
        "NHWC and compiled: what torch.compile gives on top",
        80,
        (*DRY_RESNET, "--performance.channels_last=true"),
        LAMBDA,
    ),
)
