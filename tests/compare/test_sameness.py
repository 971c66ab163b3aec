"""Whether both sides of a comparison did the same work, reached the same losses, and told the time by true clocks.

Programs of `edits.py` run with the probe in forks of this process, and are compared as their run directories are.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import edits
import pytest
from edits import Edit
from probed_runs import measured, written
from recorded_runs import edit as edit_document
from recorded_runs import side, write_run

from gpubench.compare import watched, work
from gpubench.compare.compare import compare
from gpubench.compare.gate import parse_condition
from gpubench.compare.losses import DEFAULT, Margin
from gpubench.compare.result import Comparison, Comparisons
from gpubench.compare.work import CountedWork
from gpubench.kinds.program.watched import WatchedOutput, name_of
from gpubench.probe.clock import unreplaced_clock
from gpubench.report.phrases import headline
from gpubench.runs.directory import SUMMARY
from gpubench.settings.keys import COMMAND

GATE = parse_condition("throughput>2%")
SEEN_HERE = ("work", "loss", "scale", "named", "ineffective", "undetected", "")
"""What can be seen without a host: not the clock, and not that nothing is measured."""
FAST = (
    "one sample of each batch", "one prepared batch repeated", "one batch repeated without a DataLoader",
    "batches made without a DataLoader", "a lower resolution", "a layer detached",
    "every other batch not differentiated", "updates skipped, gradients thrown away", "a learning rate of 0",
    "a constant loss", "smaller batches", "the evaluation left out", "the probe's hooks on modules removed",
    "a fused optimizer", "bf16", "a vectorised transform", "accumulation split otherwise",
    "larger batches with the same samples", "the losses of an accumulation added", "another order of the samples",
)  # fmt: skip
"""The edits that run in every test; the others run under the mark `stress`."""


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baseline")
    return written(folder / "results", "base", [measured(folder / "run", edits.PROGRAM)])


def seen(one: Edit) -> Any:
    marks = () if one.name in FAST else (pytest.mark.stress,)
    return pytest.param(one, marks=marks, id=one.name)


HERE = [one for one in (*edits.CHEATS, *edits.HONEST) if one.found in SEEN_HERE and one.name != "torch.compile"]
"""All but one that takes a minute to compile."""


@pytest.mark.parametrize("one", [seen(one) for one in HERE])
def test_an_edit_is_seen_as_what_it_is(
    tmp_path: Path, baseline: Path, one: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_GPUBENCH_PROBE", "")  # as in a program, whose environment has it
    path = written(tmp_path / "results", "edit", [measured(tmp_path / "run", one.program)])
    whole = compare([side(baseline), side(path)], conditions=[GATE])
    (found,) = whole.comparisons
    kinds = [refusal.kind for refusal in found.sameness.refusals]
    reasons = "; ".join([refusal.reason for refusal in found.sameness.refusals] + found.sameness.remarks)
    if one.found in ("work", "loss"):
        assert one.found in kinds, found.sameness
        assert one.said in reasons
        assert {result.outcome for result in whole.gate} == {"refused"}
        assert not any(verdict.verdict == "faster" for verdict in found.verdicts)
    else:
        assert not kinds, reasons
    if one.found == "scale":
        assert found.sameness.work == "scaled"
        assert "no setting or argument asks for that" in reasons
    if one.found == "named":
        assert one.said in reasons


def test_the_headline_of_less_work_says_so_and_every_verdict_is_rejected(tmp_path: Path) -> None:
    whole = of_counts(tmp_path, {"forwarded": 64 * 30}, {"forwarded": 30})
    (found,) = whole.comparisons
    assert headline(found).endswith("does less work: 64 times fewer samples reach the model (1 instead of 64)")
    assert {verdict.verdict for verdict in found.verdicts} == {"rejected"}
    (result,) = whole.gate
    assert result.outcome == "refused"
    assert result.reason
    assert "does less work" in result.reason


def test_force_gives_a_verdict_on_less_work_with_a_warning(tmp_path: Path) -> None:
    (found,) = of_counts(tmp_path, {"forwarded": 64 * 30}, {"forwarded": 30}, force=True).comparisons
    assert "rejected" not in {verdict.verdict for verdict in found.verdicts}
    assert "does less work" in found.warnings[0]


def test_more_work_leaves_a_verdict_and_is_named(tmp_path: Path) -> None:
    (found,) = of_counts(tmp_path, {"forwarded": 30}, {"forwarded": 64 * 30}).comparisons
    assert found.sameness.work == "more"
    assert not found.sameness.refusals
    assert "does less work" in found.sameness.remarks[0]


@pytest.mark.parametrize("asked", [True, False])
def test_other_samples_in_a_step_that_nobody_asked_for_are_named(tmp_path: Path, asked: bool) -> None:
    sides = [side(write_run(tmp_path, name, repeats=1)) for name in ("base", "new")]
    for one, samples in zip(sides, (32, 8), strict=True):
        one.runs[0].workload["samples_per_step"] = samples
        one.runs[0].settings["training.batch_size"] = samples if asked else 32
    (found,) = compare(sides).comparisons
    named = "has 8 samples instead of 32, and no setting or argument asks for that"
    assert any(named in one for one in found.sameness.remarks) != asked


@pytest.mark.parametrize("counted", [None, {"backward_passes": 30, "updated_first": 9, "updated_least": 9}])
def test_what_one_side_has_not_counted_is_unknown_and_leaves_the_verdict(
    tmp_path: Path, counted: dict[str, int] | None
) -> None:
    ours = {"forwarded": 64 * 30, "calls": 30, "counted_steps": 30, "elements": 64 * 90, "contents": 8}
    (found,) = of_counts(tmp_path, ours | {"repeated_contents": 0}, counted).comparisons
    assert found.sameness.work == ("same" if counted else "unknown")
    assert not found.sameness.refusals


def test_a_side_that_draws_no_batches_is_named_and_refused_only_if_their_content_repeats(tmp_path: Path) -> None:
    drawn = {"batches": 60, "contents": 8, "repeated_contents": 0}
    (found,) = of_counts(tmp_path, drawn, drawn | {"batches": 1}).comparisons
    assert not found.sameness.refusals
    names = found.candidate.label, found.baseline.label
    assert "{} draws no batches from a DataLoader, and {} draws 2 for each".format(*names) in found.sameness.remarks[0]
    repeated = {"batches": 1, "contents": 8, "repeated_contents": 7}
    (found,) = of_counts(tmp_path / "repeated", drawn, repeated).comparisons
    (refusal,) = found.sameness.refusals
    assert "8 times fewer batches have a content of their own (12.5 % instead of 100.0 %)" in refusal.reason
    assert "60 times fewer batches are drawn from DataLoaders in a step (0.0333 instead of 2)" in refusal.reason


def test_fewer_batches_are_no_less_work_because_larger_ones_have_the_same_samples(tmp_path: Path) -> None:
    (found,) = of_counts(tmp_path, {"batches": 480}, {"batches": 30}).comparisons
    assert found.sameness.work == "same"
    assert not found.sameness.remarks


def of_counts(
    folder: Path, ours: dict[str, int] | None, theirs: dict[str, int] | None, *, force: bool = False
) -> Comparisons:
    """The comparison of two equal runs that have counted this of 30 steps."""
    paths = []
    for name, counted in (("base", ours), ("new", theirs)):
        path = write_run(folder, name, repeats=1)
        whole = {"backward_passes": 30, "updated_first": 9, "updated_least": 9, "calls": 30, "counted_steps": 30}
        known = None if counted is None else counted if "updated_least" in counted else whole | counted
        edit_document(path / SUMMARY, work=[known])
        paths.append(path)
    return compare([side(path) for path in paths], force=force, conditions=[GATE])


# The counts.


def test_lengths_that_vary_at_random_may_come_out_smaller() -> None:
    ours = CountedWork(elements=1000.0, errors={"elements": 30.0})
    theirs = CountedWork(elements=900.0, errors={"elements": 30.0})
    assert not work.less_work([ours], theirs)
    assert work.less_work([ours], changed(theirs, elements=700.0)).startswith("30.0 % fewer elements")


def changed(counted: CountedWork, **changes: float) -> CountedWork:
    return CountedWork(**{**vars(counted), **changes})


def test_sequences_of_another_length_have_the_elements_of_their_tokens() -> None:
    ours, theirs = CountedWork(elements=128.0, flops=9.0), CountedWork(elements=64.0, flops=4.0)
    (found,) = work.counts([ours], [theirs], scaled=True, tokens=(128.0, 64.0))
    assert (found.kind, found.less, found.unit) == (
        "elements",
        False,
        "elements reach the model for each of its tokens",
    )
    (found,) = work.counts([ours], [changed(theirs, elements=32.0)], scaled=True, tokens=(128.0, 64.0))
    assert found.less


def test_an_accumulation_in_other_parts_is_no_less_work() -> None:
    ours = CountedWork(samples=64.0, passes=4.0, reached=1.0, used=1.0, forwarded=64.0)
    theirs = CountedWork(samples=64.0, passes=1.0, reached=1.0, used=1.0, forwarded=64.0)
    assert not work.less_work([ours], theirs)
    assert work.less_work([CountedWork(passes=4.0)], CountedWork(passes=1.0)).startswith("4 times fewer backward")


# The clock.


def test_a_wrong_clock_of_either_side_leaves_no_verdict(tmp_path: Path) -> None:
    paths = [write_run(tmp_path, name, repeats=2) for name in ("base", "new")]
    right = {"low": 0.98, "high": 1.01, "seconds": 9.0}
    for path in paths:
        edit_document(path / SUMMARY, clock_rates=[right, right])
    assert only(paths, "python train.py").sameness.clock == "same"
    edit_document(paths[1] / SUMMARY, clock_rates=[right, None])
    assert only(paths, "python train.py").sameness.clock == "unknown"
    edit_document(paths[0] / SUMMARY, clock_rates=[right, {"low": 1.5, "high": 1.52, "seconds": 9.0}])
    found = only(paths, "python train.py")
    assert found.sameness.clock == "different"
    assert [(one.kind, one.side) for one in found.sameness.refusals] == [("clock", "baseline")]
    assert headline(found).endswith(
        "has a clock of its own: one second of its clock took 1.50 to 1.52 s by the host's clock"
    )
    assert {verdict.verdict for verdict in found.verdicts} == {"rejected"}


def test_the_clock_of_an_older_run_is_unknown_whatever_it_has_recorded(tmp_path: Path) -> None:
    paths = [write_run(tmp_path, name, repeats=1) for name in ("base", "new")]
    for path in paths:
        edit_document(path / SUMMARY, clocks=[{"program": 1.0, "host": 10.0}])
    found = only(paths, "python train.py")
    assert found.sameness.clock == "unknown"
    assert not found.sameness.refusals


def test_the_clock_of_models_of_gpubench_is_not_mentioned(tmp_path: Path) -> None:
    (found,) = of_counts(tmp_path, {"forwarded": 30}, {"forwarded": 30}).comparisons
    assert found.sameness.counts
    assert found.sameness.clock is None


def only(paths: Sequence[Path], command: str) -> Comparison:
    """The comparison of two runs of a program."""
    sides = [side(path) for path in paths]
    for one in sides:
        one.runs[0].settings[COMMAND] = command
    (found,) = compare(sides).comparisons
    return found


# What a program prints.


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("val_loss=([0-9.]+)", "val_loss"), (r"step \d+: val acc: ([0-9.]+)", "val acc"), ("([0-9.]+)", "watched")],
)
def test_a_watched_number_is_called_what_stands_before_it(pattern: str, name: str) -> None:
    assert name_of(pattern) == name


def test_watched_numbers_are_found_in_lines_that_arrive_in_parts() -> None:
    output = WatchedOutput("val_loss=([0-9.e-]+)")
    output.add(b"step 1\nval_lo")
    output.add(b"ss=0.5\rval_loss=oops\nval_loss=0.25\nval_loss=9")
    output.begin(1)
    output.add(b"\nval_loss=0.125\n")
    assert output.of_repeats([0, 1, 2]) == {"val_loss": [[0.5, 0.25], [0.125], []]}


def test_named_groups_are_several_numbers() -> None:
    output = WatchedOutput(r"loss=(?P<loss>[\d.]+)|acc=(?P<acc>[\d.]+)")
    output.add(b"loss=1.5\nacc=0.5\n")
    assert output.of_repeats([0]) == {"loss": [[1.5]], "acc": [[0.5]]}


@pytest.mark.parametrize(
    ("name", "theirs", "outcome"),
    [
        ("val_loss", [1.001, 1.002], "unharmed"),
        ("val_loss", [0.5, 0.5001], "unharmed"),
        ("val_loss", [1.2, 1.201], "harmed"),
        ("val_loss", [0.9, 1.2], "unclear"),
        ("accuracy", [1.2, 1.201], "unharmed"),
        ("accuracy", [0.9, 0.901], "harmed"),
        ("something", [0.9, 0.901], "harmed"),
    ],
)
def test_a_watched_number_is_judged_in_its_direction(name: str, theirs: list[float], outcome: str) -> None:
    found = watched.judge(name, [[5.0, 1.0], [5.0, 1.0001]], [[5.0, one] for one in theirs], DEFAULT)
    assert found.outcome == outcome, found.reason


def test_the_margin_of_a_watched_number_can_be_set() -> None:
    sides = [[1.0], [1.0]], [[1.1], [1.1]]
    assert watched.judge("val_loss", *sides, DEFAULT).outcome == "harmed"
    assert watched.judge("val_loss", *sides, Margin(0.2, is_share=False, is_set=True)).outcome == "unharmed"
    assert watched.judge("val_loss", [[1.0]], [[1.1]], DEFAULT).outcome == "unclear"
    assert watched.judge("val_loss", [[]], [[1.1]], DEFAULT).outcome == "unknown"


def test_the_clock_of_the_probe_is_that_of_python_whatever_a_program_puts_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5)
    now = unreplaced_clock()
    assert now is not time.monotonic_ns
    assert 5 < now() <= now()
