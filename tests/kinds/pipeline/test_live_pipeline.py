import io

import pytest
from piped import Line, finished
from rich.console import Console

from gpubench.events import Heartbeat, SampleFinished, SpansMeasured
from gpubench.kinds.pipeline.progress import PipeProgress, describe, draw
from gpubench.telemetry import CpuSample, TelemetrySample

LINE = Line((2, 3), micro_batches=4)


def progress() -> PipeProgress:
    """Two samples finished; rank 1 waits for the fourth."""
    found = PipeProgress(repeat=1, repeats=3, ranks=2, total=4)
    found.telemetry = TelemetrySample(time=0.0, cost=0.0, cpu=CpuSample(load=0.5, memory_rss_bytes=1 << 30))
    repeat = LINE.repeat()
    for built in repeat.built.values():
        found.take(built)
    for rank in range(2):
        spans = [span for span in repeat.spans if span.rank == rank]
        found.take(SpansMeasured(rank=rank, spans=spans))
    for sample in range(2):
        found.take(SampleFinished(rank=1, sample=finished(sample, 0.0, 1.0, repeat=1), latent=None, image=None))
    found.take(Heartbeat(rank=1, doing="recv_wait", step=5, waits_for=0))
    return found


def rendered(found: PipeProgress, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw("trial", found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_gets_whole_cells(width: int) -> None:
    text = rendered(progress(), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert ("compute" in text) == (width > 60)


def test_the_table_has_a_row_for_each_rank() -> None:
    text = rendered(progress())
    for expected in ("trial", "repeat 2 of 3", "2 of 4", "50 % busy   1 GiB in the workers"):
        assert expected in text, text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 3 1 of 0-1 100 ms 100 % 0 % 0 % 0 % starting" in rows
    assert "1 3 5 of 2-4 100 ms 86 % 14 % 0 % 0 % recv wait" in rows


def test_before_the_first_span_the_line_says_what_is_being_done() -> None:
    found = PipeProgress(ranks=2)
    found.take(Heartbeat(rank=0, doing="building_the_model", step=None))
    assert describe(found) == "repeat 1 of 1  building the model"
    assert "building the model" in rendered(found)


def test_a_line_holds_where_every_rank_is() -> None:
    assert (
        describe(progress()) == "repeat 2 of 3  samples 2/4  rank 0 sample 3 evaluation 1  rank 1 sample 3 evaluation 5"
    )


def test_a_rank_that_has_nothing_yet_says_what_it_does() -> None:
    found = PipeProgress(ranks=2, total=4)
    found.take(SpansMeasured(rank=0, spans=LINE.repeat().spans[:1]))
    found.take(Heartbeat(rank=1, doing="recv_wait", step=None))
    assert describe(found) == "repeat 1 of 1  samples 0/4  rank 0 sample 0 evaluation 0  rank 1 recv wait"
