import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import msgspec
import pytest
from piped import Line, sequential, verified
from places import DOCS
from rich.console import Console
from test_page import record_of

from gpubench.compare.evidence import RunEvidence
from gpubench.events import Divergence
from gpubench.kinds.pipeline.results import summarise
from gpubench.report import run as report
from gpubench.report import terminal
from gpubench.report.document import Document
from gpubench.runs.summary import Environment, Summary

LINE = Line((12, 12, 12, 14), micro_batches=8, transfer=0.002)


def run_of(summary: Summary, **changes: Any) -> RunEvidence:
    """A run of the pipeline with this summary."""
    settings = {"precision": "fp32", "device": "cpu", "sampling.steps": 50, "work.samples": 8}
    return RunEvidence(
        label="made",
        path=Path("results/pipe-infer/made"),
        record=msgspec.structs.replace(record_of("made"), command="pipe-infer", world_size=4),
        status="completed",
        environment={},
        workload={"model": "tiny", "scheduler": "DPMSolverMultistepScheduler"},  # as recorded once it is built
        summary=summary,
        **{"settings": settings} | changes,
    )


def summary_of(divergence: Divergence | None = None) -> Summary:
    repeats = [LINE.repeat(number) for number in range(2)]
    for repeat in repeats:
        repeat.baselines.append(sequential(LINE, repeat.number))
        repeat.verified = msgspec.structs.replace(verified(LINE, repeat.number), divergence=divergence)
    return summarise(repeats, LINE.samples)


def rendered(summary: Summary, width: int = 120, *, details: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width)
    run = run_of(summary)
    terminal.show(Document(report.headline(run), report.blocks(run)), console, details=details)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_the_headline_says_what_ran_and_how_fast() -> None:
    said = "tiny, fp32, 50 steps of DPMSolverMultistepScheduler, 8 samples over 4 ranks on cpu: 0.54 samples/s"
    assert report.headline(run_of(summary_of())).startswith(said)


def test_the_headline_names_the_gpu() -> None:
    facts = dict.fromkeys(Environment.__struct_fields__) | {"device": "NVIDIA L4"}
    run = run_of(msgspec.structs.replace(summary_of(), environment=Environment(**facts)))
    assert "on cuda (NVIDIA L4): " in report.headline(replace(run, settings=run.settings | {"device": "cuda"}))


def test_the_assignment_stands_above_the_ranks() -> None:
    text = rendered(summary_of())
    assert "\n50 evaluations over 4 ranks, 12 + 12 + 12 + 14\n" in text
    assert "\nrank 3 is the bottleneck: it takes 1.40 s (14 evaluations of 100 ms) for each sample, and rank " in text
    assert row(text, "3")[:2] == ["3", "36-49"]
    assert row(text, "0")[-2:] == ["95.4", "MiB"]


def test_a_terminal_says_what_the_page_of_the_command_tells_to_read_and_what_the_pipeline_loses() -> None:
    text = rendered(summary_of(), details=False)
    page = (DOCS / "commands" / "pipe-infer.md").read_text(encoding="utf-8")
    told = documents.figures_to_read(page)
    assert {"pipeline efficiency", "bit-identical"} <= told
    assert [figure for figure in told if figure not in text] == []
    assert re.search(r"pipeline efficiency [\d.]+ %.*: the pipeline loses [\d.]+ % of its time to hand-offs", text)


def test_the_shares_of_a_rank_come_to_all_of_its_time() -> None:
    for rank in "0123":
        cells = row(rendered(summary_of()), rank)
        shares = [float(cells[place - 1]) for place, cell in enumerate(cells) if cell == "%"]
        assert len(shares) == 4
        assert sum(shares) == pytest.approx(100, abs=0.3)


def test_the_baselines_and_the_verdict_stand_beside_the_pipeline() -> None:
    text = rendered(summary_of())
    assert row(text, "one") == ["one", "of", "these", "ranks", "alone", "40", "s", "2.70", "x"]
    assert "replicas, each with the whole model, were not measured: --baseline replicas compares them" in text


def test_what_more_ranks_do_for_a_single_sample_is_said() -> None:
    text = " ".join(rendered(summary_of()).split())
    assert "a sample makes its 50 evaluations one after another on any number of ranks: more ranks can make" in text
    assert "more samples a second, and none sooner (latency here: " in text
    one = Line((4, 4), micro_batches=1)
    assert "splitting the steps gained nothing: a single micro-batch" in " ".join(
        rendered(summarise([one.repeat()], 1)).split()
    )


def test_a_handoff_is_told_by_its_parts() -> None:
    said = "a hand-off is 8.44 KiB: 1 KiB latent, 2 KiB scheduler state, 4.94 KiB generator, 512 B header; it carries"
    assert f"{said} _step_index, lower_order_nums, model_outputs, generators" in rendered(summary_of())


def test_verified_samples_are_counted_and_the_first_digests_shown() -> None:
    text = rendered(summary_of())
    assert "8 of 8 samples are bit-identical to a loop of single-process diffusers" in text
    assert "5feceb66ffc8" in text
    assert "5feceb66ffc8" not in rendered(summary_of(), details=False)


@pytest.mark.parametrize(
    ("divergence", "said"),
    [
        (Divergence(3, 0.0125, 26, 2, 0.0001), "differs by up to 0.0125, first in evaluation 26 on rank 2 by 0.0001"),
        (Divergence(3, 0.0125, None, None, None), "differs by up to 0.0125, and did not when it was made again"),
    ],
)
def test_the_first_difference_is_named(divergence: Divergence, said: str) -> None:
    assert f"; sample 3 {said}" in rendered(summary_of(divergence))


def test_what_was_not_verified_says_how_it_could_be() -> None:
    assert "not verified: --verify compares every sample" in rendered(summarise([LINE.repeat()], 8))


def test_a_narrow_terminal_gets_whole_cells() -> None:
    text = rendered(summary_of(), width=70, details=False)
    assert "…" not in text
    assert "peak memory  " not in text
    narrowest = rendered(summary_of(), width=40, details=False)
    assert "…" not in narrowest
    assert "rank  evaluations  compute    idle" in narrowest


def test_a_run_that_was_never_built_says_so() -> None:
    text = rendered(summarise([], 8))
    assert ": nothing was measured\nthe pipeline was not built\n" in text


def test_a_run_that_failed_half_way_shows_what_it_has() -> None:
    repeat = LINE.repeat()
    repeat.stages.clear()
    for sample in (5, 6, 7):
        del repeat.samples[sample]
    text = rendered(summarise([repeat], 8))
    assert ": no repeat was completed\n" in text
    assert "\n5 of 8 samples finished\n" in text
    assert row(text, "3")[:3] == ["3", "36-49", "(14)"]
    assert "a hand-off is 8.44 KiB" in text
