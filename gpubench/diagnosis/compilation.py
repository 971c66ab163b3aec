"""Rules about compiled code: graph breaks, and compiling again."""

from gpubench import units
from gpubench.diagnosis.case import WORTH, Answers, ProfileCase, at_most, severity
from gpubench.findings import Finding

_UNTRACEABLE = "code that cannot be traced, such as .item(), print or a branch on a tensor's value, ends a graph"


def graph_breaks(case: ProfileCase) -> Answers:
    compiled = case.rank.compiled
    # DDP compiles one graph for each gradient bucket, on purpose, so that all-reduces can start between them.
    if compiled is None or compiled.graph_breaks == 0 or case.ranks > 1:
        return
    around = case.idle_share("python_and_launch") or case.cpu_share("python")
    if around < WORTH:
        return
    broken = is_broken(case)
    yield Finding(
        id="graph-breaks",
        title="graph breaks split the compiled model" if broken else "the compiled code is in several regions",
        severity=severity(around if broken else None),
        evidence=[
            f"{case.window()} runs {units.counted(compiled.regions, 'compiled graph')}"
            + (f", so the model breaks {units.counted(compiled.graph_breaks, 'time')}" if broken else ""),
            f"{units.percent(around)} of {case.window()} goes to Python, between them and elsewhere",
        ],
        cause=_UNTRACEABLE if broken else f"separately compiled functions, or graph breaks: {_UNTRACEABLE}",
        advice="torch.compile(fullgraph=True) or TORCH_LOGS=graph_breaks names the lines",
        threshold=f"for one region beyond the first, {case.worth_reason}; the trace does not show how much of that "
        "lies between regions",
    )


def is_broken(case: ProfileCase) -> bool:
    """Tells whether compiled regions beyond the first are graph breaks.

    They are in gpubench's own runs, which compile one module. In other programs they may be separately compiled
    functions.
    """
    compiled = case.rank.compiled
    return case.settings is not None and compiled is not None and compiled.graph_breaks > 0


def _in_all(case: ProfileCase) -> str:
    return f"in {units.counted(case.steps, 'step')}" if case.rank.step_numbers else case.per_step()


def recompilation(case: ProfileCase) -> Answers:
    compiled = case.rank.compiled
    cost = case.share(compiled.compiling) if compiled is not None else 0.0
    first = any(one.kind == "compile" for one in case.rank.first_calls)  # `not_warmed_up` reports those
    if compiled is None or compiled.compilations == 0 or cost < WORTH or first:
        return
    yield Finding(
        id="recompilation",
        title=f"the model is compiled again while it {'trains' if case.trains else 'runs'}",
        severity=severity(cost),
        evidence=[
            f"{units.counted(compiled.compilations, 'compilation')} {_in_all(case)}, "
            f"{case.time_per_step(compiled.compiling)}"
        ],
        cause="a shape, number or flag that the graph was specialised for changes",
        advice="keep shapes fixed, or mark varying ones with torch._dynamo.mark_dynamic; TORCH_LOGS=recompiles names "
        "what changed",
        expected=at_most(cost),
        threshold=case.worth_reason,
    )
