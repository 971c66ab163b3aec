"""Whole outputs of comparisons and runs, in tests/golden/; `pytest --update-golden` accepts what changed."""

from collections.abc import Callable

import pytest
from compared import causes
from reports import on_terminal
from test_comparing import learned, null_metric, rich_comparison
from test_page import Page, compare_page, comparison_of, comparisons_of, run_of, run_page
from test_pipelining import run_of as pipeline_of
from test_pipelining import summary_of

from gpubench.compare.evidence import Side
from gpubench.report import comparison, markdown
from gpubench.report import run as report
from gpubench.report.document import Document

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("width", [80, 120])
def test_a_comparison_in_a_terminal(golden: Golden, width: int) -> None:
    found = rich_comparison(causes=causes())
    golden(f"comparison-{width}.txt", on_terminal(comparison.document(found), width))


def test_a_comparison_for_a_pull_request(golden: Golden) -> None:
    golden("comparison.md", markdown.render(comparison.document(rich_comparison(causes=causes()))))


def test_the_page_of_a_comparison(golden: Golden) -> None:
    sides = [Side("exp-a", (run_of(ranks=2, gpus=2),)), Side("exp-b", (run_of("exp-b", mean=0.103),))]
    golden("comparison-page.txt", words_of(compare_page(comparisons_of(comparison_of()), sides)))


def test_the_noise_of_a_workload(golden: Golden) -> None:
    found = learned(null_metric("throughput"), null_metric("peak_memory_rss"))
    golden("noise.txt", on_terminal(comparison.noise(found), 80))


def test_the_page_of_a_run(golden: Golden) -> None:
    golden("run-page.txt", words_of(run_page(run_of("run-2"), comparison_of(), run_of("run-1"))))


def test_a_run_in_a_terminal(golden: Golden) -> None:
    run = run_of("run-1", ranks=2)
    golden("run.txt", on_terminal(Document(report.headline(run), report.blocks(run)), 80))


def test_a_pipeline_in_a_terminal(golden: Golden) -> None:
    run = pipeline_of(summary_of())
    golden("pipeline.txt", on_terminal(Document(report.headline(run), report.blocks(run)), 100))


def words_of(page: str) -> str:
    """The text of a page, a line for each piece."""
    return "\n".join(line for piece in Page(page).text if (line := " ".join(piece.split()))) + "\n"
