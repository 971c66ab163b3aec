"""The pages: what they say and in which order, that nothing escapes its place, and that a real browser shows them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from browser import PHONE, browse, needs_browser, probed, width_on_a_phone
from reports import HOSTILE, Page, compare_page, paragraphs

from gpubench.compare.evidence import RunEvidence, Series, Side, open_run
from gpubench.compare.result import (
    ClockEffect,
    Comparability,
    Comparison,
    Comparisons,
    Difference,
    Explanation,
    GateResult,
    Outcome,
    PhaseChange,
    RankChange,
    SideSummary,
    Verdict,
    Waterfall,
)
from gpubench.metrics import DEFINITIONS, Metric
from gpubench.report import run as run_report
from gpubench.report.page import render
from gpubench.runs import stats
from gpubench.runs.directory import RunRecord
from gpubench.runs.steps import SteadyWindow, StepTable
from gpubench.runs.summary import NO_MEASUREMENTS, RankTimes
from gpubench.telemetry import CpuSample, GpuSample, TelemetrySample

SHARES = {"data_wait": 0.05, "forward": 0.3, "backward": 0.5, "optimizer": 0.15}
START = 1_795_260_000.0
WARMUP = 5


@dataclass(frozen=True, kw_only=True)
class Recorded(RunEvidence):
    """A run whose steps and telemetry are at hand."""

    table: StepTable
    samples: Sequence[TelemetrySample] = ()

    def series(self, metric: str) -> list[Series] | None:
        return [self.table.total[self.table.repeat == window.repeat][WARMUP:] for window in self.windows]

    @property
    def steps(self) -> StepTable:
        return self.table

    @property
    def telemetry(self) -> list[TelemetrySample]:
        return list(self.samples)


def table_of(repeats: int, n: int, ranks: int, mean: float) -> StepTable:
    """Steps of `mean` seconds give or take a percent, the first nine times as long; rank 1 is a percent slower."""
    repeat, rank, step = (part.ravel() for part in np.indices((repeats, ranks, n), np.int32))
    rng = np.random.default_rng(20240229)
    total = mean * (1 + 0.01 * rng.standard_normal(len(step)) + 0.01 * rank) * np.where(step == 0, 9, 1)
    time = START + 1000.0 * repeat + step * mean
    phases = {name: total * share for name, share in SHARES.items()}
    columns = {"repeat": repeat, "rank": rank, "step": step, "time": time, "samples": step * 0 + 8}
    return replace(StepTable.of_totals(total), **columns, phases=phases)


def telemetry_of(repeats: int, gpus: int, seconds: float, reason: str) -> list[TelemetrySample]:
    moments = [START + 1000.0 * repeat + seconds * part / 20 for repeat in range(repeats) for part in range(-3, 22)]
    return [
        TelemetrySample(
            time=moment,
            cost=1e-4,
            gpus=[
                GpuSample(index=gpu, sm_clock_mhz=1900 - gpu, power_w=600.5, utilization=0.98, temperature_c=61,
                          memory_used_bytes=31 * 2**30, throttle_reasons=[reason])
                for gpu in range(gpus)
            ],
            cpu=CpuSample(load=0.5, steal=0.0, worker_cpu=1.9, memory_rss_bytes=2**31),
        )
        for moment in moments
    ]  # fmt: skip


def record_of(text: str) -> RunRecord:
    return RunRecord(
        schema_version=1, experiment=text, run_id=text, command="train-bench", argv=["gpubench", text],
        status="completed", started="2026-11-21T11:29:45.391Z", host=text, pid=1, pid_created=1.0,
        git={"commit": text, "branch": text, "dirty": True}, world_size=1, repeats=3,
        error={"kind": text, "message": text, "hint": text},
    )  # fmt: skip


def run_of(
    text: str = "exp-a",
    *,
    mean: float = 0.1,
    repeats: int = 3,
    n: int = 60,
    ranks: int = 1,
    gpus: int = 1,
    **changes: Any,
) -> Recorded:
    """`text` stands wherever a run can have words."""
    table = table_of(repeats, n, ranks, mean)
    estimates = [
        float(table.total[(table.repeat == number) & (table.step >= WARMUP)].mean()) for number in range(repeats)
    ]

    def metric(name: str, values: list[float]) -> Metric:
        known = DEFINITIONS.get(name)
        unit, better = (known.unit, known.better) if known else ("s", "lower")
        interval = stats.student_interval(values)
        distribution = stats.describe([table.total.tolist()]) if name == "step_time" else None
        return Metric(name, unit, better, float(np.mean(values)), interval, repeats * n, 30.0, values, distribution)

    def window(start: float, number: int) -> SteadyWindow:
        return SteadyWindow(number, WARMUP, n - WARMUP, True, start + 9 * mean, start + n * mean)

    metrics = [metric("throughput", [8 / value for value in estimates]), metric("step_time", estimates)]
    metrics += [metric(f"phase_{name}", [value * share for value in estimates]) for name, share in SHARES.items()]
    metrics += [metric(f"phase_{text}", [1e-4] * repeats), metric(text, [0.5] * repeats)]
    metrics += [metric("peak_memory_allocated", [28 * 2.0**30] * repeats)]
    fields: dict[str, Any] = {
        "label": text,
        "path": Path("results", text),
        "record": record_of(text),
        "status": "completed",
        "settings": {"precision": "bf16", f"model.{text}": text},
        "environment": {"torch.version": text, "packages.gpubench": "0.1.0", "gpus": [{"name": text}]},
        "workload": {"task": text},
        "summary": msgspec.structs.replace(
            NO_MEASUREMENTS,
            metrics=metrics,
            steady=[window(START + 1000 * number, number) for number in range(repeats)],
            ranks=[RankTimes(rank, mean, mean, 0.5) for rank in range(ranks)] if ranks > 1 else [],
            throttled={text: 0.3},
            warnings=[text],
        ),
        "problems": [text],
        "table": table,
        "samples": telemetry_of(repeats, gpus, n * mean, text),
    }
    return Recorded(**(fields | changes))


def with_summary(run: Recorded, **changes: Any) -> Recorded:
    return replace(run, summary=msgspec.structs.replace(run.summary, **changes))


def verdict_of(metric: str, outcome: Outcome, ratio: float | None, text: str) -> Verdict:
    return Verdict(
        metric=metric, unit="s", better="lower", verdict=outcome, leaning="slower", baseline=0.1, candidate=0.103,
        ratio=ratio, interval=(ratio * 0.995, ratio * 1.005) if ratio else None, margin=0.005, limit=0.005,
        noise_floor=0.002,
        resolvable=0.01, level="repeat", units=(3, 3), effective_n=(31.0, None), more_repeats=4, method=text,
        reason=text,
    )  # fmt: skip


def comparison_of(text: str = "exp-b", **changes: Any) -> Comparison:
    side = SideSummary(text, [text] * 5, "train-bench", text, "2026-11-21T11:29:45.391Z", 1, 3)
    phases = [
        PhaseChange("backward", 0.05, 0.054, 0.004, (0.003, 0.005)),
        PhaseChange(text, 0.05, 0.049, -0.001, None),
    ]
    fields: dict[str, Any] = {
        "baseline": side,
        "candidate": side,
        "comparability": Comparability(True, False, [text], [Difference(f"model.{text}", "treatment", text, None)]),
        "verdicts": [
            verdict_of("step_time", "slower", 1.031, text),
            verdict_of("peak_memory_allocated", "equivalent", 1.001, text),
            verdict_of("energy_per_sample", "inconclusive", 1.01, text),
            verdict_of("warmup_time", "withheld", 1.4, text),
            verdict_of("first_step_time", "rejected", 0.5, text),
            verdict_of(text, "more", None, text),
            verdict_of("phase_forward", "slower", 1.2, text),
        ],
        "explanation": Explanation(
            Waterfall("step", 0.1, 0.103, phases), [RankChange(3, 0.1, 0.102, 0.002)],
            ClockEffect(1980, 1755, 0.12, 0.0), [text],
        ),
        "warnings": [text],
    }  # fmt: skip
    return Comparison(**(fields | changes))


def comparisons_of(*found: Comparison, text: str = "exp-b") -> Comparisons:
    gate = [
        GateResult(f"step_time>{text}", "step_time", text, 0.02, 0.031, (0.026, 0.036), 0.001, "regressed"),
        GateResult("mfu>2%", "mfu", text, 0.02, None, None, None, "inconclusive"),
    ]
    return Comparisons(2, 0.95, 0.005, list(found), gate, [text])


def run_page(run: RunEvidence, previous: Comparison | None = None, earlier: RunEvidence | None = None) -> str:
    return render(run_report.page(run, previous, earlier))


def hostile_pages() -> dict[str, str]:
    run, found = run_of(HOSTILE), comparison_of(HOSTILE)
    side = Side(HOSTILE, (run,))
    return {
        "compare": compare_page(comparisons_of(found, found, text=HOSTILE), [side, side, side]),
        "compare one": compare_page(comparisons_of(found, text=HOSTILE), [side, side]),
        "run": run_page(run, found, run),
        "log": run_page(foreign(HOSTILE), None, None),
    }


def foreign(text: str) -> Recorded:
    """Another tool's log with one column."""
    run = run_of(text, record=None, settings={}, environment={}, workload={}, samples=(), problems=[])
    named = msgspec.structs.replace(run.metrics["step_time"], name=text)
    return with_summary(run, metrics=[named], warnings=[])


