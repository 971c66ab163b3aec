"""Judges an edit: runs both versions of a program in rounds until a decision is proved, and says what it is."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from gpubench import git, temporary, units
from gpubench.bench import Bench
from gpubench.compare.compare import compare
from gpubench.compare.decision import (
    METRICS,
    WORK,
    Aim,
    Decision,
    Ending,
    Needed,
    Observed,
    Version,
    failure_in_words,
    largest_peak,
    observed_of,
    rule,
    sentence,
)
from gpubench.compare.evidence import RunEvidence, Side, aligned, open_run
from gpubench.compare.losses import DEFAULT, Margin
from gpubench.compare.result import LossOutcome
from gpubench.compare.sequential import FEWEST, MOST, MOST_FORESEEN, Look, look
from gpubench.compare.verdicts import DEFAULT_MARGIN
from gpubench.compare.warnings import disturbance, few_repeats
from gpubench.errors import Interrupted, RunDirectoryError, RunDirectoryLost, RunFailed, UsageError
from gpubench.host import order
from gpubench.host.recorder import Recorder
from gpubench.host.schedule import Outcome
from gpubench.metrics import definition_of
from gpubench.runs.directory import timestamp
from gpubench.settings.loading import Configuration

LATE = 0.1
"""How far a judgement may exceed its budget, as a fraction of it, before the repeat that runs is interrupted."""
BUSY = 0.05
"""The slowdown by other processes from which on the machine was too busy, as a fraction."""
SO_FAR: Mapping[LossOutcome, str] = {
    "unharmed": "the losses agree so far",
    "harmed": "the losses differ so far",
    "unclear": "the losses do not tell yet",
}
"""What is said of the loss after the first round. One pair of repeats may differ by chance."""
MARK = "judges"
"""The file in the temporary folder of a host that judges."""
CHANGED = "files that git tracks have changed while it was judged: it was edited, or it writes to them"
BESIDE = "another judgement runs on this machine at the same time: each slows the other, and makes it less certain"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a judgement: what the user asks of an edit, and how long it may take."""

    aim: Aim = "throughput"
    margin: float = DEFAULT_MARGIN
    """The gain that has to be exceeded, as a fraction."""
    max_memory: float | None = None
    """The limit of the edited version's peak memory in bytes."""
    loss_margin: Margin = DEFAULT
    """The largest change of the loss that does not matter."""
    budget: float | None = None
    """The time limit in seconds."""
    most: int = MOST
    """The largest number of rounds."""


@dataclass(frozen=True)
class Before:
    """What an interrupted judgement has measured, which this one goes on from."""

    runs: Sequence[tuple[str, str]] = ()
    values: Sequence[tuple[float, float]] = ()
    seconds: float = 0.0
    metric: str | None = None
    started: str = field(default_factory=timestamp)
    order_seeds: Sequence[int | None] = ()


