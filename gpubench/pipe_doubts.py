"""What a run of a pipeline has to say against itself, and whether splitting the steps was worth it."""

from collections.abc import Iterator, Mapping, Sequence

from gpubench import units
from gpubench.diffusion.repeat import Completed, PipeRepeat
from gpubench.diffusion.split import Assignment
from gpubench.summary import shared_warnings

DEAR_REMAINDER = 0.05
MARGIN = 0.05
NAMED = 5  # samples that a warning lists


def warnings(
    repeats: Sequence[PipeRepeat], found: Sequence[Completed], samples: int, slowed: dict[str, float]
) -> list[str]:
    """`found` are the repeats that count, `samples` how many each was to make, `slowed` what held the clocks down."""
    said = [warning for repeat in repeats for warning in _unlike_reference(repeat)]
    said += _not_reproduced(repeats)
    said += [warning for repeat in repeats for warning in _unpaired(repeat)]
    said += [warning for repeat in repeats for warning in _missing(repeat, samples)]
    if found:
        said += _remainder(found[0].assignment)
    return said + shared_warnings(len(found), slowed)


def of_threads(threads: int, cores: int) -> Iterator[str]:
    """What follows from the number of threads in each rank on a machine of so many `cores`.

    The last bits of a sample depend on the number of threads: a sum is cut into as many parts.
    """
    if threads != cores:
        yield (
            f"the samples were made with {units.counted(threads, 'thread')} a rank, not with this machine's "
            f"{cores}: a run or a diffusers process with {cores} can differ from them in the last bits"
        )


def unused_prompts(prompts: int, samples: int) -> Iterator[str]:
    """Where there are more prompts than samples."""
    if prompts > samples:
        which = f"prompt {prompts} is" if prompts == samples + 1 else f"prompts {samples + 1} to {prompts} are"
        yield f"{which} not used: --samples {samples} is less than the {prompts} prompts; leave it out for one of each"


def verdict(assignment: Assignment, estimates: Mapping[str, float]) -> str | None:
    """Against replicas: one whole model a rank, each with its share of the samples. None for one rank alone.

    A single run cannot tell less than `MARGIN` apart.
    """
    measured, bound = estimates.get("replicas_makespan"), estimates.get("replicas_bound")
    pipeline, replicas = estimates.get("makespan"), measured if measured is not None else bound
    if len(assignment.ranges) == 1 or pipeline is None or replicas is None:
        return None
    did = "made" if measured is not None else "would at best make"
    alone = f"{len(assignment.ranges)} replicas, one whole model a rank, {did} the same samples in"
    both = f"{alone} {units.seconds(replicas)}, the pipeline took {units.seconds(pipeline)}"
    if replicas * (1 + MARGIN) < pipeline:
        is_faster = "plain data-parallel is faster" if measured is not None else "plain data-parallel can be faster"
        return (
            f"{is_faster}: {both}; splitting the steps pays only where a rank cannot hold every part of the model, or "
            "where samples must come one by one"
        )
    if measured is not None and pipeline * (1 + MARGIN) < replicas:
        return f"splitting the steps was worth it here: {both}"
    return f"splitting the steps cost nothing that this run can tell: {both}"


def _unlike_reference(repeat: PipeRepeat) -> Iterator[str]:
    different = [number for number, identical in repeat.comparisons().items() if not identical]
    if different:
        yield f"repeat {repeat.number}: {_samples(different)} not bit-identical to single-process diffusers"


def _not_reproduced(repeats: Sequence[PipeRepeat]) -> Iterator[str]:
    first: dict[int, tuple[str, int]] = {}
    for repeat in repeats:
        different = []
        for number, sample in sorted(repeat.samples.items()):
            sha256, _ = first.setdefault(number, (sample.sha256, repeat.number))
            if sha256 != sample.sha256:
                different.append(number)
        if different:
            yield f"repeat {repeat.number}: {_samples(different)} not what an earlier repeat made of the same seed"


def _unpaired(repeat: PipeRepeat) -> Iterator[str]:
    for rank, stage in sorted(repeat.stages.items()):
        taker = repeat.stages.get(rank + 1)
        if taker and stage.sent != taker.received:
            yield (
                f"repeat {repeat.number}: rank {rank} sent {units.counted(stage.sent, 'hand-over')}, "
                f"and rank {rank + 1} received {taker.received}"
            )


def _missing(repeat: PipeRepeat, samples: int) -> Iterator[str]:
    missing = sorted(set(range(samples)) - repeat.samples.keys())
    if repeat.samples and missing:
        yield f"repeat {repeat.number}: {_samples(missing)} missing; --resume makes them"


def _remainder(assignment: Assignment) -> Iterator[str]:
    better = assignment.better
    if better and assignment.remainder_cost > DEAR_REMAINDER:
        yield (
            f"rank {assignment.bottleneck} has {assignment.largest} of {assignment.total} evaluations, "
            f"{units.percent(assignment.remainder_cost)} more than a fair share: --split balanced ({better.split}) "
            f"comes to {units.percent(better.remainder_cost)}"
        )


def _samples(numbers: Sequence[int]) -> str:
    """ "sample 3 is", "samples 3, 4 and 7 more are"."""
    if len(numbers) == 1:
        return f"sample {numbers[0]} is"
    named = ", ".join(map(str, numbers[:NAMED]))
    rest = len(numbers) - NAMED
    return f"samples {named}{f' and {rest} more' if rest > 0 else ''} are"
