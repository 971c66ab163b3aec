"""Rules about a device that is fed too slowly, or with too little at a time."""

from typing import Any

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import Answers
from gpubench.diagnosis.synchronisation import launches_block
from gpubench.findings import Finding, Unanswered

LAUNCHING = 0.1  # recording slows the host: a smaller part may not be there without it
EVERYWHERE = 0.5  # most launches: then it is not single places in Python that hold the device up
PYTHON = 0.25  # the profiler's own work is among it: it made the step of a 20-layer MLP 29 % longer, 22 % of it
SHORT_WORK = 0.5  # most of the computing: then a kernel's fixed cost, not its work, makes the step
ROOM = 0.5  # activations double with the batch, at most all that is held


def launch_bound(case: Case) -> Answers:
    cost = measures.idle(case, "python_and_launch")
    compiled = case.rank.compiled
    if cost < LAUNCHING or launches_block(case) or (compiled is not None and compiled.graph_breaks > 0):
        return
    if measures.recorded_eagerly(case):
        yield Unanswered("launch-bound", "launches of the compiled model", "profiling.keep_compile")
        return
    many = _everywhere(case)
    yield Finding(
        id="launch-bound" if many else "python-bound",
        title="the GPU waits for the host's next launch",
        severity=measures.severity(cost),
        evidence=_evidence(case),
        cause="kernels are done before Python and PyTorch have launched the next ones"
        if many
        else "code between the operators keeps the host from launching the next one",
        advice="torch.compile(mode='reduce-overhead') launches many kernels at once, as a CUDA graph; a larger batch "
        "makes each of them longer"
        if many
        else "move what need not happen in every step out of the loop, or compile what can be",
        fix=_compile(case),
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(LAUNCHING)} of the step on: recording slows the host, so that less may be the "
        "profiler's own",
    )


def python_bound(case: Case) -> Answers:
    """The same on a CPU, where no device waits: time outside operators."""
    cost = measures.host(case, "python")
    if case.rank.device is not None or cost < PYTHON or measures.recorded_eagerly(case):
        return
    other = measures.phase(case, "other")
    outside = other is not None and other.host > case.rank.host["python"] / 2
    yield Finding(
        id="python-bound",
        title="much of the step is Python, not arithmetic",
        severity=measures.severity(cost),
        evidence=[f"the main thread is outside any operator for {phrases.a_step(case, case.rank.host['python'])}"]
        + ([f"{phrases.a_step(case, other.host)} lie outside forward, backward and optimizer"] if other else []),
        cause="the loop does other things than training between its phases"
        if outside
        else "operators are so short that calling them costs as much as they do",
        advice="move what need not happen in every step out of the loop"
        if outside
        else "torch.compile, or a larger batch, which gives each call more to do",
        fix={} if outside else _compile(case),
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(PYTHON)} of the step on, since the profiler's own work is among it",
    )


def small_batch(case: Case) -> Answers:
    """A GPU that keeps up with its launches, and still has little to do in each."""
    launches, device = case.rank.launches, case.rank.device
    if launches is None or device is None or measures.recorded_eagerly(case):
        return
    if measures.idle(case, "python_and_launch") >= LAUNCHING:
        return
    if device.compute <= 0 or launches.short_total / device.compute < SHORT_WORK:
        return
    used = measures.memory_used(case)
    fits = used is None or used <= ROOM
    cost = measures.share(case, launches.short_total) / 2
    yield Finding(
        id="small-batch",
        title="kernels are too short to fill the GPU",
        severity=measures.severity(cost),
        evidence=[
            f"{launches.short} of {launches.calls} launches last under 10 us; they make "
            f"{units.percent(launches.short_total / device.compute)} of the computing time",
            *([f"the clean run held {units.percent(used)} of the GPU's memory"] if used is not None else []),
        ],
        cause="a batch gives each kernel less work than starting and ending it takes",
        advice="a larger batch, with the learning rate set anew"
        if fits
        else "a larger batch, if activation checkpointing or a smaller type makes room for it",
        fix=_doubled(case) if fits else {},
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(SHORT_WORK)} of the computing time in kernels under 10 us, of which several "
        "are fixed cost; the saving is per sample, as a step then does more",
    )


def _everywhere(case: Case) -> bool:
    """Whether most kernels are short, or most launches come late."""
    launches = case.rank.launches
    return launches is None or max(launches.short, launches.late) >= EVERYWHERE * launches.calls


def _evidence(case: Case) -> list[str]:
    launches, waiting = case.rank.launches, case.rank.idle["python_and_launch"]
    said = [f"the GPU is idle {phrases.a_step(case, waiting)} until the host launches the next work"]
    if launches is not None and launches.calls:
        said.append(
            f"{launches.short} of {launches.calls} launches bring a kernel under 10 us; after {launches.late} of them "
            "the GPU had already run dry"
        )
    starved = case.metrics.get("starved_steps")
    if starved is not None and starved.estimate > 0:
        said.append(f"{units.percent(starved.estimate)} of the clean run's steps began with the GPU out of work")
    return said


def _compile(case: Case) -> dict[str, Any]:
    """The next thing to try that the run has not; CUDA graphs do not survive accumulation."""
    graphs = case.rank.device is not None and (case.setting("training.grad_accumulation") or 1) == 1
    if case.setting("performance.compile") is False:
        if graphs:
            return measures.fix(case, performance__compile=True, performance__compile_mode="reduce-overhead")
        return measures.fix(case, performance__compile=True)
    if graphs and case.setting("performance.compile_mode") == "default":
        return measures.fix(case, performance__compile_mode="reduce-overhead")
    return {}


def _doubled(case: Case) -> dict[str, Any]:
    if batch := case.setting("training.batch_size"):
        return measures.fix(case, training__batch_size=2 * batch)
    micro, samples = case.setting("work.micro_batch"), case.setting("work.samples")
    if micro and samples and 2 * micro <= samples:
        return measures.fix(case, work__micro_batch=2 * micro)
    return {}
