"""The runs that try what a diagnosis proposes: each fix beside the run without it, each batch on the device itself."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubench.commands.running import measured
from gpubench.errors import GpubenchError, Interrupted

if TYPE_CHECKING:
    from gpubench.benchmark import Outcome
    from gpubench.comparison.result import Comparisons
    from gpubench.configuration import Configuration
    from gpubench.memory_trials import Bench
    from gpubench.settings import MemorySettings
    from gpubench.terminal import Terminal


def fixes(run: "Configuration[Any]", outcome: "Outcome", terminal: "Terminal") -> "GpubenchError | None":
    """Writes down what each fix of a profile saves; returns what ended that, if it did not come to its end."""
    from gpubench import notebook, verifying
    from gpubench.defaults import complete, completed
    from gpubench.report import frame

    def judge(*outcomes: "Outcome") -> "Comparisons | None":
        return notebook.judge_pair([one.recorder.writer.path for one in outcomes], frame.differences(*outcomes))

    diagnosis = outcome.recorder.diagnosis
    if diagnosis is None or outcome.error:
        return None
    bench = verifying.Bench(lambda one: completed(one, complete), _timed(terminal), judge)
    tried = verifying.verify(run, diagnosis.findings, bench)
    outcome.recorder.conclude(tried.findings)
    notebook.write_up(outcome.recorder.writer.path)
    return tried.stopped


def memory(
    run: "Configuration[MemorySettings]", outcome: "Outcome", terminal: "Terminal", *, verify: bool
) -> "GpubenchError | None":
    """Writes down what each batch size and each advice comes to; returns what ended that, as `fixes` does."""
    from gpubench import memory_trials, notebook
    from gpubench.memory_recording import MemoryRecorder

    recorder = outcome.recorder
    assert isinstance(recorder, MemoryRecorder)
    if outcome.error or run.settings.memory.predict or not (verify or recorder.batch_sizes):
        return None

    def keep(found: memory_trials.Verified) -> None:
        recorder.advise(found.findings)
        recorder.keep_trades(found.trades)

    bench = _memory_bench(terminal)
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


def _memory_bench(terminal: "Terminal") -> "Bench":
    from gpubench import live_memory, memory_trials
    from gpubench.defaults import completed
    from gpubench.memory_defaults import complete_memory
    from gpubench.memory_recording import MemoryRecorder

    def followed(run: "Configuration[Any]") -> "Outcome":
        (one,) = measured([run], MemoryRecorder, live_memory, terminal)
        if isinstance(one.error, Interrupted):
            raise one.error
        return one

    def follow(runs: "Sequence[Configuration[Any]]") -> "list[Outcome]":
        return [followed(run) for run in runs]  # one after the other: each stands for itself

    return memory_trials.Bench(lambda one: completed(one, complete_memory), follow, _timed(terminal))


def _timed(terminal: "Terminal") -> "Callable[[Sequence[Configuration[Any]]], list[Outcome]]":
    """Measures how fast configurations are, interleaved."""
    from gpubench import live
    from gpubench.train_recording import TrainRecorder

    return lambda runs: measured(runs, TrainRecorder, live, terminal, independent=True)
