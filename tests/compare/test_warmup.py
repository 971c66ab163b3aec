"""One warm-up for all repeats, runs and sides of a comparison."""

from pathlib import Path

import msgspec
import pytest
from recorded_runs import WARMUP, edit, side, step, write_run

from gpubench.compare.compare import compare, null
from gpubench.compare.evidence import Side, aligned, open_run
from gpubench.errors import UsageError
from gpubench.events import Step
from gpubench.runs.directory import STEPS, SUMMARY
from gpubench.runs.steps import Repeat, measure
from gpubench.runs.summary import since, summarise

SLOW_UNTIL = 20


def slow_start(until: int, repeat: int = 0, steps: int = 60) -> Repeat:
    made = Repeat(repeat, WARMUP)
    for number in range(steps):
        made.steps[0].append(step(number, repeat, total=step(number, repeat).total * (2 if number < until else 1)))
    return made


def test_a_repeat_that_alone_needs_a_longer_warm_up_does_not_cut_the_others() -> None:
    repeats = [slow_start(until, repeat) for repeat, until in enumerate((0, 0, SLOW_UNTIL))]
    assert [measured.window.first for measured in measure(repeats)] == [WARMUP] * 3


def test_a_warm_up_that_most_repeats_need_is_cut_from_all() -> None:
    repeats = [slow_start(until, repeat) for repeat, until in enumerate((0, SLOW_UNTIL, SLOW_UNTIL))]
    assert [measured.window.first for measured in measure(repeats)] == [SLOW_UNTIL] * 3


def test_a_repeat_that_was_interrupted_in_the_warm_up_of_the_others_is_left_out() -> None:
    repeats = [slow_start(SLOW_UNTIL, repeat) for repeat in range(2)] + [slow_start(0, 2, steps=15)]
    assert [measured.window.repeat for measured in measure(repeats)] == [0, 1]


def test_both_sides_of_a_comparison_leave_out_the_warm_up_of_the_slower_starter(tmp_path: Path) -> None:
    usual = write_run(tmp_path, "usual", steps=60)
    late = write_run(tmp_path, "late", steps=60)
    _rewrite(late, [slow_start(SLOW_UNTIL, repeat) for repeat in range(2)])
    assert {window.first for window in open_run(usual).windows} == {WARMUP}
    assert {window.first for window in open_run(late).windows} == {SLOW_UNTIL}
    both = aligned([side(usual), side(late)])
    assert {window.first for one in both for run in one.runs for window in run.windows} == {SLOW_UNTIL}
    found = compare(both)
    assert found.warmup == (SLOW_UNTIL, SLOW_UNTIL)
    (verdict,) = (one for one in found.comparisons[0].verdicts if one.metric == "step_time")
    assert verdict.ratio == pytest.approx(1, rel=1e-3)


def test_the_metrics_of_another_warm_up_are_those_of_a_run_that_had_it(tmp_path: Path) -> None:
    path = write_run(tmp_path, "run", ranks=2, steps=60)
    run = open_run(path)
    repeats = []
    for number in range(2):
        repeat = Repeat(number, 25)
        for line in (path / STEPS).read_bytes().splitlines():
            one = msgspec.json.decode(line, type=Step)
            if one.repeat == number:
                repeat.steps[one.rank].append(one)
        repeats.append(repeat)
    expected, found = summarise(repeats, None, "fp32"), since(25, run.summary, run.steps)
    assert [window.first for window in found.steady] == [25, 25]
    computed = {metric.name for metric in expected.metrics} - {"first_step_time", "final_loss"}
    assert computed >= {"throughput", "step_time", "phase_forward", "straggler_skew", "mean_of_rates"}
    for name in computed:
        assert found[name] == expected[name], name


def test_a_repeat_that_would_lose_most_of_its_steps_keeps_its_own_warm_up(tmp_path: Path) -> None:
    late = write_run(tmp_path, "late", steps=60)
    _rewrite(late, [slow_start(SLOW_UNTIL, repeat) for repeat in range(2)])
    short = write_run(tmp_path, "short", steps=24)
    assert compare(aligned([side(late), side(short)])).warmup == (WARMUP, SLOW_UNTIL)


def test_the_warm_up_can_be_set_and_has_to_leave_something(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, name) for name in ("a", "b")]
    sides = [side(run) for run in runs]
    for steps in (0, 5, 29):
        both = aligned(sides, steps)
        assert compare(both).warmup == (steps, steps)
        assert {window.first for one in both for run in one.runs for window in run.windows} == {steps}
    with pytest.raises(UsageError, match=r"--skip 30 leaves nothing of .*: a repeat of it has 30 steps"):
        aligned(sides, 30)


def test_equal_runs_teach_their_noise_with_one_warm_up(tmp_path: Path) -> None:
    usual = [write_run(tmp_path, f"usual{number}", repeats=1, steps=60) for number in range(3)]
    late = write_run(tmp_path, "late", repeats=1, steps=60)
    _rewrite(late, [slow_start(SLOW_UNTIL)])
    group = Side("group", tuple(map(open_run, [*usual, late])))
    assert {window.first for one in aligned([group]) for run in one.runs for window in run.windows} == {WARMUP}
    (of_steps,) = (one for one in null(*aligned([group])).metrics if one.metric == "step_time")
    assert of_steps.spread > 0.05  # the late one has kept 10 of its slow steps


def _rewrite(path: Path, repeats: list[Repeat]) -> None:
    """Gives a run directory the steps of these repeats."""
    lines = []
    for repeat in repeats:
        for number in range(len(repeat.steps[0])):
            one = repeat.steps[0].table()[number : number + 1]
            total = float(one.total[0])
            lines.append(msgspec.json.encode(step(number, repeat.number, total=total)))
    (path / STEPS).write_bytes(b"\n".join(lines) + b"\n")
    edit(path / SUMMARY, **msgspec.to_builtins(summarise(repeats, None, "fp32")))
