"""The results of the GPU suite as Markdown."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import bars
import memory_check
import profiled
from gpu_results import Result
from tables import table

HEAD = (
    *("job", "throughput", "step", "MFU", "of measured peak", "J/sample", "peak memory", "hand-off", "bit-identical"),
    *("reference", "ratio", "note"),
)


def summary(results: Sequence[Result], device: str) -> str:
    """Return Markdown: verdicts; one row per run, or per job without runs and verdicts; sources and warnings."""
    judged = [result for result in results if result.verdicts]
    lines = [*judged_jobs(judged, device), ""] if judged else []
    others = [row for result in results if not result.verdicts for row in rows_of(result)]
    lines += [table([HEAD, *others])] if others else []
    lines += below(profiled.HEAD, profiled_rows(results))
    lines += below(memory_check.HEAD, [memory_check.row(one.name, one.memory) for one in results if one.memory])
    sources = {result.reference.source for result in results if result.reference}
    lines += ["", *(f"Reference: {source}." for source in sorted(sources))] if sources else []
    said = [f"- {result.name}: {warning}" for result in results for run in result.runs for warning in run.warnings]
    lines += ["", "Warnings:", "", *said] if said else []
    return "\n".join(lines) + "\n"


def judged_jobs(results: Sequence[Result], device: str) -> Iterator[str]:
    """Yield whether gpubench is right on the device, then the verdicts, the worst first, and what each job took."""
    verdicts = [(result, bar) for result in results for bar in result.verdicts]
    yield answer([bar.verdict for _, bar in verdicts], device)
    yield ""
    ranked = sorted(verdicts, key=lambda one: bars.WORST_FIRST.index(one[1].verdict))
    rows = [(bar.verdict, result.name, bar.what, bar.figure, bar.bar) for result, bar in ranked]
    yield table([("verdict", "job", "what", "figure", "bar"), *rows])
    yield ""
    taken = [
        (one.name, f"{one.planned:.0f} s", f"{one.seconds:.0f} s", bars.counted([bar.verdict for bar in one.verdicts]))
        for one in results
    ]
    total = ("all", f"{sum(one.planned for one in results):.0f} s", f"{sum(one.seconds for one in results):.0f} s", "")
    yield table([("job", "planned", "used", "verdicts"), *taken, total])


def answer(verdicts: Sequence[str], device: str) -> str:
    """Return one sentence, such as "gpubench is right on NVIDIA H200: 31 met, 2 skipped."."""
    counts, told = Counter(verdicts), bars.counted(verdicts)
    if counts[bars.MISSED]:
        return f"gpubench is wrong on {device} in {counts[bars.MISSED]} of {len(verdicts)} checks: {told}."
    if not counts[bars.MET]:
        return f"gpubench was not checked on {device}: {told}."
    open_ones = len(verdicts) - counts[bars.MET] - counts[bars.SKIPPED]
    left = f", but {open_ones} of {len(verdicts)} checks are open" if open_ones else ""
    return f"gpubench is right on {device}{left}: {told}."


def profiled_rows(results: Sequence[Result]) -> list[list[str]]:
    return [profiled.row(result.name, run.profiled) for result in results for run in result.runs if run.profiled]


def below(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table, if it has rows."""
    if not rows:
        return []
    return ["", table([head, *rows])]


def rows_of(result: Result) -> Iterator[list[str]]:
    status = "" if result.status == "completed" else result.status
    note = ": ".join(part for part in (status, result.note) if part)
    for number, metrics in enumerate([run.metrics for run in result.runs] or [{}]):
        cells = Cells(metrics)
        reference = result.reference if number == 0 else None
        throughput = cells.estimate("throughput")
        yield [
            result.name if number == 0 else f"{result.name} ({number + 1})",
            cells.throughput(),
            cells.show("step_time", 1e3, "{:.2f} ms") or cells.show("evaluation_time", 1e3, "{:.2f} ms"),
            cells.show("mfu", 100, "{:.1f} %"),
            cells.show("mfu_of_measured_peak", 100, "{:.1f} %"),
            cells.show("energy_per_sample", 1, "{:.4g}"),
            cells.show("peak_memory_allocated", 1 / 2**30, "{:.2f} GiB"),
            cells.show("handover_time", 1e6, "{:.0f} us") + cells.show("handover_bytes", 1, ", {:,.0f} B"),
            cells.show("verified_samples", 100, "{:.0f} %"),
            f"{reference.throughput:,.0f}" if reference else "",
            f"{throughput / reference.throughput:.3f}" if reference and throughput else "",
            note,
        ]


@dataclass(frozen=True)
class Cells:
    """Return the metrics of one run as text; empty for an absent metric."""

    metrics: dict[str, dict[str, Any]]

    def estimate(self, name: str) -> float | None:
        metric = self.metrics.get(name)
        return None if metric is None else float(metric["estimate"])

    def show(self, name: str, scale: float, form: str) -> str:
        value = self.estimate(name)
        return "" if value is None else form.format(value * scale)

    def throughput(self) -> str:
        metric = self.metrics.get("throughput")
        if metric is None:
            return ""
        text = f"{metric['estimate']:,.1f}"
        if interval := metric["interval"]:
            text += f" ± {(interval[1] - interval[0]) / 2:,.1f}"
        return f"{text} {metric['unit']}"
