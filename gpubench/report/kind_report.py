"""What is particular to the reports of one kind of run."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Protocol, cast

from gpubench.compare.evidence import RunEvidence
from gpubench.report.document import Block, Paragraph


class KindReport(Protocol):
    """The functions and constants of a module that `gpubench.registry.RunKind.shown_by` names."""

    @property
    def METRICS(self) -> Sequence[str]:  # noqa: N802
        """The metrics that -v and Markdown lead with."""

    @property
    def IN_BRIEF(self) -> Sequence[str]:  # noqa: N802
        """The metrics that a terminal shows besides the throughput."""

    @property
    def MORE(self) -> str:  # noqa: N802
        """Where the rest is, for the end of a screen."""

    def answer(self, run: RunEvidence) -> str:
        """Returns the answer of a run in one line, if it is not the throughput; "" if it is, or is not known."""

    def before_metrics(self, run: RunEvidence) -> Iterator[Block]:
        """Yields what stands between the answer and the metrics."""

    def after_metrics(self, run: RunEvidence) -> Iterator[Block]:
        """Yields what follows the metrics in a text, and comes before the findings on a page."""

    def over_time(self, run: RunEvidence) -> Iterator[Block]:
        """Yields what a page draws of the single steps, after the findings and before the metrics."""

    def measured(self, run: RunEvidence) -> str:
        """Returns what the figures rest on in a few words, such as "3 repeats"."""

    def caption(self, run: RunEvidence) -> str:
        """Returns what the figures rest on in one line."""

    def without_throughput(self, run: RunEvidence) -> str:
        """Returns why there is no throughput, in a few words."""

    def without_metrics(self, run: RunEvidence) -> str:
        """Returns how far a run came that has no metrics."""


def report_of(run: RunEvidence) -> KindReport:
    return cast("KindReport", import_module(run.kind.shown_by))


def missing(run: RunEvidence, what: str) -> Paragraph:
    """Says that something is missing, with the error of the run or else its status."""
    error = run.record.error if run.record else None
    return Paragraph(f"{what}: {(error or {}).get('message') or run.status!s}")


def intervals(repeats: int) -> str:
    """Returns what the intervals of a run are over."""
    return "intervals are 95 %, over repeats" if repeats > 1 else "a single repeat has no interval"
