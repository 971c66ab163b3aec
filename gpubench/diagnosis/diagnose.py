"""All rules on one case, the most costly finding first."""

from collections.abc import Callable

from gpubench.diagnosis.arithmetic import fp32_products
from gpubench.diagnosis.attention import unfused_attention
from gpubench.diagnosis.batches import small_batch, small_batch_on_cpu
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.communication import exposed_communication, repeated_reduction
from gpubench.diagnosis.compilation import graph_breaks, recompilation
from gpubench.diagnosis.conversions import casts, layout_in_model, layout_of_batches, nchw_convolutions
from gpubench.diagnosis.copies import blocking_copies, device_to_host, host_tensors, pinning
from gpubench.diagnosis.data import data_loading
from gpubench.diagnosis.dispatch import dispatch_bound
from gpubench.diagnosis.headline import headline
from gpubench.diagnosis.launches import launch_bound
from gpubench.diagnosis.measures import Answers
from gpubench.diagnosis.memory import allocator, memory_bound, recompute
from gpubench.diagnosis.optimizer import unfused_optimizer, zeroed_gradients
from gpubench.diagnosis.python import python_bound
from gpubench.diagnosis.shapes import odd_shapes
from gpubench.diagnosis.stragglers import stragglers
from gpubench.diagnosis.synchronisation import blocking_launches, gradient_scaler, synchronisation
from gpubench.diagnosis.threads import too_few_threads, too_many_threads
from gpubench.findings import Finding, Findings, Unanswered
from gpubench.trace.profile import Rank

Rule = Callable[[Case], Answers]

RULES: tuple[Rule, ...] = (
    data_loading, pinning, blocking_copies, device_to_host, host_tensors, casts, layout_of_batches, layout_in_model,
    nchw_convolutions, synchronisation, gradient_scaler, blocking_launches, launch_bound, python_bound, dispatch_bound,
    small_batch, small_batch_on_cpu, fp32_products, unfused_attention, odd_shapes, memory_bound, unfused_optimizer,
    zeroed_gradients, repeated_reduction, exposed_communication, stragglers, recompute, allocator, graph_breaks,
    recompilation, too_few_threads, too_many_threads,
)  # fmt: skip

OF_HOST: tuple[Rule, ...] = (data_loading,)
"""Those that hold where a device worked, and its work is not read or was not recorded."""

_BY_SEVERITY = {"high": 0, "medium": 1, "low": 2}


def diagnose(case: Case) -> Findings:
    """Findings by expected saving, those of which it is unknown last."""
    lacking = _lacking(case.rank)
    answers = [answer for rule in (OF_HOST if lacking else RULES) for answer in rule(case)]
    if lacking:
        answers.append(Unanswered("device", lacking, needs=""))
    findings = [answer for answer in answers if isinstance(answer, Finding) and answer.evidence]
    findings.sort(key=_urgency)
    return Findings(
        headline=headline(case),
        findings=findings,
        unanswered=[answer for answer in answers if isinstance(answer, Unanswered)],
    )


def _lacking(rank: Rank) -> str:
    """What is missing of a program whose device did work that is not in the trace; nothing of one on a CPU."""
    if rank.host_only and rank.unread:
        return f"the device's work, as {rank.unread[0]} is not read"
    return "the GPU's work, which was not recorded (ProfilerActivity.CUDA)" if rank.work_missing else ""


def _urgency(finding: Finding) -> tuple[float, int]:
    saving = -1.0 if finding.expected is None else finding.expected.estimate
    return -saving, _BY_SEVERITY[finding.severity]
