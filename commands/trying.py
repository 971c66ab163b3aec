"""The runs that try what a diagnosis proposes: each fix beside the run without it, each batch on the device itself."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpubench.commands.running import measured
from gpubench.errors import GpubenchError, Interrupted, SettingsError

if TYPE_CHECKING:
    from gpubench.comparison.result import Comparisons
    from gpubench.configuration import Configuration
    from gpubench.host.benchmark import Outcome
    from gpubench.host.recording import Recorder
    from gpubench.settings import MemorySettings
    from gpubench.terminal import Terminal
    from gpubench.trying.batches import Searched
    from gpubench.trying.memory import Tried

T = TypeVar("T")


def check(run: "Configuration[Any]") -> None:
    """Raises SettingsError where the runs that try fixes could have no folder, before the one to be mended is run."""
    from gpubench.origins import source
    from gpubench.run_names import TRIALS
    from gpubench.settings import MOST_OF_A_NAME

    name, most = run.settings.experiment, MOST_OF_A_NAME - len(TRIALS)
    if (size := len(name.encode())) > most:
        raise SettingsError(
            f"experiment: {name!r} takes {size} bytes, and at most {most} where trials are run in a folder beside it "
            f"that adds {TRIALS}{source(run.origins.get('experiment'))}",
            f"give an --experiment of at most {most} bytes",
        )


def fixes(run: "Configuration[Any]", outcome: "Outcome", terminal: "Terminal") -> GpubenchError | None:
    """Writes down what each fix of a profile saves; returns what ended that, if it did not come to its end."""
    from gpubench.defaults import complete, completed
    from gpubench.trying import speed
    from gpubench.trying.bench import Bench

    recorder = outcome.recorder
    if recorder.findings is None or outcome.error:
        return None
    bench = Bench(lambda one: completed(one, complete), _timed(terminal), _judge)
    return _keep(speed.verify(run, recorder.findings, bench), recorder.conclude, recorder)


def memory(
    run: "Configuration[MemorySettings]", outcome: "Outcome", terminal: "Terminal", *, verify: bool
) -> GpubenchError | None:
    """Writes down what each batch size and each advice comes to; returns what ended that, as `fixes` does."""
    from gpubench.defaults import completed
    from gpubench.host.memory_recording import MemoryRecorder
    from gpubench.memory_defaults import complete_memory
    from gpubench.trying import batches
    from gpubench.trying import memory as advised

    recorder = outcome.recorder
    assert isinstance(recorder, MemoryRecorder)

    def keep_batch_sizes(searched: "Searched") -> None:
        recorder.keep_batch_sizes(searched.found)
        if searched.best and isinstance(searched.best.recorder, MemoryRecorder):
            recorder.adopt(searched.best.recorder)

    def keep_trades(tried: "Tried") -> None:
        recorder.conclude(tried.findings)
        recorder.keep_trades(tried.trades)

    if outcome.error or run.settings.memory.predict:
        return None
    bench = advised.MemoryBench(
        lambda one: completed(one, complete_memory), _timed(terminal), _judge, _followed(terminal)
    )
    if recorder.batch_sizes:
        return _keep(batches.confirm(recorder.batch_sizes, run, bench), keep_batch_sizes, recorder)
    if verify and recorder.advice:
        return _keep(advised.verify(outcome, run, recorder.advice, bench), keep_trades, recorder)
    return None


def _keep(found: Iterable[T], keep: Callable[[T], None], recorder: "Recorder[Any]") -> GpubenchError | None:
    """Keeps what becomes known, as it does; returns what ended it."""
    import msgspec

    from gpubench import notebook

    ended: GpubenchError | None = None
    try:
        for one in found:
            keep(one)
    except KeyboardInterrupt:  # the second, between two measurements
        ended = Interrupted("interrupted", "what had been measured by then is kept")
    except GpubenchError as error:
        ended = error
    if isinstance(ended, Interrupted) and recorder.findings:
        recorder.conclude(msgspec.structs.replace(recorder.findings, interrupted=True))
    notebook.write_up(recorder.writer.path)
    return ended


def _judge(*outcomes: "Outcome") -> "Comparisons | None":
    from gpubench import notebook
    from gpubench.report import frame

    return notebook.judge_pair([one.recorder.writer.path for one in outcomes], frame.differences(*outcomes))


def _followed(terminal: "Terminal") -> "Callable[[Sequence[Configuration[Any]]], list[Outcome]]":
    """Follows the memory of configurations, one after the other: each stands for itself."""
    from gpubench.host import live_memory
    from gpubench.host.memory_recording import MemoryRecorder

    def follow(runs: "Sequence[Configuration[Any]]") -> "list[Outcome]":
        outcomes = []
        for run in runs:
            outcomes += measured([run], MemoryRecorder, live_memory, terminal)
            if isinstance(outcomes[-1].error, Interrupted):
                raise outcomes[-1].error
        return outcomes

    return follow


def _timed(terminal: "Terminal") -> "Callable[[Sequence[Configuration[Any]]], list[Outcome]]":
    """Measures how fast configurations are, interleaved."""
    from gpubench.host import live
    from gpubench.host.train_recording import TrainRecorder

    return lambda runs: measured(runs, TrainRecorder, live, terminal, independent=True)
