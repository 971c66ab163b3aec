"""Rules about the host: Python, operator dispatch, launches, synchronisation, threads and compilation."""

from gpubench import units
from gpubench.diagnosis import code
from gpubench.diagnosis.case import (
    HOST_WORTH,
    WORTH,
    Answers,
    ProfileCase,
    at_most,
    at_place,
    severity,
    shortened,
)
from gpubench.diagnosis.copies import direction
from gpubench.findings import Finding, Unanswered
from gpubench.trace.device import LONG_WAIT
from gpubench.trace.profile import Held, Launches, PythonStretch, Synchronisation

LONG = 50_000
"""The nanoseconds of a long stretch. Between two operators lie a few microseconds of Python, and tens with the call of
a module and its hooks. A longer time is not the cost of a call."""
MOST_OF_IDLE = 0.5  # of the idle time: a cause of more than that is named as the reason


def python_bound(case: ProfileCase) -> Answers:
    """Finds long stretches outside operators; on a GPU only where they explain most of its waiting for the host."""
    stretches = long_ones(case)
    cost, least = case.without_recording(long_share(case)), case.host_worth
    if not case.on_cpu:
        cost, least = min(cost, waits_for_host(case)), HOST_WORTH
        if not explains_waiting(case) or launches_block(case) or is_broken(case):
            return
    if not stretches or cost < least or case.recorded_eagerly:
        return
    cause, advice = _reason(case, stretches[0])
    yield Finding(
        id="python-bound",
        title=f"Python code between operators delays {case.who()}",
        severity=severity(cost),
        evidence=[
            f"the longest time outside any operator is {units.seconds(stretches[0].length / 1e9)}",
            *(_describe_stretch(case, one) for one in stretches),
            *code.sampled_evidence(code.of_steps(case, {one.phase for one in stretches})),
            *case.recording_evidence(cost),
        ],
        cause=cause,
        advice=advice,
        expected=at_most(cost),
        threshold=f"at least {units.percent(least)} of {case.window()} in stretches of {LONG // 1000} us and more: "
        "between "
        "two operators there are a few us, and tens with the call of a module",
    )
    needs = case.option("stacks")
    if needs and case.rank.code is None and all(one.where is None for one in stretches):
        yield Unanswered("python-bound", "file and line of the code between operators", needs)


def long_ones(case: ProfileCase) -> list[PythonStretch]:
    """Returns the places with long stretches that take at least WORTH of the step, the longest first."""
    known = case.rank.python.longest if case.rank.python else []
    return [one for one in known if one.length >= LONG and case.share(one.total) >= WORTH]


def long_share(case: ProfileCase) -> float:
    """Returns the fraction of the recorded step in long stretches."""
    return case.share(sum(one.total for one in long_ones(case)))


def waits_for_host(case: ProfileCase) -> float:
    """Returns the fraction of a clean step in which a GPU is idle because of Python and launches.

    Idle time while zero_grad fills gradients is left out: `zeroed_gradients` reports it.
    """
    return case.without_recording(case.share(waiting(case)))


def waiting(case: ProfileCase) -> int:
    """Returns the nanoseconds of the recorded steps in which a GPU is idle because of Python and launches."""
    return max(0, case.rank.idle.get("python_and_launch", 0) - case.rank.zeroing_idle)


def explains_waiting(case: ProfileCase) -> bool:
    """Returns whether long stretches can explain most of the time that a GPU waits for the host."""
    enough = case.without_recording(long_share(case)) >= HOST_WORTH
    waits = case.share(waiting(case))
    return enough and long_share(case) >= MOST_OF_IDLE * waits