class Judging:
    """Makes round after round of both versions until their gains decide, or until no more may be made."""

    def __init__(self, terms: Terms, before: Before | None = None, others: Callable[[], bool] = lambda: False) -> None:
        """`others` tells whether another judgement runs on this machine."""
        self.terms, self.before, self._others = terms, before or Before(), others
        self.edit: str | None = None
        """The digest of the edit, once it runs; see `gpubench.git.edit`."""
        self.values = list(self.before.values)
        """The metric of both versions in each round."""
        self.metric = self.before.metric or ""
        self.ending: Ending = "decided"
        self.lacking = ""
        """Which side has not measured the metric, as the reason of a refusal; empty if both have."""
        self.warnings: dict[str, None] = {}
        self._began = time.monotonic()
        self._took: list[float] = []
        """The time of each round that this judgement has made itself."""
        self._found = Observed()

    @property
    def look(self) -> Look:
        """What the rounds so far show."""
        sign = 1 if self.metric and definition_of(self.metric).better == "higher" else -1
        return look([sign * math.log(candidate / base) for base, candidate in self.values])

    @property
    def until(self) -> float:
        """When a repeat that still runs is interrupted, in seconds of `time.monotonic()`."""
        budget = self.terms.budget
        return math.inf if budget is None else self._began + (1 + LATE) * budget

    @property
    def seconds(self) -> float:
        return self.before.seconds + time.monotonic() - self._began

    @property
    def _left(self) -> float:
        """The time that is left of the budget."""
        return math.inf if self.terms.budget is None else max(0.0, self._began + self.terms.budget - time.monotonic())

    @property
    def _usual(self) -> float:
        """The time that a round usually takes. The first one may take longer, as files are not in memory yet."""
        return median(self._took) if self._took else self.before.seconds / max(1, len(self.before.values))

    @property
    def most(self) -> int:
        """The largest number of rounds: those that may be made, as far as there is time for them."""
        is_limited = self._took and self._left < math.inf
        fitting = len(self.values) + int(self._left / self._usual) if is_limited else self.terms.most
        return min(self.terms.most, fitting)

    @property
    def needed(self) -> Needed | None:
        """What it would take to decide; None if that is unknown."""
        rounds = self.look.needed(self.terms.margin)
        return Needed(rounds, self._usual * max(0, rounds - len(self.values))) if rounds else None

    def rounds(self, recorders: Sequence[Recorder[Any]], say: Callable[[str], None]) -> Iterator[int]:
        """Yields the number of a recorder for each repeat to make.

        Raises UsageError if the aim is not measured, or for a program on several machines.
        """
        made, orders = 0, order.rounds(recorders)
        while (ending := self._ending(recorders, made)) is None:
            if made == 1:
                say(self._first())
            began = time.monotonic()
            for place in next(orders):
                recorders[place].round = f"round {len(self.values) + 1} of at most {self.terms.most}"
                yield place
                if recorders[place].is_spread:
                    raise UsageError(
                        "judge needs all ranks of the program on one machine, because other machines do not know when "
                        "it is decided",
                        "measure both versions with train-bench --vs-ref COMMIT on every machine",
                    )
                if recorders[place].has_failed:  # its outcome says why
                    self.ending = "failed"
                    return
            ours, theirs = (self._value(recorder, made) for recorder in recorders)
            if ours is None or theirs is None:
                self.ending = "failed"
                side = "the base" if ours is None else "it"
                what = units.words(self.metric or METRICS[self.terms.aim][0])
                self.lacking = f"{side} has no {what} in round {len(self.values) + 1}"
                return
            made += 1
            self.values = self._values(recorders)
            self._took.append(time.monotonic() - began)
            if self._others():
                self.warnings[BESIDE] = None
            say(self._progress())
        self.ending = ending

    def _ending(self, recorders: Sequence[Recorder[Any]], made: int) -> Ending | None:
        """Returns why no more rounds are made; None if another one is."""
        rounds, margin, most = len(self.values), self.terms.margin, self.most
        exceeds = self.look.exceeds(margin)
        if exceeds is False:
            return "decided"
        if made and (exceeds or made == 1 or rounds == FEWEST):  # what a program does shows in its first repeat
            sides = self._sides(recorders)
            found = observed_of(compare(sides, loss_margin=self.terms.loss_margin).comparisons[0], sides[1])
            self._found = found
            for_loss_alone = found.loss == "harmed" and found.work != "less"
            if found.refusals and not (for_loss_alone and rounds < FEWEST):
                return "decided"
            if exceeds and not found.refusals and found.loss != "unclear":
                return "decided"
        limit = self.terms.max_memory
        if limit is not None and made and (largest_peak(recorders[1].sum_up().metrics) or 0.0) > limit:
            return "decided"
        if rounds >= self.terms.most:
            return "rounds"
        if made and self.look.is_hopeless(margin, most):
            return "hopeless" if most == self.terms.most else "budget"
        return None

    def _value(self, recorder: Recorder[Any], made: int) -> float | None:
        """Returns the metric in the last repeat of a run; None if that has not measured it."""
        known = {metric.name: metric for metric in recorder.sum_up().metrics}
        self.metric = self.metric or next((name for name in METRICS[self.terms.aim] if name in known), "")
        if known and not self.metric:
            raise UsageError(
                f"--metric {self.terms.aim}: the program has no {' or '.join(METRICS[self.terms.aim])} here",
                "energy needs a GPU whose driver counts it" if self.terms.aim == "energy" else "name another metric",
            )
        repeats = known[self.metric].repeats if self.metric in known else []
        return repeats[made] if made < len(repeats) and repeats[made] > 0 else None

    def _values(self, recorders: Sequence[Recorder[Any]]) -> list[tuple[float, float]]:
        """Returns the metric of both versions in each round, those of now with one warm-up for all of them."""
        ours, theirs = (side.runs[-1].metrics[self.metric].repeats for side in self._sides(recorders))
        return [*self.before.values, *zip(ours, theirs, strict=True)]

    def _sides(self, recorders: Sequence[Recorder[Any]]) -> list[Side]:
        """Returns both versions as far as they were measured, with one warm-up."""
        for recorder in recorders:
            recorder.flush()
        now = [open_run(recorder.writer.path, running=True) for recorder in recorders]
        return aligned(sides_of(self.before.runs, now, [recorder.variant for recorder in recorders]))

    @property
    def doubt(self) -> str:
        """Why the rounds have not sufficed."""
        made = units.counted(len(self.values), "round")
        said: Mapping[Ending, str] = {
            "budget": self._forecast() or f"the budget of {units.about(self.terms.budget or 0)} sufficed for {made}",
            "interrupted": f"it was interrupted after {made}",
            "hopeless": f"after {made} a gain above the margin is hardly to be proved in {self.terms.most}",
        }
        return said.get(self.ending, f"{made} do not tell")

    def _progress(self) -> str:
        found, terms = self.look, self.terms
        gain = units.signed_percent(found.gain - 1) if found.gain else ""
        interval = f" [{', '.join(units.signed_percent(end - 1) for end in found.interval)}]" if found.interval else ""
        said = f"judge: round {found.rounds} of at most {terms.most}: gain {gain}{interval}"
        return "; ".join(filter(None, [said, self._forecast() if found.rounds >= FEWEST else ""]))

    def _first(self) -> str:
        """Returns what the first round shows besides the gain."""
        found = self._found
        return f"judge: {'; '.join(filter(None, [WORK.get(found.work), SO_FAR.get(found.loss), self._forecast()]))}"

    def _forecast(self) -> str:
        """Returns how long a round takes, how many are needed, and what is left of the budget; "" if it is decided."""
        made, needed = len(self.values), self.needed
        if not self._took or self.look.exceeds(self.terms.margin) is not None:
            return ""
        said = f"a round takes {units.about(self._usual)}, and "
        if needed is None:
            return f"{said}more than {MOST_FORESEEN:,} are needed"
        more = max(1, needed.rounds - made)
        said += f"{'about' if made >= FEWEST else 'at least'} {more} more {'is' if more == 1 else 'are'} needed"
        said += f", which is {units.about(more * self._usual)}"
        if self.terms.budget is None:
            return said
        return f"{said}, with {units.about(self._left)} left of the budget of {units.about(self.terms.budget)}"


