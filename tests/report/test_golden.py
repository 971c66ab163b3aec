"""Whole outputs of comparisons and runs, in tests/golden/; `pytest --update-golden` accepts what changed."""

from collections.abc import Callable

import pytest
from compared import causes
from reports import everywhere
from test_comparing import learned, null_metric, rich_comparison
from test_page import comparison_of, comparisons_of, run_of
from test_pipelining import run_of as pipeline_of
from test_pipelining import summary_of

from gpubench.compare.evidence import Side
from gpubench.report import comparison, noise
from gpubench.report import run as report
from gpubench.report.document import Document


def of_sides() -> Document:
    sides = [Side("exp-a", (run_of(ranks=2, gpus=2),)), Side("exp-b", (run_of("exp-b", mean=0.103),))]
    return comparison.document(comparisons_of(comparison_of()), sides)


DOCUMENTS: dict[str, Callable[[], Document]] = {
    "comparison": lambda: comparison.document(rich_comparison(causes=causes())),
    "comparison-of-runs": of_sides,
    "noise": lambda: noise.document(learned(null_metric("throughput"), null_metric("peak_memory_rss"))),
    "run": lambda: report.page(run_of("run-2", ranks=2), comparison_of(), run_of("run-1")),
    "pipeline": lambda: report.page(pipeline_of(summary_of())),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_whole_report_is_the_golden_one(golden: Callable[[str, str], None], name: str) -> None:
    golden(f"{name}.txt", everywhere(DOCUMENTS[name]()))