def _reason(case: ProfileCase, longest: PythonStretch) -> tuple[str, str]:
    """Returns cause and advice; the loop is named as the cause only where its phases are known."""
    if longest.phase == "backward":
        return (
            "autograd runs no operator during that time: your hooks or autograd functions run other code, or wait",
            f"move work that is not needed {case.in_every_step()} out of the hooks",
        )
    phased = any(phase.name != "other" for phase in case.rank.phases)
    if phased and longest.phase == "other":
        return (
            f"the program does other work, or waits, between {_its_phases(case)}",
            f"move what is not needed {case.in_every_step()} out of there; do the rest, such as preparing inputs, with "
            "operators on the device, or in parallel, in the loader's workers or a thread",
        )
    return (
        "your code between operators, or something that it waits for",
        f"move work that is not needed {case.in_every_step()} out of it; do the rest with operators, or in parallel, "
        "in the loader's workers or a thread",
    )


def _its_phases(case: ProfileCase) -> str:
    return "the phases of its step" if case.rank.step_numbers else "its phases"


def _describe_stretch(case: ProfileCase, one: PythonStretch) -> str:
    module = f" of {one.module}" if one.module else ""
    after = f", after {one.after}" if one.after else ""
    return (
        f"in {one.phase}{module}{after}{at_place(one.where)}: {case.calls_per_step(one.count)}, "
        f"{case.time_per_step(one.total)}"
    )


SHORT_OPERATOR = 5_000
"""The nanoseconds of a short operator, as recorded. Calling one costs a few microseconds: an addition of one element
takes 1.3 us where gradients are recorded, and 11 us with its backward pass, of some five operators and nodes (PyTorch
2, one core)."""
EACH = 15_000
"""The nanoseconds of the clean step per operator, without waiting. Below it, calling the operator, forward and
backward, is a large part. A step of few large operators has 20 us and more per operator, though most of them, the
optimizer's, are short."""


IN_OWN_CODE = ("other", "forward")
"""The phases of a step in which the program's own code runs most."""


def dispatch_bound(case: ProfileCase) -> Answers:
    """Finds many short operators, with Python between them, in a step on a CPU."""
    outside, least = case.without_recording(between_calls(case)), case.host_worth
    if not case.on_cpu or case.recorded_eagerly:
        return
    if outside < least and not _short_operators(case):
        return
    cost = max(outside, case.without_recording(calling(case)))
    expected = at_most(cost) if cost >= least else None
    yield Finding(
        id="dispatch-bound",
        title=f"calling operators takes much of {case.window()}",
        severity=severity(cost) if expected else "medium",
        evidence=[
            *_dispatch_evidence(case),
            *code.sampled_evidence(code.of_steps(case, IN_OWN_CODE)),
            *case.recording_evidence(cost),
        ],
        cause="operators are so short that calling them costs as much as running them",
        advice="use torch.compile, or a larger batch, which gives each call more work; operate on whole tensors "
        "instead of looping over their parts",
        fix=case.compile_fix(),
        expected=expected,
        threshold=f"at least {units.percent(least)} of {case.window()} outside operators, without long stretches; or "
        "half of "
        f"the operators take under {SHORT_OPERATOR // 1000} us and {case.window()} has at most {EACH // 1000} us per "
        "operator: calling one costs a few us",
    )


def _short_operators(case: ProfileCase) -> bool:
    """Returns whether calling operators is a large part of the clean step."""
    python, each = case.rank.python, _for_each(case)
    if python is None or each is None:
        return False
    return python.operator_median <= SHORT_OPERATOR and each <= EACH and calling(case) >= HOST_WORTH


def _for_each(case: ProfileCase) -> float | None:
    """Returns the nanoseconds of the clean step per operator, without waiting; None if there are no operators."""
    python, host = case.rank.python, case.rank.host
    if python is None or not python.operators:
        return None
    working = case.rank.wall - host.get("data_loader", 0) - host.get("communication", 0)
    return working / python.operators / (1 + max(0.0, case.overhead or 0.0))


def between_calls(case: ProfileCase) -> float:
    """Returns the fraction of the recorded step between operators, without long stretches."""
    return max(0.0, case.host_share("python") - long_share(case))


def calling(case: ProfileCase) -> float:
    """Returns an upper limit for the fraction of the recorded step that calling operators takes.

    It assumes that every operator, and every stretch between operators, takes the median time.
    """
    python = case.rank.python
    each = python.operator_median + python.median if python else 0
    return min(1.0, case.share(python.operators * each if python else 0))


