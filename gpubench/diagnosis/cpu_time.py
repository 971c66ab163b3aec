"""Rules about a step whose time goes to Python, to calling operators and to launches."""

from gpubench import units
from gpubench.diagnosis import code
from gpubench.diagnosis.case import CPU_WORTH, WORTH, Answers, ProfileCase, at_most, at_place, severity, shortened
from gpubench.diagnosis.compilation import is_broken
from gpubench.diagnosis.synchronisation import launches_block
from gpubench.findings import Finding, Unanswered
from gpubench.trace.device import LONG_WAIT
from gpubench.trace.profile import Held, Launches, PythonStretch

LONG = 50_000
"""The nanoseconds of a long stretch. Between two operators lie a few microseconds of Python, and tens with the call of
a module and its hooks. A longer time is not the cost of a call."""
MOST_OF_IDLE = 0.5  # of the idle time: a cause of more than that is named as the reason
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
EVERYWHERE = 0.5  # of all launches: with more of them late or short, no single place in Python is the cause
NAMED = 5  # calls that a finding lists


def python_bound(case: ProfileCase) -> Answers:
    """Finds long stretches outside operators; on a GPU only where they explain most of its waiting for the CPU."""
    stretches = long_ones(case)
    cost, least = case.without_recording(long_share(case)), case.cpu_worth
    if not case.on_cpu:
        cost, least = min(cost, waits_for_cpu(case)), CPU_WORTH
        if not explains_waiting(case) or launches_block(case) or is_broken(case):
            return
    if not stretches or cost < least or case.recorded_eagerly:
        return
    cause, advice = _reason(case, stretches[0])
    yield Finding(
        id="python-bound",
        title=f"Python code between operators delays {case.who()}",
        severity=severity(cost),
        evidence=[  # the first sentence is all that a terminal shows without -v
            *code.sampled_evidence(code.of_steps(case, {one.phase for one in stretches})),
            f"the longest time outside any operator is {units.seconds(stretches[0].length / 1e9)}",
            *(_describe_stretch(case, one) for one in stretches),
            *case.recording_evidence(cost),
        ],
        cause=cause,
        advice=advice,
        expected=at_most(cost),
        threshold=f"at least {units.percent(least)} of {case.window()} in stretches of {LONG // 1000} us and more: "
        "between two operators there are a few us, and tens with the call of a module",
    )
    needs = case.option("stacks")
    if needs and case.rank.code is None and all(one.where is None for one in stretches):
        yield Unanswered("python-bound", "file and line of the code between operators", needs)


def long_ones(case: ProfileCase) -> list[PythonStretch]:
    """Returns the places with long stretches that take at least WORTH of the step, the longest first."""
    known = case.rank.python.longest if case.rank.python and case.has_operators else []
    return [one for one in known if one.length >= LONG and case.share(one.total) >= WORTH]


def long_share(case: ProfileCase) -> float:
    return case.share(sum(one.total for one in long_ones(case)))


def waits_for_cpu(case: ProfileCase) -> float:
    """Returns the fraction of a clean step in which a GPU is idle because of Python and launches.

    Idle time while zero_grad fills gradients is left out: `zeroed_gradients` reports it.
    """
    return case.without_recording(case.share(waiting(case)))


def waiting(case: ProfileCase) -> int:
    """Returns the nanoseconds of the recorded steps in which a GPU is idle because of Python and launches."""
    return max(0, case.rank.idle.get("python_and_launch", 0) - case.rank.zeroing_idle)


def explains_waiting(case: ProfileCase) -> bool:
    """Tells whether long stretches can explain most of the time that a GPU waits for the CPU."""
    enough = case.without_recording(long_share(case)) >= CPU_WORTH
    waits = case.share(waiting(case))
    return enough and long_share(case) >= MOST_OF_IDLE * waits


def _reason(case: ProfileCase, longest: PythonStretch) -> tuple[str, str]:
    """Returns cause and advice, which name the loop only if its phases are known."""
    if longest.phase == "backward":
        return (
            "autograd runs no operator during that time: your hooks or autograd functions run other code, or wait",
            f"move work that is not needed {case.in_every_step()} out of the hooks",
        )
    phased = any(phase.name != "other" for phase in case.rank.phases)
    if phased and longest.phase == "other":
        operators = "on whole tensors" if case.on_cpu else "on the device"
        return (
            f"the program does other work, or waits, between {_its_phases(case)}",
            f"move what is not needed {case.in_every_step()} out of there; do the rest, such as preparing inputs, with "
            f"operators {operators}, or in parallel, in the loader's workers or a thread",
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


def dispatch_bound(case: ProfileCase) -> Answers:
    """Finds many short operators, with Python between them, in a step on a CPU."""
    outside, least = case.without_recording(between_calls(case)), case.cpu_worth
    if not case.on_cpu or case.recorded_eagerly or not case.has_operators:
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
        f"half of the operators take under {SHORT_OPERATOR // 1000} us and {case.window()} has at most "
        f"{EACH // 1000} us per operator: calling one costs a few us",
    )