@pytest.mark.parametrize("kind", ["compare", "compare one", "run", "log"])
def test_hostile_text_is_shown_and_not_obeyed(kind: str) -> None:
    page = Page(hostile_pages()[kind])
    assert {"img", "iframe", "object"}.isdisjoint(page.tags)
    assert page.tags.count("script") == 1  # its own, which copies commands
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.tags.count("style") == 1
    assert HOSTILE in page.words


@pytest.mark.parametrize("kind", ["compare", "run"])
def test_a_page_asks_nothing_of_the_network(kind: str) -> None:
    source = hostile_pages()[kind]
    page = Page(source)
    links = [value for name, value in page.attributes if name in ("href", "src", "xlink:href", "action", "data")]
    assert all(link.startswith(("#", "data:,", "../")) for link in links)
    assert not re.search(r"url\(|@import", source)
    assert ("http-equiv", "Content-Security-Policy") in page.attributes


def test_every_number_of_every_drawing_is_finite() -> None:
    for source in hostile_pages().values():
        drawings = re.findall(r"<svg.*?</svg>", source, re.DOTALL)
        assert drawings
        values = [
            value for drawing in drawings for value in re.findall(r' (?:x\d?|y\d?|d|width|height|r)="([^"]*)"', drawing)
        ]
        assert not [value for value in values if re.search(r"nan|inf|None", value)]