def _dispatch_evidence(case: ProfileCase) -> list[str]:
    python, outside, each = case.rank.python, case.rank.host.get("python", 0), _for_each(case)
    evidence = [f"the main thread is outside any operator for {case.time_per_step(outside)}"] if outside else []
    if python is not None and each is not None:
        number, median = units.digits(python.operators / case.steps), python.operator_median
        evidence += [
            f"{number} operators {case.per_step()}; half of them take at most {units.seconds(median / 1e9)}",
            f"{units.seconds(each / 1e9)} of {case.window(clean=True)} per operator, without waiting",
        ]
    return evidence


EVERYWHERE = 0.5  # of all launches: with more of them late or short, no single place in Python is the cause


def launch_bound(case: ProfileCase) -> Answers:
    """Finds a GPU that waits for the host where long stretches of Python do not explain it."""
    cost = waits_for_host(case)
    if cost < HOST_WORTH or launches_block(case) or is_broken(case):
        return
    if case.recorded_eagerly:
        yield Unanswered("launch-bound", "launches of the compiled model", "profiling.keep_compile")
        return
    if explains_waiting(case):
        return
    calls, of_calls = _slow_calls(case)
    if of_calls >= MOST_OF_IDLE * case.share(waiting(case)):
        yield _slow(case, calls, min(cost, case.without_recording(of_calls)))
        return
    many = _everywhere(case)
    yield Finding(
        id="launch-bound" if many else "python-bound",
        title="the GPU waits for the host's next launch",
        severity=severity(cost),
        evidence=[
            *_launch_evidence(case),
            *code.sampled_evidence(code.of_steps(case, IN_OWN_CODE)),
            *case.recording_evidence(cost),
        ],
        cause="kernels finish before Python and PyTorch have launched the next ones"
        if many
        else "single launches come late: the program's code, or what it calls, holds them up",
        advice="torch.compile(mode='reduce-overhead') launches many kernels at once in a CUDA graph; a larger batch "
        "makes each of them longer"
        if many
        else f"move work that is not needed {case.in_every_step()} out of it, or compile the code",
        fix=case.compile_fix(),
        expected=at_most(cost),
        threshold=f"at least {units.percent(HOST_WORTH)} of {case.window()}: recording slows the host, so that a "
        "smaller part may come from the profiler",
    )


def _slow_calls(case: ProfileCase) -> tuple[list[Held], float]:
    """Returns the operators and calls in which the host was during long waits, and the fraction of the window."""
    calls = [one for one in case.rank.held if one.name]
    return calls, case.share(sum(one.idle for one in calls))


def _slow(case: ProfileCase, calls: list[Held], cost: float) -> Finding:
    """Returns the finding for single calls that hold up the next launch, for which no graph of kernels helps."""
    return Finding(
        id="slow-calls",
        title="the GPU waits while the host is in single operators or calls",
        severity=severity(cost),
        evidence=[
            f"the GPU is idle {case.time_per_step(waiting(case))} until the host launches more work, most of it in "
            + units.listed([shortened(one.name) for one in calls[:2]]),
            *(
                f"in {shortened(one.name)}: {case.calls_per_step(one.calls)}, {case.time_per_step(one.idle)}"
                for one in calls[:NAMED]
            ),
            *case.recording_evidence(cost),
        ],
        cause="operators that run on the CPU, or calls that wait or do much by themselves, come before the next launch",
        advice="run these operators on the device, or beside the rest in a thread; if they are slow only the first "
        "time, run some steps before the recording",
        expected=at_most(cost),
        threshold=f"at least {units.percent(HOST_WORTH)} of {case.window()} in waits for the host, of which half are "
        f"in single calls, in waits of {units.seconds(LONG_WAIT / 1e9)} and more: a launch takes about 10 us",
    )


def works(launches: Launches) -> int:
    """Returns how many kernels and copies the calls launched; one per call if the trace does not show."""
    return launches.works or launches.calls


