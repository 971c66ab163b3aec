"""The page of a pipeline's run directory: what it draws, and what becomes of one that is not whole."""

import base64
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from PIL import Image
from piped import Line, sequential, verified
from reports import HOSTILE
from test_page import run_page

from gpubench.compare.compare import compare
from gpubench.compare.evidence import Side, open_run
from gpubench.events import Span
from gpubench.kinds.pipeline import gantt, images
from gpubench.kinds.pipeline.repeats import PipeRepeat
from gpubench.kinds.pipeline.results import summarise
from gpubench.report.after_run import write_up
from gpubench.runs.directory import (
    COMPLETED,
    ENVIRONMENT,
    IMAGE,
    REPORT,
    SCHEMA_VERSION,
    SUMMARY,
    TIMELINE,
    RunWriter,
    sample_file,
)
from gpubench.runs.stages import PARTS

LINE = Line((4, 4, 6), micro_batches=5, jitter=0.02, transfer=0.01, decode=0.05)


def write_run(results: Path, line: Line = LINE, change: Callable[[PipeRepeat], None] = lambda repeat: None) -> Path:
    writer = RunWriter(
        results,
        "made",
        "experiment: made\nprecision: fp32\n",
        command="pipe-infer",
        argv=["gpubench", "pipe-infer"],
        world_size=len(line.counts),
        git=None,
    )
    writer.replace(ENVIRONMENT, {"host": {"name": "here"}})
    repeats = [line.repeat(number) for number in range(2)]
    for repeat in repeats:
        repeat.baselines.append(sequential(line, repeat.number))
        repeat.verified = verified(line, repeat.number)
        change(repeat)
        for span in repeat.spans:
            writer.append(TIMELINE, span)
    summary = summarise(repeats, line.samples)
    writer.replace(SUMMARY, {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(summary)})
    writer.finish(COMPLETED)
    return writer.path


def page_of(path: Path) -> str:
    return run_page(open_run(path), None, None)


def test_every_rank_has_a_row_of_boxes_with_its_samples(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path))
    assert "What each rank did in repeat 1" in page
    assert len(re.findall(r'<rect class="box sample-\d"', page)) == 3 * 5
    assert re.search(r"<title>rank 2, sample 3, evaluations 8 to 13, [\d.]+ ms</title>", page)
    assert re.search(r"<title>rank 1, recv wait of sample 0, [\d.]+ ms</title>", page)


def test_the_page_says_who_did_what_and_whether_it_was_worth_it(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path))
    for expected in (
        "14 evaluations over 3 ranks, 4 + 4 + 6",
        "Rank 2 is the bottleneck: it takes ",
        "Where each rank&#39;s time went",
        "Replicas, each with the whole model, were not measured",
        "one of these ranks alone",
        "A hand-off is 8.44 KiB",
        "5 of 5 samples are bit-identical to a loop of single-process diffusers",
        "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9",
    ):
        assert expected in page, expected


def test_a_phone_shows_no_number_that_is_wider_than_its_box(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, Line((4, 4), micro_batches=24)))
    shown = re.findall(r'<text class="inside middle( on-desk)?"[^>]*>(\d+)<', page)
    assert {number for desk, number in shown if desk} == {str(number) for number in range(10, 24)}
    assert {number for desk, number in shown if not desk} == {str(number) for number in range(10)}


def test_the_time_of_a_rank_is_a_bar_of_its_parts_in_the_colours_that_they_have_everywhere(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path))
    drawn = page[page.index("<title>Where each rank&#39;s time went</title>") :].split("</svg>")[0]
    ends = re.findall(r'class="(?:box )?hue-(\w+)" x="([\d.]+)%" y="[\d.]+" width="([\d.]+)%"', drawn)
    assert [part for part, _, _ in ends] == [*PARTS] * len(LINE.counts)
    assert [float(x) + float(width) for part, x, width in ends if part == "idle"] == pytest.approx([100] * 3, abs=0.02)
    assert 'swatch hue-recv_wait"></span>recv wait' in page


