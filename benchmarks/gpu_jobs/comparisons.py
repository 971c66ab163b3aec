"""Two of the suite's own runs, judged."""

from gpu_jobs.job import OUTPUT, Job


def comparison(name: str, shows: str, baseline: str, candidate: str) -> Job:
    arguments = ("-m", "gpubench", "compare", f"{OUTPUT}/{baseline}", f"{OUTPUT}/{candidate}")
    return Job(f"compare-{name}", arguments, shows, 20.0, after=(baseline, candidate))


TRAINED = comparison("memory-format", "what NHWC makes of ResNet-50, judged", "resnet50-nchw", "resnet50-channels-last")
PIPED = comparison("ranks", "one rank against two that share the GPU, judged", "pipe-sd15-fp16-1", "pipe-sd15-fp16-2")