def _short_operators(case: ProfileCase) -> bool:
    """Tells whether calling operators is a large part of the clean step."""
    python, each = case.rank.python, time_per_operator(case)
    if python is None or each is None:
        return False
    return python.operator_median <= SHORT_OPERATOR and each <= EACH and calling(case) >= CPU_WORTH


def time_per_operator(case: ProfileCase) -> float | None:
    """Returns the nanoseconds of the clean step per operator, without waiting; None if there are no operators."""
    python, host = case.rank.python, case.rank.host
    if python is None or not python.operators:
        return None
    working = case.rank.wall - host.get("data_loader", 0) - host.get("communication", 0)
    return working / python.operators / (1 + max(0.0, case.overhead or 0.0))


def between_calls(case: ProfileCase) -> float:
    """Returns the fraction of the recorded step between operators, without long stretches."""
    return max(0.0, case.cpu_share("python") - long_share(case))


def calling(case: ProfileCase) -> float:
    """Returns an upper limit for the fraction of the recorded step that calling operators takes.

    It assumes that every operator, and every stretch between operators, takes the median time.
    """
    python = case.rank.python
    each = python.operator_median + python.median if python else 0
    return min(1.0, case.share(python.operators * each if python else 0))


def _dispatch_evidence(case: ProfileCase) -> list[str]:
    python, outside, each = case.rank.python, case.rank.host.get("python", 0), time_per_operator(case)
    evidence = [f"the main thread is outside any operator for {case.time_per_step(outside)}"] if outside else []
    if python is not None and each is not None:
        number, median = units.digits(python.operators / case.steps), python.operator_median
        evidence += [
            f"{number} operators {case.per_step()}; half of them take at most {units.seconds(median / 1e9)}",
            f"{units.seconds(each / 1e9)} of {case.window(clean=True)} per operator, without waiting",
        ]
    return evidence


def launch_bound(case: ProfileCase) -> Answers:
    """Finds a GPU that waits for the CPU where long stretches of Python do not explain it."""
    cost = waits_for_cpu(case)
    if cost < CPU_WORTH or launches_block(case) or is_broken(case):
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
        title="the GPU waits for the CPU's next launch",
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
        threshold=f"at least {units.percent(CPU_WORTH)} of {case.window()}: recording slows Python and "
        "launches, so that a smaller part may come from the profiler",
    )


def _slow_calls(case: ProfileCase) -> tuple[list[Held], float]:
    """Returns the operators and calls in which the CPU was during long waits, and the fraction of the window."""
    calls = [one for one in case.rank.held if one.name]
    return calls, case.share(sum(one.idle for one in calls))


def _slow(case: ProfileCase, calls: list[Held], cost: float) -> Finding:
    """Returns the finding for single calls that delay the next launch, for which no CUDA graph helps."""
    return Finding(
        id="slow-calls",
        title="the GPU waits while the CPU is in single operators or calls",
        severity=severity(cost),
        evidence=[
            f"the GPU is idle {case.time_per_step(waiting(case))} until the CPU launches more work, most of it in "
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
        threshold=f"at least {units.percent(CPU_WORTH)} of {case.window()} in waits for the CPU, of which half are "
        f"in single calls, in waits of {units.seconds(LONG_WAIT / 1e9)} and more: a launch takes about 10 us",
    )


def works(launches: Launches) -> int:
    """Returns how many kernels and copies the calls launched; one per call if the trace does not show it."""
    return launches.works or launches.calls


def _everywhere(case: ProfileCase) -> bool:
    """Tells whether most kernels are short or most launches late.

    They are not if single waits are half of the time, or if one call launches many kernels, as with CUDA graphs.
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
    evidence = [f"the GPU is idle {case.time_per_step(waiting(case))} until the CPU launches more work"]
    if launches is not None and launches.calls:
        brought, calls = works(launches), launches.calls
        by = "" if brought == calls else f", launched by {units.counted(calls, 'call')}"
        evidence.append(
            f"{launches.short} of {brought} kernels and copies last under 10 us{by}; the GPU was already idle before "
            f"{launches.late} of them"
        )
    return [*evidence, *case.idle_starts_evidence()]