def test_every_drawing_says_in_words_what_it_shows() -> None:
    source = compare_page(comparisons_of(comparison_of()), [Side("a", (run_of(),)), Side("b", (run_of("exp-b"),))])
    for drawing in re.findall(r'<svg class="drawing".*?<desc>.*?</desc>', source, re.DOTALL):
        assert re.search(r"<title>\w.*</title><desc>\w.*</desc>", drawing)


def test_a_comparison_speaks_in_order_from_the_verdict_to_how_it_was_made() -> None:
    sides = [Side("exp-a", (run_of(ranks=2, gpus=2),)), Side("exp-b", (run_of("exp-b", mean=0.103),))]
    words = Page(compare_page(comparisons_of(comparison_of()), sides)).words
    order = [
        "exp-b is 3.1 % slower than exp-b in step time",
        "Gate",
        "Can these be compared?",
        "model.exp-b",
        "Verdicts",
        "Ratio of each metric",
        "about 4 more repeats a side should settle a change of this size",
        "What explains it",
        "Where the change of a step's time comes from",
        "Warnings",
        "Step time over steps",
        "Distribution of step time over the steady steps",
        "SM clock",
        "Clocks throttled",
        "Peak memory",
        "How the verdicts were made",
        "Written by gpubench",
    ]
    places = [words.find(part, 100 if part != order[0] else 0) for part in order]
    assert -1 not in places
    assert places == sorted(places)


def test_several_candidates_have_an_index_that_leads_to_each() -> None:
    sides = [Side("exp-a", (run_of(),)), Side("exp-b", (run_of("exp-b"),)), Side("exp-c", (run_of("exp-c"),))]
    page = Page(compare_page(comparisons_of(comparison_of("exp-b"), comparison_of("exp-c")), sides))
    links = {value for name, value in page.attributes if name == "href" and value.startswith("#")}
    assert links == {"#candidate-1", "#candidate-2"} == {f"#{value}" for name, value in page.attributes if name == "id"}
    assert "2 candidates against" in page.words