def _everywhere(case: ProfileCase) -> bool:
    """Returns whether most kernels are short or most launches late.

    The answer is no where single waits are half of the time, or one call launches many kernels, as with CUDA graphs.
    """
    launches = case.rank.launches
    if 2 * sum(one.idle for one in case.rank.held) >= waiting(case) > 0:
        return False
    if launches is None:
        return True
    most = EVERYWHERE * works(launches)
    return launches.calls >= most and max(launches.short, launches.late) >= most


def _launch_evidence(case: ProfileCase) -> list[str]:
    launches = case.rank.launches
    evidence = [f"the GPU is idle {case.time_per_step(waiting(case))} until the host launches more work"]
    if launches is not None and launches.calls:
        brought, calls = works(launches), launches.calls
        by = "" if brought == calls else f", launched by {units.counted(calls, 'call')}"
        evidence.append(
            f"{launches.short} of {brought} kernels and copies last under 10 us{by}; the GPU was already idle before "
            f"{launches.late} of them"
        )
    return [*evidence, *case.idle_starts_evidence()]


NAMED = 5  # places that a finding lists
MOST_OF_WAITING = 0.5  # of the cost of waiting: reading the loss is named as the cause from there on
READS = frozenset({"aten::item", "aten::_local_scalar_dense"})


def _threshold(case: ProfileCase) -> str:
    least = f"at least {units.percent(WORTH)} of {case.window()}"
    if case.on_cpu:
        return f"on a CPU, {least}: the wait is cheap there, but on a GPU it empties the queue"
    return f"{least} in which the device is idle for it: waiting for a busy device costs nothing"


def synchronisation(case: ProfileCase) -> Answers:
    if launches_block(case):
        return
    found = [wait for wait in _waits(case) if not _by_scaler(case, wait)]
    cost, of_loss = _cost(case, found), _cost(case, [wait for wait in found if _of_loss(case, wait)])
    if cost < WORTH:
        return
    reads_loss = of_loss >= MOST_OF_WAITING * cost
    calls = [] if reads_loss else code.calls(case, "read")
    waits = [_describe_wait(case, wait) for wait in found[:NAMED]]
    if waits and (lines := code.call_places(calls)):  # the first sentence is all that a terminal shows without -v
        waits[0] += f"; read by {lines}"
    yield Finding(
        id="synchronisation",
        title=f"{'values are read on the host' if case.on_cpu else 'the host waits for the device'}"
        + " in the loop" * bool(case.rank.step_numbers),
        severity=severity(cost),
        evidence=[
            *waits,
            *code.call_evidence(calls),
        ],
        cause="training.read_loss reads the loss on the host after every step"
        if reads_loss
        else "the program reads a value on the host, or asks for a wait, before it launches the next work",
        advice=_of_waits(case, found),
        fix=case.fix(training__read_loss=False) if reads_loss else {},
        expected=at_most(of_loss if reads_loss else cost),
        threshold=_threshold(case),
    )
    needs = case.option("stacks")
    known = reads_loss or calls or any(wait.where for wait in found)
    if needs and not known:
        yield Unanswered("synchronisation", "file and line of what makes the host wait", needs)


def _of_waits(case: ProfileCase, found: list[Synchronisation]) -> str:
    """Returns advice for values that operators read, and for waits that the program asks for, if they cost most."""
    reads = _costs(case, [wait for wait in found if wait.operator != wait.call])
    if 2 * reads >= _costs(case, found):
        return (
            f"read values {case.less_often()}: keep them on the device, sum them there, and call .item() when you show "
            "them; a branch on a tensor's value reads it too"
        )
    return "remove waits that nothing needs, such as torch.cuda.synchronize() and Event.synchronize()"


