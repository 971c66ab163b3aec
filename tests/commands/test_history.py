"""`gpubench history`: which runs are one series, what changed at a change point, the gate, and the page."""

import json
import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cli import complaint
from recorded_runs import edit, write_run
from reports import on_terminal
from running import Finished

from gpubench.compare import gate
from gpubench.compare.history import Histories, histories
from gpubench.errors import UsageError
from gpubench.report import history as report
from gpubench.report import listing, quoted
from gpubench.report.page import render
from gpubench.runs import entries
from gpubench.runs.entries import Entry, EntryFigure, Recorded

CommandLine = Callable[..., Finished]
SETTINGS: dict[str, Any] = {
    "model.name": "gpt2",
    "precision": "fp32",
    "device": "cpu",
    "training.batch_size": 8,
    "measurement.repeats": 3,
}
OLD, NEW = "a" * 40, "b" * 40


def entry(number: int, throughput: float, *, reference: float | None = None, **settings: Any) -> Entry:
    """The run of that number, of which there is one every six hours."""
    started = datetime(2026, 10, 1) + timedelta(hours=6 * number)
    commit, host = settings.pop("commit", OLD), settings.pop("host", "here")
    left_open, variables = settings.pop("left_open", ()), settings.pop("variables", {})
    metrics = {
        "throughput": EntryFigure(throughput, 0.99 * throughput, 1.01 * throughput, "samples/s", "higher"),
        "final_loss": EntryFigure(1 / throughput, None, None, "", None),
    }
    known = {key: value for key, value in (SETTINGS | settings).items() if value is not None}
    record = Recorded(
        experiment="made",
        run_id=f"{started:%Y%m%d-%H%M%S}-000-{number:04x}",
        command="train-bench",
        argv=[],
        status="completed",
        started=f"{started:%Y-%m-%dT%H:%M:%S}.000Z",
        ended=None,
        host=host,
        git={"commit": commit, "dirty": False},
        world_size=1,
        pid=1,
        pid_created=0.0,
        error=None,
    )
    return Entry(
        folder=f"results/made/{record.run_id}",
        part_of=None,
        record=record,
        name=None,
        tags=(),
        model="gpt2",
        variant="",
        others=(),
        compared=None,
        device="EPYC",
        measured=True,
        reference=reference,
        problem=None,
        packed=msgspec.msgpack.encode(entries._Details(metrics, known, {}, list(left_open), variables)),
    )


def levels(*parts: tuple[int, float], noise: float = 0.003) -> list[float]:
    """Throughputs around one level after the other."""
    exact = np.concatenate([np.full(count, level) for count, level in parts])
    return [float(one) for one in exact * np.exp(noise * np.random.default_rng(2).standard_normal(len(exact)))]


def runs(values: Sequence[float], **options: Any) -> list[Entry]:
    return [entry(number, value, **options) for number, value in enumerate(values)]


def points(found: Histories) -> list[int]:
    return [len(one.points) for one in found.series]


def test_runs_of_other_work_are_other_series() -> None:
    kinds: list[dict[str, Any]] = [{}, {"model.name": "bert"}, {"training.batch_size": 16}, {"device": "cuda"}]
    found = histories([entry(number, 100.0, **kinds[number % 4]) for number in range(12)])
    assert points(found) == [3, 3, 3, 3]
    assert len({one.workload for one in found.series}) == 4


def test_a_setting_that_an_older_gpubench_did_not_have_makes_no_other_series() -> None:
    values = levels((6, 100.0), (6, 100.0))
    made = [entry(number, value, inference=None if number < 6 else False) for number, value in enumerate(values)]
    assert points(histories(made)) == [12]


def test_what_the_code_changed_once_is_part_of_the_series() -> None:
    values = levels((8, 100.0), (8, 150.0))
    made = [
        entry(
            number,
            value,
            precision="fp32" if number < 8 else "bf16",
            left_open=["precision"],
            commit=OLD if number < 8 else NEW,
        )
        for number, value in enumerate(values)
    ]
    (one,) = histories(made).series
    assert [change.index for change in one.changes] == [8]
    assert 1.45 < one.changes[0].interval[0] < one.changes[0].ratio < one.changes[0].interval[1] < 1.55
    assert one.changes[0].outcome == "better"
    assert not one.varied