def test_established_and_doubtful_verdicts_differ_in_shape_and_word() -> None:
    source = compare_page(comparisons_of(comparison_of()), [Side("a", (run_of(),)), Side("b", (run_of(),))])
    for kind, word in [("established", "slower"), ("equivalent", "equivalent"), ("inconclusive", "inconclusive"),
                       ("withheld", "withheld"), ("rejected", "rejected")]:  # fmt: skip
        assert re.search(rf'class="verdict {kind}"><span aria-hidden="true">.</span>{word}</span>', source)


def test_a_run_page_begins_with_how_it_compares_with_the_previous_one() -> None:
    page = Page(run_page(run_of("run 2"), comparison_of(), run_of("run #1?")))
    assert ("href", "../run%20%231%3F/report.html") in page.attributes
    words = page.words
    order = ["What changed since", "This run is 3.1 % slower than the previous run in step time",
             "Phases of a step", "Step time over steps", "Metrics", "Settings", "Environment"]  # fmt: skip
    places = [words.find(part) for part in order]
    assert -1 not in places
    assert places == sorted(places)


def test_the_first_run_of_an_experiment_says_so() -> None:
    assert "Experiment exp-a has no earlier run of this work" in Page(run_page(run_of(), None, None)).words


def bare(**changes: Any) -> Recorded:
    empty: dict[str, Any] = {
        "settings": {},
        "environment": {},
        "workload": {},
        "samples": (),
        "problems": [],
    }
    return with_summary(run_of(**(empty | {"table": table_of(0, 0, 1, 1.0)} | changes)), warnings=[])


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(bare(), id="nothing but a summary"),
        pytest.param(bare(summary=NO_MEASUREMENTS), id="nothing at all"),
        pytest.param(with_summary(run_of(), steady=[]), id="no steady window"),
        pytest.param(run_of(repeats=1, n=6), id="one steady step"),
        pytest.param(run_of(samples=telemetry_of(1, 0, 1.0, "")), id="no GPU"),
        pytest.param(run_of(samples=[TelemetrySample(time=START, cost=0.0)]), id="an empty sample"),
        pytest.param(run_of(ranks=2, gpus=2), id="two ranks"),
        pytest.param(run_of(record=None), id="a log of another tool"),
        pytest.param(foreign("step_ms"), id="one column"),
    ],
)
def test_what_was_not_recorded_is_left_out_or_said_to_be_missing(run: Recorded) -> None:
    Page(run_page(run, None, None))
    nothing = comparison_of(verdicts=[], explanation=Explanation(None, [], None, []), warnings=[])
    words = Page(compare_page(comparisons_of(nothing), [Side("a", (run,)), Side("b", (run_of(),))])).words
    assert "The sides have no metric in common" in words
    assert "Phases of a step are not recorded on both sides" in words
    if not len(run.table):
        assert "Steps are not recorded" in Page(run_page(run, None, None)).words


def test_only_the_first_repeats_of_a_large_group_are_read_and_drawn() -> None:
    class Unread(Recorded):
        @property
        def steps(self) -> StepTable:
            raise AssertionError("read for nothing")

    runs = [run_of(f"run-{number}") for number in range(2)]
    more = Unread(**vars(run_of("run-9")))
    words = Page(
        compare_page(comparisons_of(comparison_of()), [Side("a", (*runs, more)), Side("b", (run_of("b"),))])
    ).words
    assert "Only the first 6 repeats of a side are drawn" in words


