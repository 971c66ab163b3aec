"""The runs that try what a diagnosis proposes: fixes compared with the run without them, and batch sizes."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpubench.commands.running import measured
from gpubench.errors import GpubenchError, Interrupted, SettingsError

if TYPE_CHECKING:
    from gpubench.compare.result import Comparisons
    from gpubench.host.recorder import Recorder
    from gpubench.host.schedule import Outcome
    from gpubench.report.terminal import Terminal
    from gpubench.settings.loading import Configuration
    from gpubench.settings.schema import CompletedMemorySettings
    from gpubench.verify import Searched, Tried

T = TypeVar("T")


def check(run: "Configuration[Any]") -> None:
    """Raises SettingsError if the name of the trials' folder would be too long. Call it before the first run."""
    from gpubench.foreign_files import TRIALS
    from gpubench.settings.loading import about, naming_origins
    from gpubench.settings.schema import MOST_OF_A_NAME

    name, most = run.settings.experiment, MOST_OF_A_NAME - len(TRIALS)
    if (size := len(name.encode())) > most:
        with naming_origins(run.origins), about("experiment"):
            raise SettingsError(
                f"{name!r} takes {size} bytes, and at most {most} where trials are run in a folder beside it that adds "
                f"{TRIALS}",
                f"give an --experiment of at most {most} bytes",
            )


def fixes(run: "Configuration[Any]", outcome: "Outcome", terminal: "Terminal") -> GpubenchError | None:
    """Tries the fixes of a profile and records their savings. Returns the error if it did not finish, or None."""
    from gpubench.settings.defaults import complete, completed
    from gpubench.verify import Bench, verify_speed

    recorder = outcome.recorder
    if recorder.findings is None or outcome.error:
        return None
    bench = Bench(lambda one: completed(one, complete), _timed(terminal), _judge)
    return _keep(verify_speed(run, recorder.findings, bench), recorder.conclude, recorder)


def memory(
    run: "Configuration[CompletedMemorySettings]", outcome: "Outcome", terminal: "Terminal", *, verify: bool
) -> GpubenchError | None:
    """Tries batch sizes and memory fixes and records the results. Returns an error or None, as `fixes` does."""
    from gpubench import verify as advised
    from gpubench.host.memory_recorder import MemoryRecorder
    from gpubench.memory.target import complete_memory
    from gpubench.settings.defaults import completed
    from gpubench.verify import confirm

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
        return _keep(confirm(recorder.batch_sizes, run, bench), keep_batch_sizes, recorder)
    if verify and recorder.advice:
        return _keep(advised.verify_memory(outcome, run, recorder.advice, bench), keep_trades, recorder)
    return None


def _keep(found: Iterable[T], keep: Callable[[T], None], recorder: "Recorder[Any]") -> GpubenchError | None:
    """Keeps each result as it arrives. Returns the error that ended the trials, or None."""
    import msgspec

    from gpubench.report import notebook

    ended: GpubenchError | None = None
    try:
        for one in found:
            keep(one)
    except KeyboardInterrupt:  # the second Ctrl-C, between two measurements
        ended = Interrupted("interrupted", "the run directory keeps the results so far")
    except GpubenchError as error:
        ended = error
    if isinstance(ended, Interrupted) and recorder.findings:
        recorder.conclude(msgspec.structs.replace(recorder.findings, interrupted=True))
    notebook.write_up(recorder.writer.path)
    return ended


def _judge(*outcomes: "Outcome") -> "Comparisons | None":
    from gpubench.report import frame, notebook

    return notebook.judge_pair([one.recorder.writer.path for one in outcomes], frame.differences(*outcomes))


def _followed(terminal: "Terminal") -> "Callable[[Sequence[Configuration[Any]]], list[Outcome]]":
    """Returns a function that follows the memory of configurations, one after the other."""
    from gpubench.host import live_memory
    from gpubench.host.memory_recorder import MemoryRecorder

    def follow(runs: "Sequence[Configuration[Any]]") -> "list[Outcome]":
        outcomes = []
        for run in runs:
            outcomes += measured([run], MemoryRecorder, live_memory, terminal)
            if isinstance(outcomes[-1].error, Interrupted):
                raise outcomes[-1].error
        return outcomes

    return follow


def _timed(terminal: "Terminal") -> "Callable[[Sequence[Configuration[Any]]], list[Outcome]]":
    """Returns a function that times configurations, interleaved."""
    from gpubench.host import live
    from gpubench.host.recorder import TrainRecorder

    return lambda runs: measured(runs, TrainRecorder, live, terminal, independent=True)
