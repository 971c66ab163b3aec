"""Runs variants of one piece of work, interleaved and in fresh processes, and compares them."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer

from gpubench.compare.gate import Condition
from gpubench.compare.losses import Margin
from gpubench.compare.result import Comparisons, Verdict
from gpubench.errors import Interrupted
from gpubench.host import launch, schedule
from gpubench.host.live import Drawing, drawing_of, view_on
from gpubench.host.recorder import Recorder
from gpubench.host.schedule import Order, Outcome
from gpubench.permission import permit
from gpubench.ranks import is_rank_zero, launched_by_torchrun
from gpubench.registry import RunKind, kind_of
from gpubench.report import after_run
from gpubench.report.terminal import Terminal
from gpubench.settings.loading import Configuration, completed


class Bench:
    """Runs variants of one piece of work, interleaved, each repeat in fresh processes, and compares what they show.

    A variant is a complete configuration, and what comes of it is an `Outcome`, whose run directory has its
    measurements and its report. The caller decides which variants to run and when they have run enough.
    """

    def __init__(
        self,
        kind: RunKind,
        terminal: Terminal,
        *,
        recorder: Callable[[Configuration[Any], Sequence[str]], Recorder[Any]] | None = None,
        drawing: Drawing[Any] | None = None,
    ) -> None:
        """`kind` is that of the runs. `recorder` and `drawing` replace the ones that runs of this kind have."""
        self.kind = kind
        self.terminal = terminal
        self._recorder = recorder or kind.recorder
        self._drawing = drawing or drawing_of(kind)

    @property
    def timing(self) -> "Bench":
        """The bench for the time that the same work takes, as train-bench measures it: nothing is recorded."""
        return Bench(kind_of(self.kind.work), self.terminal)

    def complete(self, variant: Configuration[Any]) -> Configuration[Any]:
        """The variant with every setting that it leaves open. Raises GpubenchError if it cannot be run."""
        return completed(variant, self.kind.complete)

    def run(
        self,
        variants: Sequence[Configuration[Any]],
        *,
        independent: bool = False,
        order: Order = (),
        until: float = math.inf,
    ) -> list[Outcome]:
        """Runs the variants interleaved until each has its repeats, and writes their reports.

        With `independent`, one that fails does not end the others, unless it is the first one. `order` has the number
        of a variant for each repeat to make instead, or chooses it; then none that fails ends the others. What still
        runs at the time `until`, in seconds of `time.monotonic()`, is interrupted.

        Under the user's own torchrun this returns on rank 0 only; the other ranks become workers. For a program on
        several machines it returns on that of rank 0 only; on the others it raises the error of the run or typer.Exit.
        Raises UsageError as `permit` does.
        """
        permit(variants, self.terminal)
        if launched_by_torchrun() and not is_rank_zero():
            launch.become_worker(variants[0].settings)
        recorders = schedule.open_runs(self._recorder, variants, sys.argv)
        with view_on(self.terminal.err, self._drawing, quiet=self.terminal.quiet) as view:

            def watch(recorder: Recorder[Any]) -> None:
                view(recorder)
                if time.monotonic() > until:
                    raise KeyboardInterrupt

            outcomes = schedule.run(recorders, watch, independent=independent, order=order)
        if elsewhere := outcomes[0].recorder.elsewhere:
            self._leave_to(elsewhere, outcomes)
        for outcome in outcomes:
            after_run.write_up(outcome.recorder.writer.path)
        return outcomes

    def run_alone(self, variants: Sequence[Configuration[Any]]) -> list[Outcome]:
        """Runs the variants one after the other, which suits what hardly varies. Raises Interrupted if stopped."""
        outcomes: list[Outcome] = []
        for variant in variants:
            outcomes += self.run([variant])
            stop_if_interrupted(outcomes)
        return outcomes

    def compare(
        self,
        outcomes: Sequence[Outcome],
        metrics: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        loss_margin: Margin | None = None,
    ) -> Comparisons | None:
        """Compares the second of two outcomes with the first, by default in all metrics.

        `loss_margin` is the largest change of the loss that does not matter; None for the usual one.

        None if one of them measured nothing. Raises UsageError for a condition that they cannot decide.
        """
        paths = [outcome.recorder.writer.path for outcome in outcomes]
        return after_run.judge_pair(paths, metrics=metrics, conditions=conditions, loss_margin=loss_margin)

    def throughput(self, without: Outcome, with_change: Outcome) -> Verdict | None:
        """The verdict on the throughput alone, because a change may alter the work of a step.

        None if one of the runs has no throughput.
        """
        judged = self.compare([without, with_change], ["throughput"])
        verdicts = judged.comparisons[0].verdicts if judged else []
        return next((verdict for verdict in verdicts if verdict.metric == "throughput"), None)

    def _leave_to(self, machine: str, outcomes: Sequence[Outcome]) -> NoReturn:
        """Ends the command on a machine without rank 0. Raises the error of the run, or typer.Exit."""
        err = self.terminal.err
        for outcome in outcomes:
            if outcome.error:
                if (path := outcome.recorder.writer.path).exists():
                    err.print(f"failed: {path}", highlight=False, markup=False, soft_wrap=True)
                raise outcome.error
        err.print(f"completed: rank 0 is on {machine}, which has the results", highlight=False, markup=False)
        raise typer.Exit


def stop_if_interrupted(outcomes: Sequence[Outcome]) -> None:
    """Raises Interrupted if the user interrupted one of the runs."""
    for outcome in outcomes:
        if isinstance(outcome.error, Interrupted):
            raise outcome.error
