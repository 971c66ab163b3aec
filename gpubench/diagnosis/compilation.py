"""Rules about what torch.compile could not keep together, or had to do again."""

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import WORTH, WORTH_REASON, Answers
from gpubench.findings import Finding, severity


def graph_breaks(case: Case) -> Answers:
    compiled = case.rank.compiled
    # DDP makes a graph of each gradient bucket, on purpose, so that sums can begin between them.
    if compiled is None or compiled.graph_breaks == 0 or measures.ranks(case) > 1:
        return
    around = measures.idle(case, "python_and_launch") or measures.host(case, "python")
    if around < WORTH:
        return
    broken = is_broken(case)
    yield Finding(
        id="graph-breaks",
        title="the compiled model is in pieces" if broken else "the compiled code is in several regions",
        severity=severity(around if broken else None),
        evidence=[
            f"{phrases.whole(case)} runs {units.counted(compiled.regions, 'compiled graph')}"
            + (f", so the model breaks {units.counted(compiled.graph_breaks, 'time')}" if broken else ""),
            f"{units.percent(around)} of {phrases.whole(case)} goes to Python between them and elsewhere",
        ],
        cause=_UNTRACEABLE if broken else f"functions that are compiled apart, or graph breaks: {_UNTRACEABLE}",
        advice="torch.compile(fullgraph=True) or TORCH_LOGS=graph_breaks names the lines",
        threshold=f"for one region beyond the first, {WORTH_REASON}; how much of that lies between regions, the trace "
        "does not tell",
    )


def is_broken(case: Case) -> bool:
    """Whether regions beyond the first are graph breaks: in a run of our own one module is compiled. Elsewhere they may
    be functions that were compiled apart."""
    compiled = case.rank.compiled
    return case.settings is not None and compiled is not None and compiled.graph_breaks > 0


_UNTRACEABLE = "code that cannot be traced, such as .item(), print or a branch on a tensor's value, ends a graph"


def recompilation(case: Case) -> Answers:
    compiled = case.rank.compiled
    cost = measures.share(case, compiled.compiling) if compiled is not None else 0.0
    if compiled is None or compiled.compilations == 0 or cost < WORTH:
        return
    yield Finding(
        id="recompilation",
        title="the model is compiled again while it trains",
        severity=severity(cost),
        evidence=[
            f"{units.counted(compiled.compilations, 'compilation')} in {units.counted(measures.steps(case), 'step')}, "
            f"{phrases.a_step(case, compiled.compiling)}"
        ],
        cause="something that a graph was specialised for changes: a shape, a number, a flag",
        advice="keep shapes fixed, or torch._dynamo.mark_dynamic what varies; TORCH_LOGS=recompiles says what changed",
        expected=measures.at_most(cost),
        threshold=WORTH_REASON,
    )
