"""What makes the results of a pipeline unreliable, each in a sentence."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpubench import units
from gpubench.kinds.pipeline.bottleneck import better_split, limiting, places
from gpubench.kinds.pipeline.repeats import Completed, PipeRepeat
from gpubench.runs import warnings

SAMPLES_NAMED = 5  # number of samples that a warning lists


def find_warnings(
    repeats: Sequence[PipeRepeat],
    found: Sequence[Completed],
    samples: int,
    slowed: Mapping[str, float],
    settings: warnings.Settings = warnings.NONE,
) -> list[str]:
    """Returns the warnings of a run.

    `found` are the completed repeats, `samples` the number of samples to make in each, and `slowed` the shares of time
    in which clocks were throttled, by reason.
    """
    unlike = [
        unlike_reference(repeat.number, [n for n, identical in repeat.comparisons().items() if not identical])
        for repeat in repeats
    ]
    other = [not_reproduced(repeat, numbers) for repeat, numbers in _not_reproduced(repeats)]
    unmatched = [
        unpaired(repeat.number, rank, stage.sent, repeat.stages[rank + 1].received)
        for repeat in repeats
        for rank, stage in sorted(repeat.stages.items())
        if rank + 1 in repeat.stages
    ]
    missing = [missing_samples(repeat.number, repeat.samples, samples) for repeat in repeats]
    return warnings.collected(
        *unlike,
        *other,
        *unmatched,
        *missing,
        _uneven_split(found) if found else None,
        warnings.lone_repeat(len(found), warnings.more_repeats(settings)),
        warnings.held_down(slowed),
    )


def _not_reproduced(repeats: Sequence[PipeRepeat]) -> Iterator[tuple[int, list[int]]]:
    """Yields the number of each repeat with samples that differ from those of an earlier repeat, and these samples."""
    first: dict[int, str] = {}
    for repeat in repeats:
        samples = sorted(repeat.samples.items())
        yield repeat.number, [n for n, sample in samples if first.setdefault(n, sample.sha256) != sample.sha256]


def _uneven_split(found: Sequence[Completed]) -> str | None:
    ranks = [place for place in places(found) if place.evaluations]
    limit = limiting(ranks) if len(ranks) > 1 else []
    better = better_split(ranks) if len(limit) == 1 else None
    return uneven_split(limit[0].rank, limit[0].mean, *better) if better else None


def unlike_reference(repeat: int, samples: Sequence[int]) -> str | None:
    """Warns of samples whose bits differ from those of the reference."""
    return f"{_repeat(repeat)}: {_samples(samples)} not bit-identical to single-process diffusers" if samples else None


def not_reproduced(repeat: int, samples: Sequence[int]) -> str | None:
    """Warns of samples whose bits differ from those of the first repeat that made them."""
    if not samples:
        return None
    return f"{_repeat(repeat)}: {_samples(samples)} different from an earlier repeat with the same seed"


def unpaired(repeat: int, rank: int, sent: int, received: int) -> str | None:
    """Warns if the next rank received another number of hand-offs than `rank` sent."""
    if sent == received:
        return None
    hand_offs = units.counted(sent, "hand-off")
    return f"{_repeat(repeat)}: rank {rank} sent {hand_offs}, and rank {rank + 1} received {received}"


def missing_samples(repeat: int, made: Collection[int], wanted: int) -> str | None:
    """Warns if a repeat made some of the samples 0 to `wanted` - 1 but not all."""
    missing = sorted(set(range(wanted)) - set(made))
    return f"{_repeat(repeat)}: {_samples(missing)} missing; --resume makes them" if made and missing else None


def _repeat(number: int) -> str:
    """Files number repeats from 0, and messages from 1."""
    return f"repeat {number + 1}"


def made_again(damaged: Sequence[str]) -> str | None:
    """Warns of samples that `--resume` did not take over although they were finished, with the reasons."""
    if not damaged:
        return None
    rest = len(damaged) - SAMPLES_NAMED
    named = "; ".join(damaged[:SAMPLES_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
    return f"finished samples of the resumed run were made again: {named}"


def uneven_split(rank: int, busiest: float, counts: Sequence[int], shorter: float) -> str:
    """Warns that `rank` works longer on each micro-batch, `busiest` seconds, than any rank would with another split.

    `counts` is that split, and `shorter` the time of its busiest rank if evaluations keep their times.
    """
    return (
        f"rank {rank} works {units.seconds(busiest)} on each micro-batch while others wait: --split "
        f"{','.join(map(str, counts))} comes to {units.seconds(shorter)} if evaluations take as long as now"
    )


def unused_prompts(prompts: int, seeds: int, samples: int) -> str | None:
    """Warns if there are more prompts than samples are made of, each with `seeds` seeds, or 0 for one of its own."""
    used = math.ceil(samples / max(1, seeds))
    if prompts <= used:
        return None
    which = f"prompt {prompts} is" if prompts == used + 1 else f"prompts {used + 1} to {prompts} are"
    of_all, all_of_them = f"{prompts} prompts", "one of each"
    if seeds:
        of_all, all_of_them = f"{of_all} with {units.counted(seeds, 'seed')} each", "all"
    return f"{which} not used: --samples {samples} is less than the {of_all}; leave it out for {all_of_them}"


def other_threads(threads: int | None, cores: int) -> str | None:
    """Warns if the number of threads of each rank on a CPU differs from the machine's `cores`.

    The last bits of a sample depend on the number of threads, because a sum is split into as many parts.
    """
    if not threads or threads == cores:
        return None
    return (
        f"the samples were made with {units.counted(threads, 'thread')} a rank, not with this machine's {cores}: "
        f"a run or a diffusers process with {cores} can differ from them in the last bits"
    )


def _samples(numbers: Sequence[int]) -> str:
    """Such as "sample 3 is" or "samples 3, 4 and 7 more are"."""
    if len(numbers) == 1:
        return f"sample {numbers[0]} is"
    named = ", ".join(map(str, numbers[:SAMPLES_NAMED]))
    rest = len(numbers) - SAMPLES_NAMED
    return f"samples {named}{f' and {rest} more' if rest > 0 else ''} are"