def run(variants: Sequence[Configuration[Any]], bench: Bench, judging: Judging) -> list[Outcome]:
    """Runs the base and the edited version. Raises the error of the base if that does not run.

    An edited version whose code has changed meanwhile has failed, because its rounds are not those of one version.
    """
    folder = variants[1].settings.program.directory or Path()
    judging.edit = git.edit(folder)

    def order(recorders: Sequence[Recorder[Any]]) -> Iterator[int]:
        return judging.rounds(recorders, bench.terminal.say)

    with bench.terminal.errors_only():
        outcomes = bench.run(variants, order=order, until=judging.until)
    base, edited = outcomes
    stopped = isinstance(base.error, Interrupted)
    if isinstance(base.error, RunFailed) and not isinstance(base.error, RunDirectoryLost):
        raise type(base.error)(f"the base does not run: {base.error.message}", base.error.hint)
    if base.error and not stopped:
        raise base.error
    if stopped:
        judging.ending = "budget" if time.monotonic() > judging.until else "interrupted"
    elif git.edit(folder) != judging.edit:
        judging.ending = "failed"
        edited = replace(
            edited, error=RunFailed(CHANGED, "judge the edit anew; what a program writes is not to be tracked")
        )
    elif edited.error:
        judging.ending = "failed"
    return [base, edited]