SAME = dict[str, Any]()
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "asked for otherwise": ({"precision": "fp32"}, {"precision": "bf16"}, ["precision=bf16"]),
    "another value with the same code": (
        {"precision": "fp32", "left_open": ["precision"]},
        {"precision": "bf16", "left_open": ["precision"]},
        ["precision=bf16"],
    ),
    "a variable of the environment": (SAME, {"variables": {"OMP_NUM_THREADS": "1"}}, ["OMP_NUM_THREADS=1"]),
    "another commit, checked out": ({"program.ref": "HEAD"}, {"program.ref": "main", "commit": NEW}, ["main"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_runs_that_were_asked_for_otherwise_are_another_series(name: str) -> None:
    """They are so also where one variant was measured after the other, as if it had taken its place."""
    before, after, varied = OTHERS[name]
    made = [entry(number, 100.0, **dict(before if number < 8 else after)) for number in range(16)]
    found = histories(made)
    assert points(found) == [8, 8]
    assert found.series[0].varied == varied


def test_variants_that_were_measured_once_at_different_times_are_no_series() -> None:
    """Each is followed by runs of the program as it is, so that neither has taken the other's place."""
    threads = {4: 1, 9: 3, 14: 5}
    made = [
        entry(
            number,
            100.0,
            left_open=["performance.cpu_threads"],
            commit=f"{number:040x}",
            **{"performance.cpu_threads": threads.get(number, 2)},
        )
        for number in range(18)
    ]
    assert sorted(points(histories(made))) == [1, 1, 1, 15]


def test_variants_that_are_measured_side_by_side_are_series_of_their_own() -> None:
    made = [
        entry(number, 150.0 if number % 2 else 100.0, precision="bf16" if number % 2 else "fp32")
        for number in range(16)
    ]
    found = histories(made)
    assert points(found) == [8, 8]
    assert sorted(one.varied for one in found.series) == [["precision=bf16"], ["precision=fp32"]]
    assert not any(one.changes for one in found.series)


def test_a_change_on_hosts_that_take_turns_is_found_on_each() -> None:
    """The difference between the hosts, 5 %, would hide one of 3 %."""
    values = levels((20, 100.0), (20, 97.0))
    made = [
        entry(number, value * (1.05 if number % 2 else 1.0), host=f"node{number % 2}")
        for number, value in enumerate(values)
    ]
    found = histories(made, conditions=[gate.parse_condition("throughput>2%")])
    assert sorted(one.varied for one in found.series) == [["node0"], ["node1"]]
    for one in found.series:
        assert [change.index for change in one.changes] == [10]
        assert 0.96 < one.changes[0].ratio < 0.98
    assert {one.outcome for one in found.gate} == {"regressed"}


@pytest.mark.parametrize("each", [1, 2, 16], ids=["other for each run", "other for two runs", "changed once"])
def test_a_host_that_is_replaced_begins_no_series(each: int) -> None:
    values = levels((16, 100.0), (16, 95.0))
    (one,) = histories(
        [entry(number, value, host=f"node{number // each}") for number, value in enumerate(values)]
    ).series
    assert [change.index for change in one.changes] == [16]


def test_a_level_that_wanders_is_named_and_makes_smaller_changes_invisible() -> None:
    still = levels((30, 100.0), noise=0.005)
    along = 1 + 0.01 * np.sin(2 * np.pi / 15 * np.arange(30))
    cycles = [float(one) for one in along * still]
    (steady,), (cycling,) = (histories(runs(values)).series for values in (still, cycles))
    assert not steady.wanders
    assert cycling.wanders
    assert not cycling.changes
    assert steady.visible
    assert cycling.visible
    assert cycling.visible > 2 * steady.visible
    texts = [render(report.document(histories(runs(values)))) for values in (still, cycles)]
    assert ["level wanders" in text for text in texts] == [False, True]


def test_fewer_runs_make_only_larger_changes_visible() -> None:
    few, many = (histories(runs([100.0, 101.0] * (count // 2))).series[0] for count in (6, 40))
    assert few.noise == pytest.approx(many.noise)
    assert few.visible
    assert many.visible
    assert few.visible > 1.5 * many.visible


def test_runs_without_results_do_not_count() -> None:
    made = runs(levels((9, 100.0)))
    made[3] = msgspec.structs.replace(made[3], measured=False)
    made[4] = msgspec.structs.replace(made[4], record=msgspec.structs.replace(made[4].record, status="failed"))
    assert points(histories(made)) == [7]
    assert histories([]).series == []


def test_a_change_that_the_reference_workload_shows_is_the_machines_and_no_regression() -> None:
    values = levels((15, 100.0), (15, 95.0))
    speeds = levels((15, 50.0), (15, 47.5), noise=0.001)
    made = [entry(number, *pair[:1], reference=pair[1]) for number, pair in enumerate(zip(values, speeds, strict=True))]
    found = histories(made, conditions=[gate.parse_condition("throughput>2%")])
    assert [change.cause for change in found.series[0].changes] == ["machine"]
    assert [one.outcome for one in found.gate] == ["passed"]


@pytest.mark.parametrize(
    ("parts", "condition", "outcome"),
    [
        ([(15, 100.0), (15, 95.0)], "throughput>2%", "regressed"),
        ([(15, 100.0), (15, 95.0)], "throughput>10%", "passed"),
        ([(15, 100.0), (15, 95.0)], "throughput>5%", "inconclusive"),
        ([(15, 100.0), (15, 105.0)], "throughput>2%", "passed"),
        ([(12, 100.0), (12, 95.0), (12, 100.0)], "throughput>2%", "passed"),  # fixed
        ([(12, 100.0), (12, 110.0), (12, 105.0)], "throughput>2%", "regressed"),  # but better than at first
        ([(30, 100.0)], "throughput>2%", "passed"),
        ([(30, 100.0)], "throughput>0.6%", "inconclusive"),  # below what is visible
        ([(4, 100.0)], "throughput>2%", "inconclusive"),
    ],
)
def test_the_gate_holds_the_level_now_to_the_best_earlier_one(
    parts: list[tuple[int, float]], condition: str, outcome: str
) -> None:
    (one,) = histories(runs(levels(*parts)), conditions=[gate.parse_condition(condition)]).gate
    assert one.outcome == outcome


def test_a_history_that_cannot_tell_does_not_say_that_nothing_changed() -> None:
    """Too few runs leave the worsening unknown; a series without a change says how small a change it would show."""
    short = histories(runs(levels((5, 100.0))), conditions=[gate.parse_condition("throughput>2%")])
    assert short.gate[0].worsening is None
    assert "no change" not in report.document(short).headline
    wide = report.document(histories(runs(levels((30, 100.0))), margin=0.1)).headline
    assert "no change beyond 10 %" in wide
    assert wide.startswith("throughput of gpt2")


@pytest.mark.parametrize("condition", ["nothing>2%", "final_loss>2%"])
def test_a_gate_that_tests_nothing_is_refused(condition: str) -> None:
    with pytest.raises(UsageError):
        histories(runs([100.0] * 8), conditions=[gate.parse_condition(condition)])


def test_an_unknown_metric_is_refused_with_the_closest_one() -> None:
    with pytest.raises(UsageError) as refused:
        histories(runs([100.0]), "troughput")
    assert "throughput" in str(refused.value.hint)


@pytest.mark.parametrize("high", [101.0, 130.0, 400.0])
def test_a_figure_is_quoted_as_the_list_of_runs_quotes_it(high: float) -> None:
    runs = [entry(number, 100.0) for number in range(4)]
    runs[-1].metrics["throughput"] = EntryFigure(100.0, 9000.0 / high, high, "samples/s", "higher")
    one, _ = listing.result(runs[-1])
    assert ("100 samples/s" in one) == (high < 200)
    shown = report.document(histories(runs))
    assert f"throughput is now {quoted.together(*listing.result(runs[-1]))}" in on_terminal(shown, 200)


@pytest.mark.parametrize("factor", [2.5, 0.3])
def test_a_change_by_more_than_a_factor_of_two_is_a_factor(factor: float) -> None:
    rng = np.random.default_rng(1)
    levels = [100.0] * 12 + [100.0 * factor] * 12
    runs = [entry(number, level * math.exp(rng.normal(0, 0.002))) for number, level in enumerate(levels)]
    said = on_terminal(report.document(histories(runs)), 200)
    assert "] as high since" in said
    assert not re.search(r"[0-9]{3}\.[0-9] %", said)


def test_series_of_one_workload_are_told_apart_by_their_metrics() -> None:
    (one,) = histories(runs(levels((20, 100.0)))).series
    other = msgspec.structs.replace(one, metric="step_time")
    names = [report._title(each, {report._name(one)}) for each in (one, other)]
    assert names[1].endswith(": step time")
    assert len(set(names)) == 2
    assert report._title(one, ()) == report._name(one)


def test_a_sparkline_has_the_highest_block_where_the_series_is_highest() -> None:
    assert report.sparkline([1.0, 2.0, 1.0], 24) == "▁█▁"
    assert report.sparkline([5.0] * 100, 24) == "▄" * 24
    assert len(report.sparkline(list(range(1000)), 24)) == 24


def test_only_a_series_that_the_machine_changed_explains_dotted_changes() -> None:
    values, speeds = levels((15, 100.0), (15, 95.0)), levels((15, 50.0), (15, 47.5), noise=0.001)
    of_machine = [entry(n, value, reference=speed) for n, (value, speed) in enumerate(zip(values, speeds, strict=True))]
    assert ["A dotted" in render(report.document(histories(made))) for made in (of_machine, runs(values))] == [
        True,
        False,
    ]


@pytest.mark.parametrize("seconds", [5, 20, 1800, 6 * 3600])
def test_neighbouring_labels_of_the_axis_differ(seconds: int) -> None:
    made = runs(levels((40, 100.0)))
    moments = [(datetime(2026, 11, 19, 13) + timedelta(seconds=seconds * n)).isoformat() for n in range(len(made))]
    made = [
        msgspec.structs.replace(one, record=msgspec.structs.replace(one.record, started=f"{moment}.000Z"))
        for one, moment in zip(made, moments, strict=True)
    ]
    labels = re.findall(r'class="tick middle[^>]*>([^<]*)<', render(report.document(histories(made))))
    assert all(label != other for label, other in pairwise(labels))
    assert labels[0] == ("2026-11-19" if seconds > 1800 else "11-19 13:00")
    assert len(labels) > 1


def test_names_from_elsewhere_stay_text_on_the_page() -> None:
    evil = "<script>alert(1)</script>"
    found = histories(runs(levels((8, 100.0), (8, 90.0)), **{"model.name": evil, "commit": evil}))
    page = render(report.document(found))
    assert page.count("<script") == 1  # its own
    assert "&lt;script&gt;" in page


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 16 runs, the last eight of which have another commit and PyTorch and are 5 % slower."""
    results = tmp_path_factory.mktemp("history") / "results"
    for number, value in enumerate(levels((8, 1.0), (8, 1.05))):
        path = write_run(results, pace=float(value), steps=14)
        late = number >= 8
        started = (datetime(2026, 10, 1) + timedelta(hours=6 * number)).isoformat(timespec="milliseconds") + "Z"
        edit(path / "run.json", started=started, git={"commit": NEW if late else OLD, "dirty": False})
        version = "2.13.0" if late else "2.12.0"
        edit(path / "environment.json", torch={"version": version})
    return results


def test_the_command_says_when_how_much_and_what_changed(command_line: CommandLine, slower: Path) -> None:
    done = command_line("history", "--results", str(slower))
    assert done.code == 0, done
    first = done.stdout.splitlines()[0]
    assert "throughput" in first
    assert "2026-10-03" in first
    assert "lower" in first
    assert "torch.version 2.12.0 -> 2.13.0" in done.stdout
    assert f"git.commit {OLD[:12]} -> {NEW[:12]}" in done.stdout
    assert len(done.stdout.splitlines()) <= 10
    compared = next(line for line in done.stdout.splitlines() if "gpubench compare" in line).split()[-2:]
    assert [Path(path).parent for path in compared] == [slower / "made"] * 2
    page = (slower / "history.html").read_text()
    assert f'href="made/{Path(compared[1]).name}/report.html"' not in page  # these runs have no report
    assert Path(compared[1]).name in (slower / "index.html").read_text()


def test_the_gate_sets_the_exit_code_and_json_has_every_figure(command_line: CommandLine, slower: Path) -> None:
    done = command_line("history", "step_time", "--json", "--fail-on", "step_time>2%", "--results", str(slower))
    assert done.code == 3, done
    (one,) = json.loads(done.stdout)["series"]
    assert [change["index"] for change in one["changes"]] == [8]
    assert one["changes"][0]["outcome"] == "worse"
    assert {each["key"] for each in one["changes"][0]["differences"]} >= {"git.commit", "torch.version"}
    wide = ("--fail-on", "throughput>5%", "--strict")
    assert command_line("history", *wide, "--results", str(slower)).code == 4


def test_what_cannot_be_done_is_refused(command_line: CommandLine, slower: Path, tmp_path: Path) -> None:
    complaint(command_line("history", "--results", str(tmp_path / "nowhere")))
    complaint(command_line("history", "nothing", "--results", str(slower)))
    complaint(command_line("history", "--strict", "--results", str(slower)))
    complaint(command_line("history", "--margin", "2", "--results", str(slower)))
    none_fits = command_line("history", "--where", "training.batch_size=9", "--results", str(slower))
    assert "fits" in complaint(none_fits)[0]


def test_a_folder_that_cannot_be_written_has_a_history_without_a_page(
    command_line: CommandLine, slower: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (slower / "history.html").unlink(missing_ok=True)
    monkeypatch.setattr("gpubench.runs.directory.write_document", refuse)
    monkeypatch.setattr("gpubench.report.index.write_document", refuse)
    done = command_line("history", "--results", str(slower))
    assert done.code == 0, done
    assert "2026-10-03" in done.stdout
    assert not (slower / "history.html").exists()


def test_absurd_figures_of_foreign_runs_end_in_no_error() -> None:
    made = [entry(number, 1e300 if number < 8 else 1e-300) for number in range(16)]
    found = histories(made, conditions=[gate.parse_condition("throughput>2%")])
    assert all(0 < change.ratio < math.inf for one in found.series for change in one.changes)
    assert found.series[0].visible is None or found.series[0].visible < math.inf