def test_telemetry_is_averaged_over_the_same_steady_steps_on_both_pages() -> None:
    def warming(text: str) -> Recorded:
        """The clock is at 100 MHz until the warm-up is over."""
        run = run_of(text, mean=0.1)
        samples = [
            msgspec.structs.replace(sample, gpus=[msgspec.structs.replace(sample.gpus[0], sm_clock_mhz=clock)])
            for sample in run.samples
            for window in run.windows[int(sample.time - START) // 900 :][:1]
            for clock in [100 if sample.time < window.start else 1900]
        ]
        return replace(run, samples=samples)

    sides = [Side("a", (warming("a"),)), Side("b", (warming("b"),))]
    compared = Page(compare_page(comparisons_of(comparison_of()), sides)).words
    alone = Page(run_page(warming("a"), None, None)).words
    assert "On average over the steady steps: A 1,900 MHz, B 1,900 MHz." in compared
    assert "On average over the steady steps: 1,900 MHz." in alone


def test_a_column_of_another_tool_keeps_its_name_and_one_step_is_one() -> None:
    words = Page(run_page(foreign("step_ms"), None, None)).words
    assert "Distribution of step ms over the steady steps" in words
    assert "1 of 60 steps lies beyond the axis" in Page(run_page(run_of(repeats=1), None, None)).words


def test_the_gate_says_in_words_which_way_a_metric_went_and_why_nothing_is_concluded() -> None:
    gate = [
        GateResult("throughput>2%", "throughput", "exp-b", 0.02, 0.45, (0.43, 0.47), 1e-9, "regressed"),
        GateResult("mfu>2%", "mfu", "exp-b", 4.47, -0.81, (-0.83, -0.79), None, "inconclusive", "rejected, B: <b>"),
    ]
    found = msgspec.structs.replace(comparisons_of(comparison_of()), gate=gate)
    words = Page(compare_page(found, [Side("a", (run_of(),)), Side("b", (run_of(),))])).words
    places = [
        words.index(said)
        for said in ("worse by 45.0 % [43.0, 47.0]", "better by 81.0 % [79.0, 83.0]", "5.5 x", "rejected, B: <b>")
    ]
    assert places == sorted(places)


def test_a_million_steps_make_a_page_of_ordinary_size() -> None:
    long, short = run_of(repeats=1, n=1_000_000), run_of("exp-b")
    assert len(compare_page(comparisons_of(comparison_of()), [Side("a", (long,)), Side("b", (short,))])) < 400_000


def test_the_page_of_all_runs_is_written_when_a_run_ends(finished_run: Path) -> None:
    assert f"{finished_run.name}/report.html" in (finished_run.parents[1] / "index.html").read_text()


def test_a_real_run_directory_has_its_page(finished_run: Path) -> None:
    words = Page(run_page(open_run(finished_run), None, None)).words
    assert "Step time over steps" in words
    assert "completed" in words
    assert "gpt2-tiny" in words
    assert "counted by torch.utils.flop_counter.FlopCounterMode" in words


@needs_browser
@pytest.mark.parametrize("kind", ["compare", "run"])
def test_a_browser_shows_the_page_without_complaint(tmp_path: Path, kind: str) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    source = hostile_pages()[kind]
    measured = (
        "for (const s of document.querySelectorAll('svg.drawing')) { const b = s.getBoundingClientRect();"
        " s.setAttribute('data-size', `${Math.round(b.width)}x${Math.round(b.height)}`); }"
        " document.body.dataset.wide = document.documentElement.scrollWidth;"
    )
    page.write_text(probed(source, measured))
    done = browse(page, "--window-size=600,2000", "--dump-dom")
    assert "CONSOLE" not in done.stderr
    sizes = re.findall(r'data-size="(\d+)x(\d+)"', done.stdout)
    assert len(sizes) == source.count('class="drawing"') > 5
    assert all(int(width) > 200 and int(height) > 40 for width, height in sizes)
    wide = re.search(r'data-wide="(\d+)"', done.stdout)
    assert wide
    assert int(wide[1]) <= 600, "the page has to be scrolled sideways"

    browse(page, "--window-size=600,2000", f"--screenshot={picture}")
    assert picture.stat().st_size > 20_000


@needs_browser
@pytest.mark.parametrize("kind", ["compare", "run"])
def test_a_phone_shows_the_page_without_scrolling_sideways(tmp_path: Path, kind: str) -> None:
    assert width_on_a_phone(hostile_pages()[kind], tmp_path) <= PHONE


def test_a_run_without_known_samples_says_how_it_gets_a_throughput() -> None:
    known = run_of("a")
    metrics = [metric for metric in known.summary.metrics if metric.name != "throughput"]
    unknown = replace(known, summary=msgspec.structs.replace(known.summary, metrics=metrics))
    assert run_report.UNKNOWN_SAMPLES in paragraphs(run_report.blocks(unknown))
    assert run_report.UNKNOWN_SAMPLES not in paragraphs(run_report.blocks(known))
