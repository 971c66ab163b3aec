"""What holds for the page of every kind: nothing from elsewhere, headings in order, and links that lead somewhere."""

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import footprints_made
import profiles_made
import pytest
from browser import PHONE, found_in, needs_browser
from decisions_made import KEPT
from recorded_runs import edit, write_memory_run, write_run
from reports import Page, sound
from test_golden import DOCUMENTS
from test_pipeline_page import write_run as write_pipeline
from test_report_footprint import REPORTS as FOOTPRINTS
from test_report_profile import REPORTS as PROFILES
from test_report_trying import looked, reported, tried
from tunings_made import TUNED

from gpubench.compare.history import Histories, Series, SeriesPoint, histories
from gpubench.registry import PROGRAM
from gpubench.report import after_run, decision, history, index, perfetto, tuning
from gpubench.report.document import Document
from gpubench.report.page import part, render
from gpubench.runs import directory
from gpubench.runs.catalogue import catalogue


def series(workload: str, runs: int, metric: str = "throughput") -> Series:
    """A series whose last run has an interval a hundred times as wide as the differences between the runs."""
    points = [
        SeriesPoint(
            path=f"results/made/run-{n}",
            run_id=f"run-{n}",
            name=None,
            started=f"2026-11-2{n}T09:00:00.000Z",
            commit=None,
            dirty=False,
            estimate=100.0 + n,
            interval=(50.0, 500.0) if n == runs - 1 else (99.0 + n, 101.0 + n),
        )
        for n in range(runs)
    ]
    return Series(workload, metric, "samples/s", "higher", points, [], None, None, None, False, [])


def of_history() -> Document:
    made = [series("tiny", 4), series("tiny", 1, "step_time"), *(series(f"model {n}", 1) for n in range(4))]
    return history.document(Histories(2, 0.95, 0.005, made, []))


KINDS: dict[str, Callable[[], Document]] = {
    **DOCUMENTS,
    **{name: lambda name=name: PROFILES[name] for name in PROFILES},  # type: ignore[misc]
    **{name: lambda name=name: FOOTPRINTS[name] for name in FOOTPRINTS},  # type: ignore[misc]
    "history": of_history,
    "memory-tried": lambda: reported(looked(), tried()),
    "tune": lambda: tuning.document(Path("results/tune-1"), TUNED),
    "judge": lambda: decision.document(KEPT),
}