def gradient_scaler(case: ProfileCase) -> Answers:
    """Finds the waits of fp16's gradient scaler, which reads on the host whether gradients overflowed."""
    found = [wait for wait in _waits(case) if _by_scaler(case, wait)]
    cost = _cost(case, found)
    if cost < WORTH:
        return
    yield Finding(
        id="gradient-scaler",
        title=f"the gradient scaler makes the host wait {case.in_every_step()}",
        severity=severity(cost),
        evidence=[_describe_wait(case, wait) for wait in found],
        cause="fp16 needs a scaled loss, and the scaler reads on the host whether gradients overflowed",
        advice="bf16 has the range of fp32 and needs no scaler, on GPUs of compute capability 8.0 and later",
        fix=case.fix(precision="bf16") if (case.compute_capability or 0) >= 8 else {},
        expected=at_most(cost),
        threshold=_threshold(case),
    )


def blocking_launches(case: ProfileCase) -> Answers:
    if not launches_block(case):
        return
    cost = case.idle_share("synchronisation") + case.idle_share("python_and_launch")
    yield Finding(
        id="blocking-launches",
        title="every launch waits until its kernel is done",
        severity=severity(cost),
        evidence=["the environment has CUDA_LAUNCH_BLOCKING set"],
        cause="CUDA_LAUNCH_BLOCKING, a setting for debugging, is on",
        advice="unset CUDA_LAUNCH_BLOCKING",
        expected=at_most(cost),
        threshold="wherever it is set, because every measurement under it is wrong",
    )


def launches_block(case: ProfileCase) -> bool:
    """Returns whether CUDA_LAUNCH_BLOCKING is set: every wait and every gap between kernels then comes from it."""
    switch = str(case.environment.get("variables.CUDA_LAUNCH_BLOCKING", "0"))
    return not case.on_cpu and switch not in ("", "0")


def _waits(case: ProfileCase) -> list[Synchronisation]:
    """Returns the waits that cost time, the most costly first.

    A wait for a GPU that is busy, or that has more work queued, costs nothing. Waits for copies are left out, on a CPU
    the optimizer's reads of its step counts, and in inference gpubench's own wait for the result.
    """
    found = [
        wait
        for wait in case.rank.synchronisations
        if direction(case, wait) is None
        and not (case.on_cpu and wait.phase == "optimizer")
        and not _for_result(case, wait)
        and _costs(case, [wait])
    ]
    return sorted(found, key=lambda wait: _costs(case, [wait]), reverse=True)


def _by_scaler(case: ProfileCase, wait: Synchronisation) -> bool:
    return case.setting("precision") == "amp" and wait.phase == "optimizer" and wait.operator in READS


def _of_loss(case: ProfileCase, wait: Synchronisation) -> bool:
    """Returns whether the wait is the training loop's own read of the loss, which a setting switches off."""
    return case.setting("training.read_loss") is True and wait.phase == "other" and wait.operator in READS


def _for_result(case: ProfileCase, wait: Synchronisation) -> bool:
    """Returns whether the wait is that for the whole device with which gpubench's own loop ends a forward pass."""
    own = case.infers and case.setting("model.name") is not None
    return own and wait.phase == "forward" and wait.call.endswith("DeviceSynchronize")


def _cost(case: ProfileCase, waits: list[Synchronisation]) -> float:
    """Returns the fraction of the step that the waits cost."""
    return case.share(_costs(case, waits))


def _costs(case: ProfileCase, waits: list[Synchronisation]) -> int:
    """Returns the nanoseconds that the waits cost: on a GPU the time that it is idle because of them."""
    return sum(wait.blocked if case.on_cpu else wait.idle for wait in waits)


def _describe_wait(case: ProfileCase, wait: Synchronisation) -> str:
    call = f" ({wait.call})" if wait.call and wait.call != wait.operator else ""
    idle = f", and the GPU is idle {case.time_per_step(wait.idle)}" if wait.idle else ""
    return (
        f"{wait.operator}{call}{at_place(wait.where)} in {wait.phase}: "
        f"{case.calls_per_step(wait.calls)}, the host waits {case.time_per_step(wait.blocked)}{idle}"
    )


