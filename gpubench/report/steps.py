"""The part of a run's report about its steps, in training and inference, of gpubench's models and of programs."""

from collections.abc import Iterator
from dataclasses import replace

from gpubench import units
from gpubench.compare.evidence import RunEvidence, Side
from gpubench.metrics import LATENCIES, place_of_phase
from gpubench.report import bar_charts, phrases, run_figures
from gpubench.report.charts import hue
from gpubench.report.document import UNASKED, Block, Breakdown, Figure, Heading, Medium, Part, Table, table
from gpubench.report.kind_report import intervals
from gpubench.text import phase_name

METRICS = (
    *LATENCIES,
    "throughput",
    "token_throughput",
    "step_time",
    "mfu",
    "hfu",
    "mfu_of_measured_peak",
    "measured_peak",
    "energy_per_sample",
    "peak_memory_allocated",
    "peak_memory_reserved",
    "setup_peak_memory_reserved",
    "peak_memory_rss",
    "first_step_time",
    "warmup_time",
    "straggler_skew",
    "starved_steps",
    "skipped_steps",
    "final_loss",
)
"""The metrics that -v and Markdown lead with."""
IN_BRIEF = (
    *LATENCIES,
    "token_throughput",
    "step_time",
    "mfu",
    "energy_per_sample",
    "peak_memory_reserved",
    "peak_memory_rss",
    "skipped_steps",
)
"""The metrics that a terminal shows besides the throughput."""
SMALL = 0.02
"""The share of a step below which a terminal leaves out a phase."""
MORE = "-v shows every metric, and report.html the steps; gpubench profile says what the time goes into"


def answer(run: RunEvidence) -> str:
    """Returns "", because the answer is the throughput."""
    return ""


def before_metrics(run: RunEvidence) -> Iterator[Block]:
    """Yields nothing: the phases follow the metrics in a text, and lead on a page."""
    yield from ()


def over_time(run: RunEvidence) -> Iterator[Block]:
    """Yields the steps and their distribution."""
    side = run_figures.recording(Side(run.label, (run,)))
    yield Heading("Steps")
    yield from run_figures.or_missing([run_figures.steps([side])], "steps are not recorded")
    if distribution := run_figures.distribution([side]):
        yield distribution


def after_metrics(run: RunEvidence) -> Iterator[Block]:
    """Yields the phases of the steps, and how the ranks compare."""
    found = {
        metric.name.removeprefix("phase_"): max(0.0, metric.estimate)
        for metric in run.metrics.values()
        if metric.name.startswith("phase_") and phrases.WITHOUT_NEWS.get(metric.name) != metric.estimate
    }
    ordered = sorted(found, key=place_of_phase)
    whole = sum(found.values())
    drawing = bar_charts.stack("phases of a step", [(phase_name(name), found[name], hue(name)) for name in ordered])
    if whole > 0:
        yield Heading("Phases of a step")
        if drawing is not None:
            yield Figure("", drawing, shape="wide")
        of = "phase of a step without the profiler" if run.kind.diagnosed else "phase"
        parts = [_phase(name, found[name], found[name] / whole) for name in ordered]
        yield Breakdown("", of, "time", parts, on=UNASKED)
        if not run.kind.diagnosed:
            yield Breakdown("", of, "time", [part for part in parts if part.share >= SMALL], on=Medium.BRIEF)
    yield replace(_rank_table(run), on=UNASKED)


def _phase(name: str, seconds: float, share: float) -> Part:
    return Part(phase_name(name), name, share, units.seconds(seconds), units.percent(share))


def _rank_table(run: RunEvidence) -> Table:
    cells = [
        {
            "rank": str(one.rank),
            "step time": units.seconds(one.step_time),
            "busy": units.seconds(one.busy_time),
            "slowest in": f"{units.percent(one.slowest)} of steps",
        }
        for one in run.summary.ranks
    ]
    return table("Ranks", cells)


def measured(run: RunEvidence) -> str:
    steps = units.counted(sum(window.steps for window in run.windows), "steady step")
    return f"{units.counted(len(run.windows), 'repeat')} with {steps} in all{_how_long(run)}"


def _how_long(run: RunEvidence) -> str:
    """Returns how gpubench chose the number of steps, as the end of a clause; "" if the user has set it."""
    length = run.record.length if run.record else None
    if length is None or not length.reason:
        return ""
    taken = max((window.first + window.steps for window in run.windows), default=0)
    return f", {length.reason} a repeat" if taken >= length.steps else ", all that the program takes"


def caption(run: RunEvidence) -> str:
    steps = sum(window.steps for window in run.windows)
    step_time = run.metrics.get("step_time")
    cut = max((window.first for window in run.windows), default=0)
    effective = (step_time.effective_n if step_time else 0) or 0
    worth = f", worth {effective:.0f} independent ones" if 0 < effective < steps else ""
    counted = f"{measured(run)}{worth}, after at most {units.counted(cut, 'warm-up step')}"
    return f"{counted}; {intervals(len(run.windows))}"


def without_throughput(run: RunEvidence) -> str:
    return "nothing was measured"


def without_metrics(run: RunEvidence) -> str:
    return "no repeat got past its warm-up"