WIDE = """
  [...document.querySelectorAll("body *")].filter(one => {
    const box = one.getBoundingClientRect(), scrolls = (at) => at && (
      ["auto", "scroll"].includes(getComputedStyle(at).overflowX) || scrolls(at.parentElement));
    return box.width > 0 && Math.floor(box.right) > innerWidth && !scrolls(one.parentElement);
  }).map(one => one.outerHTML.slice(0, 200))
"""
"""The elements that reach beyond the screen, where nothing around them scrolls."""
LINKS = '[...document.querySelectorAll("a[href]")].map(one => new URL(one.getAttribute("href"), document.baseURI).href)'
LOADED = 'performance.getEntriesByType("resource").map(one => one.name)'
OPEN = 'document.querySelectorAll("details").forEach(one => { one.open = true; })'


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A results folder with a page of every kind, each in the place where its command writes it."""
    results = tmp_path_factory.mktemp("pages") / "results"
    pair = [write_run(results, pace=pace, steps=20) for pace in (1.0, 0.5)]
    for path, other, variant in zip(pair, reversed(pair), ("baseline", "workers=2"), strict=True):
        edit(path / directory.RUN, interleaved_with=[other.name], variant=variant)
    made = {
        "program": write_run(results, "program", steps=20),
        "profile": write_run(results, "profile", steps=20),
        "memory": write_memory_run(results, footprints_made.predicted()),
        "pipeline": write_pipeline(results),
    }
    edit(made["program"] / directory.RUN, command=PROGRAM)
    (made["program"] / directory.CONFIG).write_text("program: {command: python train.py --learning-rate 0.1}\n")
    edit(made["profile"] / directory.RUN, command="profile")
    directory.write_document(made["profile"] / directory.PROFILE, profiles_made.profile(2))
    directory.write_document(made["profile"] / directory.FINDINGS, profiles_made.findings())
    trace = made["profile"] / directory.TRACES / "rank0.pt.trace.json"
    trace.parent.mkdir()
    trace.write_text('{"traceEvents": []}')
    (results / directory.HISTORY).touch()
    for path in (*pair, *made.values()):
        after_run.write_up(path)
    found = after_run.judge_pair(pair)
    assert found is not None
    assert after_run.keep_pair(pair, found)
    assert index.refresh(results)
    kept = {
        "tune": (results / "tune-1" / directory.REPORT, tuning.document(results / "tune-1", TUNED)),
        "history": (
            results / directory.HISTORY,
            history.document(histories(catalogue(results)), results / directory.HISTORY),
        ),
    }
    for page, report in kept.values():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render(report))
    alone = {f"{name} alone": results / "alone" / f"{number}.html" for number, name in enumerate(KINDS)}
    (results / "alone").mkdir()
    for page, made_alone in zip(alone.values(), KINDS.values(), strict=True):
        page.write_text(render(made_alone()))
    reports = {name: path / directory.REPORT for name, path in {"training": pair[0], **made}.items()}
    return {
        "index": results / index.INDEX,
        "comparison": pair[1] / directory.COMPARISON_PAGE,
        "trace": perfetto.page_of(trace),
        **{name: page for name, (page, _) in kept.items()},
        **reports,
        **alone,
    }


@needs_browser
def test_in_a_browser_a_page_of_every_kind_fits_on_a_phone_loads_nothing_and_has_no_dead_link(
    pages: dict[str, Path],
) -> None:
    seen = found_in(list(pages.values()), PHONE, f"({OPEN}, [{WIDE}, {LINKS}, {LOADED}])")
    for name, page in pages.items():
        wide, links, loaded = seen[page]
        assert not wide, (name, wide)
        assert not loaded, (name, loaded)
        if name in {f"{kind} alone" for kind in KINDS}:  # the files beside it are of no run
            continue
        own = page.with_name(f"{page.stem}-probed.html").as_uri()
        files = [one.partition("#")[0].replace(own, page.as_uri()) for one in links if one.startswith("file:")]
        dead = [one for one in files if not Path(unquote(urlsplit(one).path)).is_file()]
        assert not dead, (name, dead)
        assert files, name
        assert not [one for one in links if not one.startswith(("file:", "data:", perfetto.VIEWER))]


@pytest.mark.parametrize("name", KINDS)
def test_a_page_of_every_kind_is_sound(name: str) -> None:
    sound(render(KINDS[name]()))


@pytest.mark.parametrize("name", KINDS)
def test_a_page_with_five_sections_lists_them_all(name: str) -> None:
    source = render(KINDS[name]())
    sections = source.count("<h2") - source.count('<h2 class="title"')
    listed = source.partition('aria-label="Contents"')[2].partition("</nav>")[0].count("<a ")
    assert listed == (sections if sections >= 5 and "<ol" not in source else 0)


def test_the_pages_of_all_runs_and_of_a_trace_are_sound(tmp_path: Path) -> None:
    trace = write_run(tmp_path, steps=14) / directory.TRACES / "rank0.pt.trace.json"
    trace.parent.mkdir()
    trace.write_text("{}")
    perfetto.write_pages([trace])
    sound(perfetto.page_of(trace).read_text())
    sound(index.render(tmp_path, catalogue(tmp_path)))


def test_a_series_of_one_run_has_no_chart_and_equal_names_tell_their_metric() -> None:
    source = render(of_history())
    assert source.count('class="drawing"') == 1
    words = Page(source).words.lower()
    assert "tiny: throughput" in words
    assert "tiny: step time" in words


def test_an_interval_does_not_flatten_the_axis_of_a_history() -> None:
    """The runs differ by 3, and take a tenth of the axis or more, although one interval is 450 wide."""
    drawn = render(of_history())
    heights = [float(part.partition('"')[0]) for part in drawn.split(' cy="')[1:]]
    assert max(heights) - min(heights) > history.HEIGHT / 10


def test_a_run_with_an_evaluation_names_it_beside_the_step_that_it_made_long(tmp_path: Path) -> None:
    path = write_run(tmp_path, repeats=1, steps=30)
    lines = (path / directory.STEPS).read_text().splitlines()
    assert '"step":20' in lines[20]
    lines[20] = lines[20].replace('"phases":{', '"phases":{"evaluation":0.5,')
    total = lines[20].partition('"total":')[2].partition(",")[0]
    lines[20] = lines[20].replace(f'"total":{total}', f'"total":{float(total) + 0.5}')
    (path / directory.STEPS).write_text("\n".join(lines) + "\n")
    after_run.write_up(path)
    source = (path / directory.REPORT).read_text()
    chart = source.partition("Step time over steps</span>")[2].partition("</svg>\n")[0]
    assert ">evaluation</text>" in chart
    assert ">forward</text>" not in chart


def luminance(colour: str) -> float:
    """The relative luminance of a colour such as #16191d, by WCAG 2.1."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ink", ["ink", "soft", "faint", "doubt-ink", "a", "b", "synchronisation"])
def test_text_can_be_read_on_its_ground_in_both_themes(ink: str) -> None:
    for theme in part("style.css").split("prefers-color-scheme: dark"):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", theme))
        for ground in ("paper", "sheet"):
            low, high = sorted((luminance(colours[ink]), luminance(colours[ground])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground)
