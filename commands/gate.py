"""The gate of compare, history and train-bench: the conditions of --fail-on, and the exit code that they decide."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer

from gpubench.errors import UsageError

if TYPE_CHECKING:
    from gpubench.compare.gate import Condition
    from gpubench.compare.result import Comparisons, GateResult
    from gpubench.report.terminal import Terminal

REGRESSED, UNDECIDED = 3, 4
EXIT_CODES = f"{REGRESSED} --fail-on is met, {UNDECIDED} --strict and undecided"


class Gate(NamedTuple):
    """The conditions that a comparison has to pass. With `strict`, an undecided one does not pass either."""

    conditions: "Sequence[Condition]"
    strict: bool

    def decide(self, pair: "Comparisons | None", terminal: "Terminal") -> None:
        """Raises typer.Exit if the comparison does not pass."""
        if pair and (code := exit_code(pair.gate, terminal, strict=self.strict)):
            raise typer.Exit(code)


OPEN = Gate((), strict=False)
"""The gate that everything passes."""


def refuse_idle_strict(fail_on: Sequence[str] | None, *, strict: bool) -> None:
    """Raises UsageError for a --strict without a condition."""
    if strict and not fail_on:
        raise UsageError("--strict without --fail-on has no effect", 'add --fail-on "step_time>2%"')


def of_new_runs(fail_on: Sequence[str] | None, *, strict: bool, two_sided: bool) -> Gate:
    """Returns the gate of two sides that are still to be measured.

    Raises UsageError for a condition that no measurement could decide, and for any without a second side.
    """
    refuse_idle_strict(fail_on, strict=strict)
    if not fail_on:
        return OPEN
    if not two_sided:
        raise UsageError(
            "--fail-on judges a comparison, and nothing is compared",
            "add --vs-ref COMMIT, --vs-args ARGUMENTS or --vs KEY=VALUE",
        )
    from gpubench.compare import gate

    conditions = [gate.parse_condition(text) for text in fail_on]
    for condition in conditions:
        gate.refuse_undefined(condition)
    return Gate(conditions, strict)


def exit_code(results: "Sequence[GateResult]", terminal: "Terminal", *, strict: bool) -> int:
    """Returns the exit code. A regression takes precedence over an undecided condition; stderr names either."""
    from gpubench.report import phrases

    outcomes = (
        ("refused", "refused", REGRESSED),
        ("regressed", "regression", REGRESSED),
        ("inconclusive", "undecided", UNDECIDED if strict else 0),
    )
    for outcome, word, code in outcomes:
        hit = [phrases.worsening(result, interval=False) for result in results if result.outcome == outcome]
        if hit and code:
            terminal.err.print(f"{word}: {'; '.join(hit)}", markup=False, soft_wrap=True)
            return code
    return 0
