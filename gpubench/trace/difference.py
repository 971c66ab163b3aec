"""Which kernels changed between two traces."""

from gpubench.trace.profile import Kernel, KernelChange, Rank


def kernel_changes(before: Rank, after: Rank) -> list[KernelChange]:
    """Per step, the largest change first. Kernels are told apart by name; a name of one trace alone counts 0 in the
    other. A trace without steps counts as one."""
    steps_before, steps_after = (max(len(rank.step_numbers), 1) for rank in (before, after))
    old, new = _by_name(before.kernels), _by_name(after.kernels)
    none = (0, 0)
    changes = [
        KernelChange(
            name=name,
            before=round(old.get(name, none)[0] / steps_before),
            after=round(new.get(name, none)[0] / steps_after),
            calls_before=old.get(name, none)[1] / steps_before,
            calls_after=new.get(name, none)[1] / steps_after,
        )
        for name in old | new
    ]
    return sorted(changes, key=lambda change: (-abs(change.after - change.before), change.name))


def _by_name(kernels: list[Kernel]) -> dict[str, tuple[int, int]]:
    """(nanoseconds, calls)."""
    found: dict[str, tuple[int, int]] = {}
    for kernel in kernels:
        total, calls = found.get(kernel.name, (0, 0))
        found[kernel.name] = (total + kernel.total, calls + kernel.calls)
    return found
