"""A pass through the pipeline that torch.profiler records: one evaluation is one of its steps."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.profiler import record_function

from gpubench import events
from gpubench.events import SpanKind
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.handshake import draw_run_id
from gpubench.pipeline.session import Passage, Session
from gpubench.pipeline.spans import SpanTimer
from gpubench.profiler import Recording, annotate_modules, recorded
from gpubench.timing import Mark


class RecordedSpans(SpanTimer[Mark]):
    """A SpanTimer whose waits stand in the trace as well."""

    @contextmanager
    def waiting(self, kind: SpanKind, sample: int) -> Iterator[None]:
        with record_function(kind), super().waiting(kind, sample):
            yield


def record(session: Session) -> Iterator[events.Message]:
    """Takes the samples through once more, on every rank, and hands over the traces of those that are recorded."""
    profiling, rank = session.settings.profiling, session.stage.rank
    records = profiling.all_ranks or session.ranks.is_rank_zero
    with TemporaryDirectory(prefix="gpubench-") as folder:
        recording = Recording(profiling, session.stage.denoiser.device, rank, Path(folder)) if records else None
        if recording:
            if profiling.modules:
                annotate_modules(session.stage.denoiser.model)
            session = replace(session, stage=replace(session.stage, annotate=record_function))
        passage = Passage(session, session.batches, draw_run_id(session.ranks), announce=False)
        session.wait_for("all ranks")
        session.timer.start()
        done = 0

        def evaluated(batch: Batch, step: int) -> None:
            nonlocal done
            done += 1
            if recording:
                session.stage.activity.enter("recording")  # a cycle that ends is written, which may take long
                recording.step(done)

        with recording or nullcontext():
            for _ in passage.run(evaluated):  # spans of a recorded pass are not those of the program alone
                pass
        session.timer.synchronize()
        if recording:
            session.stage.activity.enter("handing over the trace")
            yield from recorded(recording.files(), rank, session.repeat)