def conclude(outcomes: Sequence[Outcome], judging: Judging) -> Decision:
    """Returns the decision on what was measured."""
    terms, before = judging.terms, judging.before
    recorders = [outcome.recorder for outcome in outcomes]
    pair = tuple(recorder.writer.path for recorder in recorders)
    failure = outcomes[1].error if not isinstance(outcomes[1].error, Interrupted) else None
    measured = all(outcome.summary.metrics for outcome in outcomes)
    found, warnings, doubt = Observed(refusals=failure_in_words(failure)), list(judging.warnings), judging.doubt
    if measured or (before.runs and not failure):
        now = [open_run(path) for path in pair] if measured else []
        sides = aligned(sides_of(before.runs, now, [recorder.variant for recorder in recorders]))
        (comparison,) = compare(sides, loss_margin=terms.loss_margin).comparisons
        found = observed_of(comparison, sides[1], failure)
        if judging.lacking:
            found = msgspec.structs.replace(found, refusals=[*found.refusals, judging.lacking])
        few = few_repeats(sides)
        # A refusal rests on no time, so that what makes times uncertain does not matter.
        said = comparison.sameness.remarks if found.refusals else comparison.warnings
        warnings += [line for line in said if line not in few]
        if max(disturbance(side) or 0.0 for side in sides) > BUSY:
            doubt = f"{doubt}, and other processes kept the machine busy"
    shown, seconds = judging.look, judging.seconds
    ruling = rule(shown, terms.margin, found, terms.max_memory, doubt)
    is_open = ruling.answer == "undecided" and shown.exceeds(terms.margin) is None
    means = [math.fsum(side) / len(side) for side in zip(*judging.values, strict=True)]
    metric = judging.metric or METRICS[terms.aim][0]
    return Decision(
        decision=ruling.answer,
        answer=sentence(ruling, shown, terms.margin, metric, found),
        aim=terms.aim,
        metric=metric,
        unit=definition_of(metric).unit,
        margin=terms.margin,
        gain=shown.gain,
        interval=shown.interval,
        rounds=shown.rounds,
        spread=math.expm1(shown.spread) if shown.spread is not None else None,
        baseline=means[0] if means else None,
        candidate=means[1] if means else None,
        ending=judging.ending,
        reasons=ruling.reasons,
        needed=judging.needed if is_open else None,
        work=found.work,
        loss=found.loss,
        loss_reason=found.loss_reason,
        peak_memory=found.peak_memory,
        max_memory=terms.max_memory,
        loss_margin=terms.loss_margin,
        warnings=list(dict.fromkeys(warnings)),
        base=_version(recorders[0], judging.edit),
        edited=_version(recorders[1], judging.edit),
        runs=[*before.runs, *([(str(pair[0]), str(pair[1]))] if measured or not before.runs else [])],
        values=judging.values,
        order_seeds=[*before.order_seeds, *([recorders[0].order_seed] if measured or not before.runs else [])],
        started=before.started,
        seconds=seconds,
    )


def sides_of(before: Sequence[tuple[str, str]], now: Sequence[RunEvidence], labels: Sequence[str]) -> list[Side]:
    """Returns both versions, each with its runs of before and of now.

    Raises RunDirectoryError if a run of before is gone.
    """
    earlier = [[open_run(Path(pair[place])) for pair in before] for place in (0, 1)]
    return [
        Side(label, (*runs, *now[place : place + 1]))
        for place, (label, runs) in enumerate(zip(labels, earlier, strict=True))
    ]


def _version(recorder: Recorder[Any], edit: str | None) -> Version:
    """Returns what one side ran. `edit` is that of the working tree, which is not part of a commit."""
    program, known = recorder.settings.program, recorder.code or {}
    return Version(
        label=recorder.variant,
        command=program.command,
        ref=program.ref,
        commit=known.get("commit"),
        subject=known.get("subject"),
        edit=edit if program.ref is None else "",
    )


@contextmanager
def announced() -> Iterator[Callable[[], bool]]:
    """A context in which other judgements of this user on this machine know of this one.

    It has a function that tells whether there is another one.
    """
    folder = temporary.OwnedFolder()
    try:
        (folder.path / MARK).touch()
        yield lambda: len(temporary.marked(MARK)) > 1
    finally:
        folder.cleanup()


def resumed(decision: Decision, folder: Path) -> Before:
    """Returns what a judgement can go on from. Raises RunDirectoryError if its code has changed or it is decided."""
    base, edited, now, state = decision.base, decision.edited, git.edit(folder), git.state(folder) or {}
    if decision.decision != "undecided":
        raise RunDirectoryError(f"it is decided: {decision.answer}", "judge the edit anew to measure it again")
    if not decision.rounds:
        raise RunDirectoryError("it has measured nothing", "judge the edit anew")
    moved = base.ref is not None and git.commit(folder, base.ref) != base.commit
    if moved or edited.edit is None or (now, state.get("commit")) != (edited.edit, edited.commit):
        raise RunDirectoryError(
            "the program has changed since, so that its rounds cannot be counted together", "judge the edit anew"
        )
    return Before(
        decision.runs, decision.values, decision.seconds, decision.metric, decision.started, decision.order_seeds
    )
