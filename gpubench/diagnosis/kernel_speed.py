"""Rules about the kernels that hold most of the step: those far below the device's peak, and those of unknown speed."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpubench import units
from gpubench.diagnosis.case import Answers, Estimated, ProfileCase, severity, shortened
from gpubench.diagnosis.matrix_products import is_odd, is_product
from gpubench.findings import Finding
from gpubench.trace.attention import of_attention
from gpubench.trace.kernels import moves_memory
from gpubench.trace.operators import has_formula
from gpubench.trace.profile import SHORT_KERNEL, Kernel, Operator, short_shapes

LARGE = 0.2  # of the step: another kernel is work to find and to verify
SLOW = 0.4
"""The fraction of the published peak below which a kernel is slow. On an H100, FlashAttention-2 reaches 35 % of it and
FlashAttention-3 75 % (Shah and others, "FlashAttention-3", 2024)."""
EXAMPLES = 3  # operators or kernels in the evidence
DOMINANT = 0.5  # of the step


class _KernelGroup(NamedTuple):
    title: str
    belongs: Callable[[str], bool]
    advice: str
    on_amd: str


_GROUPS = (
    _KernelGroup(
        "attention runs",
        lambda name: "attention" in name,
        "try another fused kernel, such as torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION) or "
        "FlashAttention-3; with few queries and heads, a larger batch fills the device",
        'try another fused kernel, such as torch.backends.cuda.preferred_rocm_fa_library("ck") or those of AITER; with '
        "few queries and heads, a larger batch fills the device",
    ),
    _KernelGroup(
        "convolutions run",
        lambda name: "conv" in name,
        "torch.backends.cudnn.benchmark = True measures several algorithms for each size; bf16 or fp16 with "
        "memory_format=torch.channels_last has the fastest ones",
        "torch.backends.cudnn.benchmark = True measures several algorithms of MIOpen for each size",
    ),
    _KernelGroup(
        "matrix products run",
        is_product,
        "torch.compile(mode='max-autotune') measures several kernels for each size; a larger batch fills the device",
        "PYTORCH_TUNABLEOP_ENABLED=1 measures several kernels for each size; a larger batch fills the device",
    ),
)


def below_ceiling(case: ProfileCase) -> Answers:
    """Finds arithmetic that holds much of the step and runs far below the device's peak.

    Attention in separate operators, products of odd shapes, and kernels so short that their fixed cost counts have
    other rules.
    """
    if case.rank.device is None:
        return
    left = [one for one in case.rank.operators if _is_slow(case, one)]
    for group in _GROUPS:
        found = [one for one in left if group.belongs(one.name)]
        left = [one for one in left if one not in found]
        spent = sum(one.device for one in found)
        if not found or case.share(spent) < LARGE:
            continue
        reached = sum(one.device * (one.of_ceiling or 0.0) for one in found) / spent
        saving = case.less_work(case.share(spent) * (1 - reached))
        yield Finding(
            id="below-ceiling",
            title=f"{group.title} at {units.percent(reached)} of the device's peak",
            severity=severity(case.share(spent)),
            evidence=[
                f"they take {case.time_per_step(spent)}",
                *(_describe_operator(case, one) for one in found[:EXAMPLES]),
            ],
            cause="the chosen kernels are slow for these sizes on this device; the trace does not show why",
            advice=group.on_amd if case.on_amd else group.advice,
            expected=saving,
            threshold=f"at least {units.percent(LARGE)} of {case.window()} below {units.percent(SLOW)} of the peak "
            "that the vendor publishes. No kernel reaches all of it, so that the saving is a limit and not an estimate",
        )


def _is_slow(case: ProfileCase, one: Operator) -> bool:
    if one.bound != "compute" or one.of_ceiling is None or one.of_ceiling >= SLOW:
        return False
    other_rules = of_attention(one, case.rank) or is_odd(case, one) or one.device < SHORT_KERNEL * one.kernels
    return not other_rules


def _describe_operator(case: ProfileCase, one: Operator) -> str:
    speed = f"{units.count((one.flops or 0.0) / one.device * 1e9)}FLOP/s, " if one.flops and one.device else ""
    return (
        f"{one.name} {short_shapes(one.shapes)} ({one.dtype}): {case.calls_per_step(one.calls)}, "
        f"{case.time_per_step(one.device)}; "
        f"{speed}{units.percent(one.of_ceiling or 0.0)} of the peak"
    )


def dominant_kernel(case: ProfileCase) -> Answers:
    """Names the kernels of one kind that hold most of the step, and what is missing to judge their speed."""
    kernels = [one for one in case.rank.kernels if one.kind == "compute"]
    if case.rank.device is None:
        return
    groups: dict[str, list[Kernel]] = {}
    for one in kernels:
        groups.setdefault(_stem(one.name), []).append(one)
    found = max(groups.values(), key=lambda group: sum(one.total for one in group), default=[])
    spent = sum(one.total for one in found)
    if case.share(spent) < DOMINANT or any(moves_memory(one.kind, one.name, one.operator) for one in found):
        return
    name = shortened(_common([one.name for one in found]))
    cause, advice = _judged(case, found)
    yield Estimated(
        Finding(
            id="dominant-kernel",
            title=f"{units.whole_percent(min(1.0, case.share(spent)))} of {case.window()} is in {name}",
            severity="low",
            evidence=[
                f"{shortened(one.name)}{f' of {one.operator}' if one.operator else ''}: "
                f"{case.calls_per_step(one.calls)}, {case.time_per_step(one.total)}"
                for one in found[:EXAMPLES]
            ],
            cause=cause,
            advice=advice,
            threshold=f"at least {units.percent(DOMINANT)} of {case.window()} in kernels of one name, apart from "
            "sizes, if no other finding of medium or high severity explains it",
        ),
        0.0,
    )


def _judged(case: ProfileCase, found: Sequence[Kernel]) -> tuple[str, str]:
    """Returns what is known of the speed of the kernels, and what to do."""
    launchers = {one.operator for one in found} - {""}
    operators = [one for one in case.rank.operators if one.name in launchers and one.device > 0]
    known = [one for one in operators if one.of_ceiling is not None]
    spent = sum(one.device for one in known)
    if spent and spent >= sum(one.device for one in operators) / 2:
        reached = sum(one.device * (one.of_ceiling or 0.0) for one in known) / spent
        return (
            f"it runs at {units.percent(reached)} of the ceiling that its shapes give",
            "less work or a smaller data type is what is left"
            if reached >= SLOW
            else "try other kernels for its sizes",
        )
    launches = case.rank.launches
    if not launchers and launches is not None and launches.calls and launches.works > launches.calls:
        return (
            "whether it could be faster is unknown: a CUDA graph launches it, so that the trace has no shapes for it",
            "record without CUDA graphs and with record_shapes=True (enforce_eager=True in vLLM, "
            "--disable-cuda-graph in SGLang) to see its shapes",
        )
    if not launchers and case.rank.operators:
        return (
            "whether it could be faster is unknown: no recorded operator launches it, and so it has no shapes",
            "compare its time with another implementation, at the same shapes",
        )
    if not launchers:
        return (
            "whether it could be faster is unknown: the trace links no operator to it, and so no shapes",
            "record the CPU too: activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] and record_shapes=True",
        )
    needs = case.option("shapes")
    if needs:
        return (
            "whether it could be faster is unknown: its shapes were not recorded",
            f"{needs}=True shows how far it is from the device's peak",
        )
    if case.rank.compiled and any("Compiled" in one for one in launchers):
        return (
            "whether it could be faster is unknown: torch.compile hides the operator, and so its shapes",
            "record once without torch.compile and with record_shapes=True to see its shapes",
        )
    if all(one.flops is None and one.bytes is None for one in operators):
        named = units.listed(sorted(launchers)[:2])
        if any(map(has_formula, launchers)):
            return (
                f"whether it could be faster is unknown: the recorded inputs of {named} lack what its formula needs",
                "compare its time with another implementation of the same operator, at the same shapes",
            )
        return (
            f"whether it could be faster is unknown: there is no formula for the arithmetic of {named}",
            "compare its time with another implementation of the same operator, at the same shapes",
        )
    return (
        "whether it could be faster is unknown: the peak of the device for this type is not known",
        "compare its time with another implementation of the same operator, at the same shapes",
    )


def _stem(name: str) -> str:
    """Returns a kernel's name up to its first size or template argument."""
    return re.split(r"[0-9<(]", name.removeprefix("void "), maxsplit=1)[0] or name


def _common(names: Sequence[str]) -> str:
    if len(set(names)) == 1:
        return names[0].removeprefix("void ")
    return f"{_stem(names[0]).rstrip('_')}*"
