"""The table of several numbers of ranks: which of them pays, by the noise that was measured."""

from pathlib import Path

import msgspec
import pytest
from cli import complaint
from piped import Line
from running import gpubench

from gpubench.errors import WorkerLost
from gpubench.kinds.pipeline.results import summarise
from gpubench.report import sweep
from gpubench.report.document import Command, Paragraph, Table
from gpubench.runs.directory import COMPLETED, ENVIRONMENT, FAILED, SCHEMA_VERSION, SUMMARY, RunWriter

STEPS = 12


def measured(results: Path, ranks: int, evaluation: float = 0.1, jitter: float = 0.01, repeats: int = 4) -> Path:
    """A run of a pipeline that never ran, or of one that failed at once without repeats."""
    settings = {"distributed": {"world_size": ranks}, "work": {"samples": 16}, "device": "cpu"}
    config = msgspec.json.encode({"experiment": "made", "precision": "fp32"} | settings).decode()
    writer = RunWriter(results, "made", config, command="pipe-infer", argv=[], world_size=ranks, git=None)
    writer.replace(ENVIRONMENT, {"host": {"name": "here"}})
    writer.update(workload={"model": "tiny"})
    line = Line((STEPS // ranks,) * ranks, 16, evaluation=evaluation, jitter=jitter)
    # what is random in a repeat follows from its number, and differs between runs
    made = [line.repeat(number + 100 * ranks) for number in range(repeats)]
    if jitter > 0.5:  # whole processes that differ
        made = [
            Line(line.counts, 16, evaluation=evaluation * (1 + number % 2)).repeat(number) for number in range(repeats)
        ]
    summary = summarise(made, line.samples)
    writer.replace(SUMMARY, {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(summary)})
    writer.finish(COMPLETED if repeats else FAILED, None if repeats else WorkerLost("rank 1 died").record())
    return writer.path


def headline(paths: list[Path]) -> str:
    block = sweep.document(paths).blocks[0]
    assert isinstance(block, Paragraph)
    return block.texts[0]


def test_the_number_of_ranks_that_pays_is_named_with_its_gain_and_how_sure_it_is(tmp_path: Path) -> None:
    found = headline([measured(tmp_path, ranks) for ranks in (1, 2, 4)])
    assert found.startswith("tiny, 16 samples on cpu: 4 ranks pay, with 3.")
    assert " x the throughput of 1 rank (95 % interval 3." in found


def test_a_larger_number_that_is_not_faster_does_not_pay(tmp_path: Path) -> None:
    """Four ranks share the cores of two."""
    runs = [measured(tmp_path, 4, evaluation=0.25), measured(tmp_path, 1), measured(tmp_path, 2)]
    found = headline(runs)
    assert "2 ranks pay, with 1." in found
    assert found.endswith("; 4 ranks are not faster than 2 ranks")


def test_ranks_that_share_one_core_do_not_pay(tmp_path: Path) -> None:
    runs = [measured(tmp_path, ranks, evaluation=0.1 * ranks) for ranks in (1, 2, 3)]
    assert headline(runs).endswith("more ranks than 1 do not pay; 2 and 3 ranks are not faster than 1 rank")


def test_what_noise_hides_is_not_told(tmp_path: Path) -> None:
    found = headline([measured(tmp_path, ranks, jitter=0.9) for ranks in (1, 2)])
    assert found.endswith("whether 2 ranks are faster than 1 rank is within the noise: raise --repeats")
    alone = headline([measured(tmp_path, ranks, repeats=1) for ranks in (1, 2)])
    assert "1 rank is within the noise" in alone


def test_the_table_has_throughput_latency_and_efficiency_of_each(tmp_path: Path) -> None:
    made = sweep.document([measured(tmp_path, ranks) for ranks in (1, 2, 4)]).blocks
    (shown,) = (block for block in made if isinstance(block, Table))
    text = [[str(getattr(cell, "text", cell)) for cell in row] for row in shown.rows]
    assert [row[0] for row in text] == ["1", "2", "4"]
    assert "efficiency" in str(shown.columns)
    assert text[0][-1].startswith("100")
    assert float(text[2][-1].split()[0]) == pytest.approx(100 * 16 / 19, abs=2)
    assert len([block for block in made if isinstance(block, Command)]) == 3


def test_a_number_of_ranks_that_failed_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    runs = [measured(tmp_path, 1), measured(tmp_path, 2, repeats=0), measured(tmp_path, 4)]
    made = sweep.document(runs).blocks
    said = [line for block in made if isinstance(block, Paragraph) for line in block.texts]
    assert "2 ranks: rank 1 died" in said
    assert "4 ranks pay" in said[0]
    assert headline([measured(tmp_path, 1), measured(tmp_path, 2, repeats=0)]).endswith(
        "only 1 rank was measured, so that nothing is compared"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--world-size", "1,40", "--steps", "6"), "40 ranks for 6 evaluations: some would have nothing to do"),
        (("--world-size", "1,2", "--vs", "seed=1"), "--vs and several numbers of ranks are different comparisons"),
        (("--world-size", "1,2", "--resume", "latest"), "--resume completes one run, and several numbers of ranks"),
        (("--world-size", "2,2"), "world size '2' is given twice"),
        (("--world-size", "1,,2"), "world size '1,,2' has an empty value"),
    ],
)
def test_numbers_of_ranks_that_cannot_be_measured_are_refused(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    done = gpubench("pipe-infer", "--device", "cpu", "--unet", "dummy", *options, results=tmp_path)
    assert complaint(done)[0].startswith(said)
    assert not done.runs


def test_several_numbers_of_ranks_are_interleaved_and_make_one_table(tmp_path: Path) -> None:
    size = ("--unet", "dummy", "--step-ms", "2", "--steps", "4", "--samples", "3", "--no-verify", "--repeats", "1")
    options = ("--device", "cpu", "--performance.cpu_threads=1", "--world-size", "1,2", "-q")
    done = gpubench("pipe-infer", *size, *options, results=tmp_path)
    assert done.code == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if line.split()[:1] in (["1"], ["2"])][:2] == [
        "1",
        "2",
    ]
    records = [msgspec.json.decode((run / "run.json").read_bytes()) for run in done.runs]
    assert sorted(record["world_size"] for record in records) == [1, 2]
    assert all(record["interleaved_with"] for record in records)
