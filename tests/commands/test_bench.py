"""Which variants a command puts on the bench, what they are called, and how the bench runs them."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cli import complaint
from running import Finished

from gpubench.bench import Bench
from gpubench.commands.options import Shown
from gpubench.commands.running import run_and_report
from gpubench.commands.variants import Versus, of_values, without_change
from gpubench.errors import Interrupted
from gpubench.host.recorder import Recorder
from gpubench.host.schedule import Outcome
from gpubench.registry import PROGRAM, RUN_KINDS, kind_of
from gpubench.report.terminal import Terminal
from gpubench.settings import identity
from gpubench.settings.commands import COMMANDS
from gpubench.settings.loading import Configuration, load
from gpubench.settings.programs import ProgramSettings
from gpubench.settings.schema import TrainSettings

CommandLine = Callable[..., Finished]
TRAINING = kind_of("train-bench")


def of_tiny(**given: Any) -> Configuration[Any]:
    return load(TrainSettings, "tiny", {"device": "cpu", **given})


def of_program(**given: Any) -> Configuration[Any]:
    return load(ProgramSettings, None, {"program.command": "true", **given})


def names(variants: Sequence[Configuration[Any]]) -> list[str]:
    return [name or "" for name in identity.variants(variants)]


@pytest.mark.parametrize(
    ("versus", "called", "own"),
    [
        (Versus(settings=["data.workers=2"]), ["baseline", "workers=2"], 0),
        (Versus(arguments="--fast"), ["baseline", "+ --fast"], 0),
        (Versus(ref="main"), ["main", "working tree"], 1),
    ],
)
def test_variants_of_a_program_are_named_by_what_is_asked(versus: Versus, called: list[str], own: int) -> None:
    variants = versus.variants(of_program(), kind_of(PROGRAM).complete)
    assert names(variants) == called
    assert (versus.own, variants[own].settings.program.command) == (own, "true")


@pytest.mark.parametrize(
    ("base", "asked", "said"),
    [
        (of_tiny(), ["data.workers=0"], "--vs data.workers=0 is what is set already: two equal runs are compared"),
        (of_tiny(), ["data.workers=0", "precision=bf16"], "--vs data.workers=0 is what is set already"),
        (of_tiny(), ["precision=bf16"], None),
        (of_program(**{"data.workers": 2}), ["data.workers=2"], "--vs data.workers=2 is what is set already"),
        (of_program(), ["data.workers=2"], None),
    ],
)
def test_a_version_that_changes_nothing_is_said_before_it_runs(
    base: Configuration[Any], asked: list[str], said: str | None
) -> None:
    found = without_change(Versus(asked).variants(base, kind_of(base.settings.command).complete))
    assert found == said or (said and found and found.startswith(said))


def test_that_two_equal_runs_are_compared_is_said_also_if_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: Bench, *_: Any, **how: Any) -> Any:
        raise Interrupted("interrupted")

    monkeypatch.setattr(Bench, "run", run)
    bench = Bench(TRAINING, Terminal(quiet=True, verbosity=0))
    variants = Versus(["data.workers=0"]).variants(of_tiny(), TRAINING.complete)
    with pytest.raises(Interrupted):
        run_and_report(bench, variants, Shown(json=False, quiet=True, verbose=0))
    assert "--vs data.workers=0 is what is set already: two equal runs are compared" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--vs-args", "--vs-ref"])
def test_a_version_without_content_is_refused(command_line: CommandLine, option: str) -> None:
    said, hint = complaint(command_line("train-bench", option, "", "--", "true"))
    assert said == f"{option} is empty"
    assert hint
    assert f"{option} needs a program" in complaint(command_line("train-bench", option, ""))[0]


def test_what_several_batch_sizes_cannot_be_asked_is_refused_as_of_one(command_line: CommandLine) -> None:
    common = ("train-bench", "--config", "tiny", "--device", "cpu", "--target-precision", "1%", "--repeats", "3")
    one, several = (complaint(command_line(*common, "--batch-size", size)) for size in ("4", "4,8"))
    assert one == several
    assert "measurement.repeats=3 has no effect with a target precision" in one[0]


class Recorded:
    """A bench that makes its outcomes up, and notes what it was asked to run. The user stops it at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stopped_at: str) -> None:
        self.ran: list[list[str]] = []
        self._stopped_at = stopped_at
        monkeypatch.setattr("gpubench.host.schedule.open_runs", lambda recorder, variants, argv: variants)
        monkeypatch.setattr("gpubench.host.schedule.run", self._run)
        monkeypatch.setattr("gpubench.report.after_run.write_up", lambda path: None)

    def _run(self, variants: Sequence[Configuration[Any]], watch: Any, **how: Any) -> list[Outcome]:
        self.ran.append([identity.label_of(one) for one in variants])
        return [self._outcome(one) for one in variants]

    def _outcome(self, variant: Configuration[Any]) -> Outcome:
        name = identity.label_of(variant)
        recorder = SimpleNamespace(elsewhere=None, writer=SimpleNamespace(path=None), variant=name)
        error = Interrupted("interrupted") if self._stopped_at in name else None
        return Outcome(cast("Any", recorder), "completed", cast("Any", None), error)


def test_variants_run_together_or_one_after_the_other_until_the_user_stops_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch, "batch_size=8")
    bench = Bench(TRAINING, Terminal(quiet=True, verbosity=0))
    variants = of_values(of_tiny(), "training.batch_size", ["4", "8", "16"], bench.kind.complete)
    assert len(bench.run(variants)) == 3
    assert [one.split()[-1] for one in recorded.ran[0]] == ["batch_size=4", "batch_size=8", "batch_size=16"]
    with pytest.raises(Interrupted):
        bench.run_alone(variants)
    assert [one.split()[-1] for (one,) in recorded.ran[1:]] == ["batch_size=4", "batch_size=8"]


@pytest.mark.parametrize("command", RUN_KINDS)
def test_every_kind_of_run_has_a_bench_for_its_work(command: str) -> None:
    bench = Bench(kind_of(command), Terminal(quiet=True, verbosity=0))
    timing = bench.timing.kind
    assert timing.timed
    assert timing.command == bench.kind.work == timing.work
    assert issubclass(COMMANDS[command], COMMANDS[timing.command])
    assert issubclass(cast("Any", bench.kind.recorder), Recorder)
