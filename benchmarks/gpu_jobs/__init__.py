"""The jobs of the GPU suite, in groups that a short loan of a GPU holds, the one that is worth most first."""

from gpu_jobs.card import Card
from gpu_jobs.first import first
from gpu_jobs.job import Group
from gpu_jobs.memories import memories
from gpu_jobs.pipelines import pipelines
from gpu_jobs.profiles import profiles
from gpu_jobs.testing import testing
from gpu_jobs.training import compilation, overhead, speed


def groups(card: Card) -> tuple[Group, ...]:
    """Sized for `card`."""
    return (
        Group("first-gpu", "is gpubench right on this GPU?", first(card), by_name=True),
        Group("tests", "does it run at all, and is it right?", testing()),
        Group("speed", "how fast is training in each arithmetic, and of which peak?", speed(card)),
        Group("memory", "do predictions of memory hold?", tuple(memories(card))),
        Group("overhead", "what does measuring cost, and are equal runs called equal?", overhead(card)),
        Group("profiles", "are planted faults found, and do their fixes help?", tuple(profiles(card))),
        Group("pipelines", "is what ranks hand over bit-identical, and what does it cost?", pipelines(card)),
        Group("compile", "what does torch.compile give?", compilation(card)),
    )
