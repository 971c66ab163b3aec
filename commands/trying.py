"""Tries what a run proposes, for --verify and --find-batch-size, and keeps the results in its run directory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpubench.errors import GpubenchError, Interrupted, RunFailed, SettingsError, UsageError

if TYPE_CHECKING:
    from gpubench.bench import Bench
    from gpubench.host.recorder import Recorder
    from gpubench.host.schedule import Outcome
    from gpubench.settings.loading import Configuration
    from gpubench.trials import Searched, TriedFixes

T = TypeVar("T")


def check_trial_name(run: "Configuration[Any]") -> None:
    """Raises SettingsError if the name of the folder for trials would be too long. Call it before the first run."""
    from gpubench.foreign_files import TRIALS
    from gpubench.settings.keys import about, naming_origins
    from gpubench.settings.sections import MOST_OF_A_NAME

    name, limit = run.settings.experiment, MOST_OF_A_NAME - len(TRIALS)
    if (size := len(name.encode())) > limit:
        with naming_origins(run.origins), about("experiment"):
            raise SettingsError(
                f"{name!r} has {size} bytes; the limit is {limit}, because the folder of the trial runs adds "
                f"{TRIALS} to the name",
                f"give an --experiment of at most {limit} bytes",
            )


def try_fixes(run: "Configuration[Any]", outcome: "Outcome", bench: "Bench") -> GpubenchError | None:
    """Runs each fix that a profile proposes, and records its saving. Returns the error that ended the trials, or None.

    Nothing is run if the profiled run failed.
    """
    from gpubench.trials import proposed, verify_speed

    recorder = outcome.recorder
    if recorder.is_spread:
        return _spread("train-bench")
    if recorder.findings is None or outcome.error:
        return None
    if not proposed(recorder.findings):
        bench.terminal.say("nothing to try: no finding has a setting that a run could be made with")
    return record(verify_speed(run, recorder.findings, bench.timing), recorder.conclude, recorder)


def try_patch(run: "Configuration[Any]", outcome: "Outcome", bench: "Bench") -> GpubenchError | None:
    """Runs the program with the edits that findings lead to, and with the patch of all that is kept.

    Otherwise as `try_fixes`.
    """
    from gpubench import trials

    if outcome.recorder.findings is None or outcome.error:
        return None
    bench.terminal.say("profile: what is kept is written into the program, and the patched program is run")
    found = record(trials.try_patch(run, outcome, bench.timing), outcome.recorder.conclude, outcome.recorder)
    findings = outcome.recorder.findings
    if found is None and (findings is None or findings.patch is None):
        bench.terminal.say("patch: none, because no fix with code is proved to be faster")
    return found


def try_memory_fixes(run: "Configuration[Any]", outcome: "Outcome", bench: "Bench") -> GpubenchError | None:
    """Runs each fix that saves memory, and records what it saves and costs. Otherwise as `try_fixes`."""
    from gpubench.kinds.memory.recorder import FootprintRecorder
    from gpubench.trials import verify_memory

    recorder = outcome.recorder
    assert isinstance(recorder, FootprintRecorder)
    if recorder.is_spread:
        return _spread("memory")
    if outcome.error or not recorder.advice:
        return None

    def keep(tried: "TriedFixes") -> None:
        recorder.conclude(tried.findings)
        recorder.keep_trades(tried.trades)

    return record(verify_memory(outcome, run, recorder.advice, bench), keep, recorder)


def try_batch_sizes(run: "Configuration[Any]", outcome: "Outcome", bench: "Bench") -> GpubenchError | None:
    """Runs the batch sizes that were predicted to fit, if any. Returns the error that ended the trials, or None."""
    from gpubench.kinds.memory.recorder import MemoryRecorder
    from gpubench.trials import confirm

    recorder = outcome.recorder
    assert isinstance(recorder, MemoryRecorder)
    if outcome.error or not recorder.batch_sizes:
        return None

    def keep(searched: "Searched") -> None:
        recorder.keep_batch_sizes(searched.found)
        if searched.best and isinstance(searched.best.recorder, MemoryRecorder):
            recorder.adopt(searched.best.recorder)

    return record(confirm(recorder.batch_sizes, run, bench), keep, recorder)


def _spread(command: str) -> UsageError:
    return UsageError(
        "--verify needs all ranks of the program on one machine, because other machines do not know the fixes",
        f"try a fix with {command} --vs KEY=VALUE on every machine",
    )


def record(results: Iterable[T], keep: Callable[[T], None], recorder: "Recorder[Any]") -> GpubenchError | None:
    """Calls `keep` with each result as it arrives. Returns the error that ended the trials, or None."""
    import msgspec

    from gpubench.report import after_run

    ended: GpubenchError | None = None
    try:
        for result in results:
            keep(result)
    except KeyboardInterrupt:  # the second Ctrl-C, between two measurements
        ended = Interrupted("interrupted")
    except GpubenchError as error:
        ended = error
    except OSError as error:  # such as a full disk
        ended = RunFailed(f"cannot write all results into {recorder.writer.path}: {error}", "free some disk space")
    if isinstance(ended, Interrupted):
        untried = recorder.findings.untried if recorder.findings else []
        command = "memory" if recorder.command == "memory" else "train-bench"
        ended = Interrupted(ended.message, on_the_rest(untried, command))
        if recorder.findings:
            recorder.conclude(msgspec.structs.replace(recorder.findings, interrupted=True))
    after_run.write_up(recorder.writer.path)
    return ended


def on_the_rest(untried: "Sequence[Mapping[str, Any]]", command: str) -> str:
    """The hint of interrupted trials: what is kept, and how to measure a fix that was not tried."""
    from gpubench.settings.keys import in_words

    kept = "the run directory keeps what was measured"
    if not untried:
        return kept
    fix = " ".join(f"--vs {key}={in_words(value)}" for key, value in untried[0].items())
    others = f", which is the first of {len(untried)} fixes that are left" if len(untried) > 1 else ""
    return f"{kept}; to go on, measure the same with gpubench {command} {fix}{others}"