def test_steps_are_not_missed_where_there_are_none(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    run = open_run(path)
    page = run_page(run, None, None)
    assert run.problems == []
    assert "Steps are not recorded" not in page
    assert run.series("throughput") is None


def test_two_runs_of_a_pipeline_can_be_compared(tmp_path: Path) -> None:
    runs = [open_run(write_run(tmp_path)) for _ in range(2)]
    found = compare([Side(run.label, (run,)) for run in runs])
    assert {"throughput", "makespan"} <= {verdict.metric for verdict in found.comparisons[0].verdicts}
    assert [run.problems for run in runs] == [[], []]


def test_a_finished_run_is_written_up(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    write_up(path)
    assert '<h2 id="pipeline">Pipeline</h2>' in (path / REPORT).read_text()


def test_a_lost_timeline_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (path / TIMELINE).unlink()
    page = page_of(path)
    assert "No timeline is recorded" in page
    assert "Where each rank&#39;s time went" in page


def test_names_from_a_run_cannot_leave_their_place(tmp_path: Path) -> None:
    def rename(repeat: PipeRepeat) -> None:
        for rank, built in repeat.built.items():
            hostile = "</p><script>alert(1)</script>"
            repeat.built[rank] = msgspec.structs.replace(built, model=hostile, scheduler=hostile, carried=[hostile])

    assert page_of(write_run(tmp_path, change=rename)).count("<script") == 1  # its own


def span(rank: int, sample: int, step: int, time: float) -> Span:
    return Span(0, rank, "evaluate", sample, time, 1.0, step)


def test_evaluations_of_one_sample_are_one_box() -> None:
    found = gantt.joined_bars([span(0, 0, 0, 0.0), span(1, 7, 5, 0.5), span(0, 0, 1, 1.0), span(0, 1, 0, 2.0)])
    assert [(bar.rank, bar.sample, bar.start, bar.end, bar.first, bar.last) for bar in found] == [
        (0, 0, 0.0, 2.0, 0, 1),
        (1, 7, 0.5, 1.5, 5, 5),
        (0, 1, 2.0, 3.0, 0, 0),
    ]


def test_a_wait_told_amid_the_work_does_not_cut_its_box() -> None:
    found = gantt.joined_bars([span(0, 0, 0, 0.0), Span(0, 0, "send_wait", 3, 0.5, 0.1), span(0, 0, 1, 1.0)])
    assert [(bar.part, bar.sample, bar.end) for bar in found] == [("compute", 0, 2.0), ("send_wait", 3, 0.6)]


def test_a_long_run_draws_no_more_than_a_browser_can_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gantt, "MOST_BARS", 10)
    page = page_of(write_run(tmp_path))
    assert len(re.findall(r'<rect class="(?:box sample-\d|wait)"', page)) == 10
    assert re.search(r"Only the first 10 of \d+ are drawn", page)


def test_nothing_to_draw_is_no_drawing() -> None:
    assert gantt.drawing([], 3) is None
    assert gantt.drawing(gantt.joined_bars([span(9, 0, 0, 0.0)]), 3) is None
    assert gantt.shares([]) is None


def test_only_intact_images_that_the_run_lists_are_on_its_page(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    names = [sample_file(number, IMAGE) for number in range(6)]
    Image.new("RGB", (512, 300), "red").save(tmp_path / names[0])
    whole = (tmp_path / names[0]).read_bytes()
    (tmp_path / names[1]).write_bytes(b"<svg onload=alert(1)>")
    (tmp_path / names[2]).write_bytes(whole[: len(whole) // 2])
    (tmp_path / names[3]).symlink_to(tmp_path / names[0])
    (tmp_path / names[4]).write_bytes(whole[:16] + (2**20).to_bytes(4, "big") * 2 + whole[24:])
    (tmp_path / names[5]).write_bytes(whole)  # not listed
    samples = [
        SimpleNamespace(sample=number, seed=7, image=name, prompt=HOSTILE) for number, name in enumerate(names[:5])
    ]
    samples.append(SimpleNamespace(sample=5, seed=7, image="../../etc/passwd", prompt=""))
    run: Any = SimpleNamespace(path=tmp_path, files=SimpleNamespace(samples=samples))
    (figure,) = images.of_samples(run)
    assert figure.title == "sample 0, seed 7"
    source = re.findall(r'<img src="data:image/png;base64,([^"]*)" alt="[^"]*">', figure.drawing)
    with Image.open(io.BytesIO(base64.b64decode(source[0]))) as copy:
        assert copy.size == (256, 150)
        assert copy.info == {}
