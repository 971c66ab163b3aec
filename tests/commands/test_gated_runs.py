"""--fail-on of train-bench: two sides are measured, compared, and the exit code says whether the second one passes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import typer
from cli import complaint
from compared import comparisons
from running import SMALL, Finished, gpubench

from gpubench.commands.gate import OPEN, Gate
from gpubench.compare.gate import parse_condition
from gpubench.compare.result import Comparisons, GateResult
from gpubench.report.terminal import Terminal

CODES = {"passed": 0, "regressed": 3, "inconclusive": 4}
"""Under --strict."""
SHORT = ("--steps=4", "--training.warmup_steps=1", "--repeats=1", "--quiet")
CONDITION = "step_time>2%"


Outcome = Literal["passed", "regressed", "inconclusive"]


def compared(*outcomes: Outcome) -> Comparisons:
    gate = [GateResult(CONDITION, "step_time", "new", 0.02, 0.03, (0.01, 0.05), 0.01, one) for one in outcomes]
    return comparisons(gate=gate)


@pytest.mark.parametrize("outcome", ["passed", "regressed", "inconclusive"])
@pytest.mark.parametrize("strict", [False, True])
def test_the_exit_code_is_that_of_compare(outcome: Outcome, strict: bool) -> None:
    pair = compared(outcome)
    expected = 0 if outcome == "inconclusive" and not strict else CODES[outcome]
    gate = Gate([parse_condition(CONDITION)], strict)
    if not expected:
        gate.decide(pair, Terminal(quiet=True, verbosity=0))
        return
    with pytest.raises(typer.Exit) as ended:
        gate.decide(pair, Terminal(quiet=True, verbosity=0))
    assert ended.value.exit_code == expected


def test_without_a_condition_everything_passes() -> None:
    OPEN.decide(None, Terminal(quiet=True, verbosity=0))
    OPEN.decide(compared(), Terminal(quiet=True, verbosity=0))


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("--vs", "seed=1", "--fail-on", "step_tim>2%"), "names no metric", "'step_time'"),
        (("--vs", "seed=1", "--fail-on", "final_loss>2%"), "neither more nor less", "step_time>2%"),
        (("--vs", "seed=1", "--fail-on", "throughput>100%"), "can never fail", "step_time>2%"),
        (("--vs", "seed=1", "--fail-on", "step_time>2"), "not a percentage", "step_time>2%"),
        (("--vs", "seed=1", "--strict"), "--strict without --fail-on", "--fail-on"),
        (("--fail-on", CONDITION), "nothing is compared", "--vs-ref"),
        (("--batch-size", "1,2", "--fail-on", CONDITION), "nothing is compared", "--vs-ref"),
    ],
)
def test_a_gate_that_could_decide_nothing_is_refused_before_anything_runs(
    command_line: Callable[..., Finished], tmp_path: Path, options: tuple[str, ...], message: str, hint: str
) -> None:
    said = complaint(command_line("train-bench", *SMALL, *options, "--results", str(tmp_path / "results")))
    assert message in said[0]
    assert hint in said[1]
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("condition", ["phase_tokenize>2%", "phase_*>5%", "throughput>2%"])
def test_a_phase_that_only_the_program_knows_is_not_refused_beforehand(
    command_line: Callable[..., Finished], condition: str
) -> None:
    done = command_line("train-bench", *SMALL, "--vs", "seed=1", "--fail-on", condition, "--print-config")
    assert done.code == 0, done


def test_two_sides_are_measured_compared_and_gated_by_one_command(tmp_path: Path) -> None:
    options = (*SMALL, *SHORT, "--vs", "seed=1", "--fail-on", CONDITION, "--strict", "--json")
    done = gpubench("train-bench", *options, results=tmp_path)
    document = json.loads(done.stdout)
    (gate,) = document["gate"]
    assert (gate["condition"], gate["metric"]) == (CONDITION, "step_time")
    assert done.code == CODES[gate["outcome"]], done.stderr
    assert len(document["runs"]) == 2


def test_what_cannot_be_decided_is_an_error_below_the_results(tmp_path: Path) -> None:
    """Steps of another number of samples are not compared."""
    options = (*SMALL, *SHORT, "--vs", "training.batch_size=4", "--fail-on", CONDITION)
    done = gpubench("train-bench", *options, results=tmp_path)
    assert done.code == 2
    assert "withheld" in done.stderr
    assert done.stdout.count("completed: ") == 2
    assert "hint: judge a metric that both sides have for the same work" in done.stderr, "--force changes nothing here"
