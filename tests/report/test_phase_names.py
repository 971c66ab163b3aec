"""The names that a program gives its regions, through all that is written, read and shown of a run."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded_runs import write_run
from reports import harmless

from gpubench import events
from gpubench.compare.evidence import open_run
from gpubench.probe.measured import MeasuredStep
from gpubench.probe.timeline import LONGEST_NAME, Regions, Timeline
from gpubench.report import run as report
from gpubench.runs.reader import Run
from gpubench.runs.summary import to_csv
from gpubench.text import words

NAMES = [
    'load "train" batch', "C:\\data\\new", "[bold red]not[/] \\[markup]", "a|b`c`*d*_e_", "<script>alert(1)</script>",
    "=1+1", "@cmd", "🙂 表 é", "{{ 7 }} %s {0}", "a,b;c'd", "x" * 100, " ", "\u202eright to left", "phase_forward",
]  # fmt: skip


def named(name: str) -> dict[str, Any]:
    return {"phases": {"forward": 0.006, name: 0.003, "other": 0.001}, "total": 0.010}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_rank_may_send_is_written_and_read_as_it_is(tmp_path: Path, name: str) -> None:
    step = events.Step(0, 0, 0, 0, 1.0, host=0.0, samples=1, **named(name))
    event = events.decode_of(0, events.encode(events.StepsMeasured(rank=0, steps=[step])))
    assert isinstance(event, events.StepsMeasured)
    (sent,) = event.steps
    run = Run.open(write_run(tmp_path, phases=sent.phases, total=sent.total))
    assert run.steps.phases[name].tolist() == [0.003] * 60
    assert run.steps.phases["forward"].tolist() == [0.006] * 60
    assert run.problems == []


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_sends_the_times_of_phases_of_any_name(name: str) -> None:
    phases = {name: 3_000_000, "other": 1}
    found = json.loads(MeasuredStep(0, 0, 0, 0, 3_000_001, phases, 0, 1, None, None, False).json())
    assert (found["phases"], found["total"]) == ({name: 0.003, "other": 1e-9}, 3_000_001e-9)


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "\0", "\t", "x" * 101, "x" * 10_000])
def test_what_no_rank_may_send_is_refused_by_the_reader_too(tmp_path: Path, name: str) -> None:
    step = events.Step(0, 0, 0, 0, 1.0, host=0.0, samples=1, **named(name))
    with pytest.raises(msgspec.ValidationError):
        events.decode_of(0, events.encode(events.StepsMeasured(rank=0, steps=[step])))
    run = Run.open(write_run(tmp_path, repeats=1, steps=3, **named(name)))
    assert len(run.steps) == 0
    assert len(run.problems) == 3


def test_plain_and_other_names_in_one_file_are_read_alike(tmp_path: Path) -> None:
    run = write_run(tmp_path, repeats=1, steps=3, **named("plain"))
    lines = (run / "steps.jsonl").read_text()
    odd = [json.loads(line) | {"repeat": 1} | named(NAMES[0]) for line in lines.splitlines()]
    odd[0]["loss"], odd[1]["starved"], odd[2]["skipped"] = None, True, True
    (run / "steps.jsonl").write_text(lines + "".join(json.dumps(one) + "\n" for one in odd) + '{"repeat":0.5}\n')
    found = Run.open(run)
    steps = found.steps
    assert steps.phases["plain"].tolist() == [0.003] * 3 + [0.0] * 3
    assert steps.phases[NAMES[0]].tolist() == [0.0] * 3 + [0.003] * 3
    assert [str(one) for one in steps.loss[3:]][:1] == ["nan"]
    assert steps.starved[4] == 1
    assert steps.skipped.tolist() == [False] * 5 + [True]
    assert len(found.problems) == 1


def test_a_region_of_any_name_becomes_a_phase_that_a_rank_may_send() -> None:
    class Region:
        def __init__(self, name: Any) -> None:
            self.name = name

    timeline = Timeline()
    regions = Regions(lambda: timeline)
    given = [*NAMES[:11], "a\nb\tc", "\ud800lone", "y" * 10_000]
    for name in given:
        regions._phase(Region(name), timeline)
    timeline.ended += 1
    found = [regions._phase(Region(name), timeline) for name in given]
    assert all(found)
    assert max(map(len, map(str, found))) == LONGEST_NAME
    step = events.Step(0, 0, 0, 0, 1.0, host=0.0, samples=1, total=1.0, phases=dict.fromkeys(map(str, found), 0.1))
    assert events.decode_of(0, events.encode(events.StepsMeasured(rank=0, steps=[step])))


def test_names_are_shown_in_every_place_and_obeyed_in_none(tmp_path: Path, command_line: Any) -> None:
    phases = dict.fromkeys(NAMES[:11], 0.001) | {"other": 0.001}
    paths = [
        write_run(tmp_path, experiment, pace=pace, phases=phases, total=0.012)
        for experiment, pace in (("a", 1.0), ("b", 1.1))
    ]
    shown = command_line("runs", "show", str(paths[0]), "-v")
    assert shown.code == 0, shown.stderr
    for name in NAMES[:10]:
        assert words(name)[:12] in shown.stdout, name
    media = {
        form: command_line("compare", *map(str, paths), "--metric", f"phase_{NAMES[0]}", "--format", form)
        for form in ("terminal", "markdown", "csv", "json", "html")
    }
    for form, done in media.items():
        assert done.code == 0, (form, done.stderr)
        assert "train" in done.stdout, form
    assert json.loads(media["json"].stdout)["comparisons"][0]["verdicts"][0]["metric"] == f"phase_{NAMES[0]}"
    assert next(csv.DictReader(io.StringIO(media["csv"].stdout)))["metric"] == f"phase_{NAMES[0]}"
    summary = Run.open(paths[0]).summary
    assert summary
    table = csv.DictReader(io.StringIO(to_csv(summary.metrics)))
    assert {f"phase_{name}" for name in phases} <= {row["name"] for row in table}
    harmless(report.document(paths, None), at_least=0)
    harmless(report.page(open_run(paths[0])), at_least=0)
