"""What every trial takes: the run as it was, candidates beside it, and a verdict on the throughput of both."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpubench.comparison.result import Comparisons, Verdict
from gpubench.configuration import Configuration
from gpubench.dotkeys import flatten
from gpubench.errors import GpubenchError, Interrupted
from gpubench.host.benchmark import Outcome
from gpubench.logs import MODIFIABLE
from gpubench.origins import FIX, THE_RUN, TRIAL
from gpubench.report.finding_phrases import options
from gpubench.run_names import TRIALS

log = logging.getLogger("gpubench.trying")


@dataclass(frozen=True)
class Bench:
    complete: Callable[[Configuration[Any]], Configuration[Any]]
    """Checks a configuration. Raises GpubenchError for one that cannot be run."""
    time: Callable[[Sequence[Configuration[Any]]], Sequence[Outcome]]
    """Timed runs, interleaved; one that fails leaves the others alone."""
    judge: Callable[[Outcome, Outcome], Comparisons | None]
    """The second against the first; None where one measured nothing."""

    def throughput(self, without: Outcome, with_fix: Outcome) -> Verdict | None:
        """Of throughput, as a fix may change what is done in a step; None where it cannot be said."""
        judged = self.judge(without, with_fix)
        found = judged.comparisons[0].verdicts if judged else []
        return next((verdict for verdict in found if verdict.metric == "throughput" and verdict.ratio), None)


def as_it_was(run: Configuration[Any], changes: Mapping[str, Any]) -> Configuration[Any]:
    """The run without gaps, to be changed; in an experiment of its own, so that no trial is taken for the run."""
    settings = run.settings
    given = Configuration(settings, dict.fromkeys(flatten(settings.model_dump()), THE_RUN))
    return given.with_overrides({"experiment": settings.experiment + TRIALS} | dict(changes), TRIAL)


def candidates(
    base: Configuration[Any], fixes: Sequence[dict[str, Any]], bench: Bench
) -> tuple[dict[int, Configuration[Any]], dict[int, GpubenchError]]:
    """The runs to make, by the place of their fix, and why the others cannot be made."""
    runs: dict[int, Configuration[Any]] = {}
    refused: dict[int, GpubenchError] = {}
    for number, fix in enumerate(fixes):
        log.log(MODIFIABLE, "trying %s (%d of %d)", options(fix), number + 1, len(fixes))
        try:
            runs[number] = bench.complete(base.with_overrides(fix, FIX))
        except GpubenchError as error:
            refused[number] = error
    return runs, refused


def stop_if_interrupted(outcomes: Iterable[Outcome]) -> None:
    """Raises Interrupted where the user has had enough."""
    for outcome in outcomes:
        if isinstance(outcome.error, Interrupted):
            raise outcome.error


def directory(outcome: Outcome) -> str:
    return str(outcome.recorder.writer.path)