IN_OPERATORS = 0.2  # of the step: threads speed up operators only
SHARED = 12_000
"""The nanoseconds of the clean step per operator from which on sharing an operator among threads pays. Training steps
of linear layers were up to 1.2 times as fast with one thread as with two below 10 us per operator, and 0.9 times as
fast at 13 us (PyTorch 2.13, two cores)."""


def too_few_threads(case: ProfileCase) -> Answers:
    threads, cores = case.threads, case.cores
    if cores is not None:
        cores = max(1, int(cores - case.taken))
    within = case.host_share("operators") + case.host_share("optimizer")
    if threads is None or cores is None or threads >= cores or within < IN_OPERATORS or _too_short_to_share(case):
        return
    saving = within * (1 - threads / cores)
    yield Finding(
        id="too-few-threads",
        title=f"operators compute with {units.counted(threads, 'thread')}, and could with {cores}",
        severity=severity(saving),
        evidence=[
            f"each rank computes with {units.counted(threads, 'thread')} and has "
            f"{units.counted(case.cores or cores, 'core')}",
            f"operators take {units.percent(case.host_share('operators'))} of {case.window()}, and those of the "
            f"optimizer {units.percent(case.host_share('optimizer'))}",
            *case.taken_evidence(),
        ],
        cause="operators can use no more cores than they have threads",
        advice=_with_threads(cores),
        fix=case.fix(performance__cpu_threads=cores),
        expected=at_most(saving),
        threshold=f"at least {units.percent(IN_OPERATORS)} of {case.window()} in operators, those of the optimizer "
        "included, as threads speed up nothing else",
    )


def too_many_threads(case: ProfileCase) -> Answers:
    threads, cores = case.threads, case.cores
    if threads is None:
        return
    if threads > 1 and (each := _too_short_to_share(case)):
        yield Finding(
            id="too-many-threads",
            title="operators are too short to be shared among threads",
            severity="medium",
            evidence=[
                f"{units.seconds(each / 1e9)} of {case.window(clean=True)} per operator, without waiting",
                f"each rank computes with {units.counted(threads, 'thread')}",
            ],
            cause="starting the threads of an operator, and waiting for the last one, takes longer than they save",
            advice=_with_threads(1),
            fix=case.fix(performance__cpu_threads=1),
            threshold=f"less than {SHARED // 1000} us of {case.window()} per operator; the trace does not show what "
            "threads "
            "cost",
        )
    elif cores is not None and threads > cores:
        yield Finding(
            id="too-many-threads",
            title="there are more computing threads than cores",
            severity="medium",
            evidence=[
                f"each rank computes with {units.counted(threads, 'thread')} and has {units.counted(cores, 'core')}"
            ],
            cause="an operator ends with its slowest thread, and a thread without a core has to wait",
            advice=_with_threads(cores),
            fix=case.fix(performance__cpu_threads=cores),
            threshold="from one thread more than there are cores; the trace does not show what it costs",
        )


def _too_short_to_share(case: ProfileCase) -> float | None:
    """Returns the nanoseconds of the clean step per operator if they are so few that sharing one does not pay."""
    each = _for_each(case)
    return each if each is not None and each < SHARED else None


def _with_threads(number: int) -> str:
    return f"torch.set_num_threads({number}), or OMP_NUM_THREADS={number} before Python starts"


def graph_breaks(case: ProfileCase) -> Answers:
    compiled = case.rank.compiled
    # DDP compiles one graph for each gradient bucket, on purpose, so that all-reduces can start between them.
    if compiled is None or compiled.graph_breaks == 0 or case.ranks > 1:
        return
    around = case.idle_share("python_and_launch") or case.host_share("python")
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
        "lies "
        "between regions",
    )


def is_broken(case: ProfileCase) -> bool:
    """Returns whether regions beyond the first are graph breaks.

    They are in our own runs, which compile one module. In other programs they may be separately compiled functions.
    """
    compiled = case.rank.compiled
    return case.settings is not None and compiled is not None and compiled.graph_breaks > 0


_UNTRACEABLE = "code that cannot be traced, such as .item(), print or a branch on a tensor's value, ends a graph"


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
