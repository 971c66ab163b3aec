"""The runs that hold what `gpubench memory` found to the device itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpubench.commands.running import measured
from gpubench.errors import GpubenchError, Interrupted

if TYPE_CHECKING:
    from gpubench.benchmark import Outcome
    from gpubench.configuration import Configuration
    from gpubench.memory_trials import Bench
    from gpubench.settings import MemorySettings
    from gpubench.terminal import Terminal


def try_out(
    run: "Configuration[MemorySettings]", outcome: "Outcome", terminal: "Terminal", *, verify: bool
) -> "GpubenchError | None":
    """Holds what was found to the device itself; returns what ended that, if it did not come to its end."""
    from gpubench import memory_trials, notebook
    from gpubench.memory_recording import MemoryRecorder

    recorder = outcome.recorder
    assert isinstance(recorder, MemoryRecorder)
    if outcome.error or run.settings.memory.predict or not (verify or recorder.batch_sizes):
        return None

    def keep(found: memory_trials.Verified) -> None:
        recorder.advise(found.findings)
        recorder.keep_trades(found.trades)

    bench = _bench(terminal)
    try:
        if recorder.batch_sizes:
            found, best = memory_trials.confirm(recorder.batch_sizes, run, bench, recorder.keep_batch_sizes)
            recorder.keep_batch_sizes(found)
            if best and isinstance(best.recorder, MemoryRecorder):
                recorder.adopt(best.recorder)
        elif recorder.advice:
            keep(memory_trials.verify(outcome, run, recorder.advice, bench, keep))
    except GpubenchError as error:
        return error
    finally:
        notebook.write_up(recorder.writer.path)
    return None


def _bench(terminal: "Terminal") -> "Bench":
    from gpubench import live, live_memory, memory_trials
    from gpubench.defaults import completed
    from gpubench.memory_defaults import complete_memory
    from gpubench.memory_recording import MemoryRecorder
    from gpubench.train_recording import TrainRecorder

    def followed(run: "Configuration[Any]") -> "Outcome":
        (one,) = measured([run], MemoryRecorder, live_memory, terminal)
        if isinstance(one.error, Interrupted):
            raise one.error
        return one

    def follow(runs: "Sequence[Configuration[Any]]") -> "list[Outcome]":
        return [followed(run) for run in runs]  # one after the other: each stands for itself

    def time(runs: "Sequence[Configuration[Any]]") -> "list[Outcome]":
        return measured(runs, TrainRecorder, live, terminal, independent=True)

    return memory_trials.Bench(lambda one: completed(one, complete_memory), follow, time)
