"""The search for the fastest settings, of a program that is a formula: what it tries, keeps, refuses and continues."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from reports import sound
from rich.console import Console
from rich.text import Text

from gpubench import units
from gpubench.bench import Bench
from gpubench.compare.evidence import open_run
from gpubench.diagnosis.case import ReadyData
from gpubench.errors import GpubenchError, Interrupted, OutOfMemory, RunDirectoryError, RunFailed, SettingsError
from gpubench.gain import Gain
from gpubench.metrics import PEAKS
from gpubench.report import tuning as report
from gpubench.report.terminal import Terminal
from gpubench.runs.summary import metric_of
from gpubench.settings.defaults import complete
from gpubench.settings.keys import flatten
from gpubench.settings.loading import Configuration, completed, load
from gpubench.settings.schema import TrainSettings
from gpubench.tuner import SearchFolder, Tuner, Wishes, look
from gpubench.tuning.conclusion import Contribution, Plan
from gpubench.tuning.progress import SearchDrawing, length
from gpubench.tuning.result import Tuning, read, save
from gpubench.tuning.treatments import Subject, choose

Settings = Mapping[str, Any]


class Program(Bench):
    """Stands in for the runs: each takes a time that its settings decide, times a noise of 0.2 %."""

    def __init__(self, folder: Path, pace: Callable[[Settings], float], **changes: Any) -> None:
        self.folder = folder
        self.ran: list[Settings] = []
        self._pace = pace
        self._changes = changes
        self.interrupt_at: int | None = None
        self.harms: Callable[[Settings], bool] = lambda settings: False
        self.peak: Callable[[Settings], float] = lambda settings: 1e9

    def complete(self, variant: Configuration[Any]) -> Configuration[Any]:
        return completed(variant, complete)

    def run(self, variants: Sequence[Configuration[Any]], **how: Any) -> list[Any]:
        runs, order = variants, how["order"]
        paces: list[list[float]] = [[] for _ in runs]
        errors: list[GpubenchError | None] = [None for _ in runs]
        for number in order or range(len(runs)):
            settings = flatten(runs[number].settings.model_dump(mode="json"))
            if len(self.ran) == self.interrupt_at:
                errors = [Interrupted("interrupted")] * len(runs)
                break
            self.ran.append(settings)
            noise = 1 + 0.002 * ((len(self.ran) * 7) % 5 - 2)
            try:
                paces[number].append(self._pace(settings) * noise)
            except GpubenchError as error:
                errors[number] = error
        return [self._outcome(*made) for made in zip(runs, paces, errors, strict=True)]

    def _outcome(self, run: Configuration[Any], paces: Sequence[float], error: GpubenchError | None) -> Any:
        settings = flatten(run.settings.model_dump(mode="json"))
        changes = dict(self._changes) | ({"loss": 5.0} if self.harms(settings) else {})
        pace = sum(paces) / len(paces) if paces else 1.0
        path = write_program(self.folder, max(1, len(paces)), pace, changes)
        metrics = {metric.name: metric for metric in open_run(path).summary.metrics} if paces else {}
        for name in [PEAKS[1]] if paces else []:
            metrics[name] = metric_of(name, [self.peak(settings)] * len(paces), 1, None, None)
        recorder = SimpleNamespace(
            writer=SimpleNamespace(path=path),
            findings=None,
            diagnosed_settings=settings,
            on_gpu=False,
            settings=run.settings,
            is_open=False,
            in_code=lambda changes: "",
            source={},
            ready_data=None,
            seconds=[1.0] * len(paces),
        )
        summary = SimpleNamespace(get=metrics.get, metrics=list(metrics.values()), missed={})
        return SimpleNamespace(recorder=recorder, summary=summary, error=error)


def made_in(program: Program) -> SearchFolder:
    return SearchFolder(program.folder / "made")


def write_program(folder: Path, repeats: int, pace: float, changes: Mapping[str, Any]) -> Path:
    from recorded_runs import write_run

    return write_run(folder, repeats=repeats, pace=pace, **changes)


def of_tiny(**given: Any) -> Configuration[Any]:
    return completed(load(TrainSettings, "tiny", {"device": "cpu", **given}), complete)


def searched(tmp_path: Path, program: Program, *, state: Tuning | None = None, **wishes: Any) -> Tuning:
    """The search to its end, or to its interruption."""
    base = of_tiny()
    asked: dict[str, list[Any]] = {
        "training.read_loss": [True],
        "data.workers": [2],
        "training.optimizer_impl": ["fused"],
    }
    if state is None:
        state = look(base, program, made_in(program), Wishes(only=frozenset(asked), asked=asked, **wishes), [])
    tuner = Tuner(made_in(program), state, base, program, lambda tuning: save(tmp_path, tuning))
    ended = None
    try:
        while block := tuner.next():
            tuner.advance(block)
    except Interrupted as error:
        ended = error
    return tuner.conclude(ended)


def planted(settings: Settings) -> float:
    """Workers save 20 %, a fused optimizer 10 %, and reading the loss costs 15 %."""
    pace = 0.8 if settings["data.workers"] == 2 else 1.0
    pace *= 0.9 if settings["training.optimizer_impl"] == "fused" else 1.0
    return pace * (1.15 if settings["training.read_loss"] else 1.0)


@pytest.mark.parametrize("late", [True, False])
def test_a_run_that_takes_too_long_ends_the_search_and_an_interruption_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr("gpubench.tuner.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Program):
        def run(self, variants: Sequence[Configuration[Any]], **how: Any) -> list[Any]:
            self.interrupt_at = 12
            made = super().run(variants, **how)
            if any(outcome.error for outcome in made):
                now[0] = how["until"] if late else now[0]
            return made

    found = searched(tmp_path, Slow(tmp_path, planted), budget=1000.0)
    assert found.status == ("completed" if late else "interrupted")
    assert found.runs == 11  # and the first look


def test_a_first_look_that_takes_longer_than_the_time_limit_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("gpubench.tuner.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Program):
        def run(self, variants: Sequence[Configuration[Any]], **how: Any) -> list[Any]:
            self.interrupt_at = 0
            now[0] = how["until"]
            return super().run(variants, **how)

    with pytest.raises(RunFailed, match="longer than the time limit of 60 s") as refusal:
        searched(tmp_path, Slow(tmp_path, planted), budget=60.0)
    assert now[0] == pytest.approx(66.0)
    assert "--budget 10m" in (refusal.value.hint or "")


def test_a_plan_without_a_run_has_no_duration() -> None:
    assert length(None, 37.0) == "but what is left of the limit is too little for a search; a run takes 37 s"
    assert length(Plan({"noise": 4}, 0, 4), 37.0) == "about 4 runs, about 2 min"


def test_what_helps_is_kept_and_its_share_is_known(tmp_path: Path) -> None:
    program = Program(tmp_path, planted)
    found = searched(tmp_path, program)
    assert found.status == "completed"
    assert found.keep == {"data.workers": 2, "training.optimizer_impl": "fused"}
    assert found.conclusion
    assert found.conclusion.gain
    assert found.conclusion.gain.low < 1 / 0.72 < found.conclusion.gain.high
    shares = {one.factor: one.with_others for one in found.conclusion.contributions}
    for name, truth in (("data.workers", 1 / 0.8), ("training.optimizer_impl", 1 / 0.9)):
        estimate = shares[name]
        assert estimate
        assert estimate.low < truth < estimate.high
    assert [one.factor for one in found.conclusion.dropped] == ["training.read_loss"]
    assert read(tmp_path) == found


def test_the_first_look_and_the_baseline_run_as_the_user_asked(tmp_path: Path) -> None:
    program = Program(tmp_path, planted)
    searched(tmp_path, program)
    look_at, *noise = program.ran[:5]
    assert look_at["profiling.enabled"]
    assert all(not settings["profiling.enabled"] for settings in noise)
    assert all(settings["data.workers"] == 0 and not settings["training.read_loss"] for settings in noise)
    assert len({settings["seed"] for settings in noise}) > 1  # so that the spread of the loss is known


def test_more_samples_for_each_update_are_another_batch(tmp_path: Path) -> None:
    asked = {"training.grad_accumulation": [4]}
    wishes = Wishes(only=frozenset(asked), asked=asked)
    program = Program(tmp_path, planted)
    (treatment,) = look(of_tiny(), program, made_in(program), wishes, []).treatments
    assert treatment.numbers == "batch"
    kept = look(
        of_tiny(), program, made_in(program), Wishes(only=frozenset(asked), asked=asked, keep_arithmetic=True), []
    )
    assert not kept.treatments
    printed = Terminal(quiet=True, verbosity=0).render(report.document(tmp_path, kept))
    assert "training.grad_accumulation" in printed  # with its reason


def test_a_search_of_inference_tries_no_setting_of_training(tmp_path: Path) -> None:
    program = Program(tmp_path, planted)

    def looked_at(base: Configuration[Any]) -> set[str]:
        found = look(base, program, made_in(program), Wishes(), [])
        return {one.name for one in found.treatments} | {one.name for one in found.untried}

    of_training, of_inference = looked_at(of_tiny()), looked_at(of_tiny(inference=True))
    assert of_training - of_inference == {
        *("training.optimizer_impl", "training.read_loss", "model.activation_checkpointing"),
        *("distributed.bucket_mb", "distributed.sync_gradients"),
    }


def test_a_setting_that_does_not_run_is_a_result(tmp_path: Path) -> None:
    def fails(settings: Settings) -> float:
        if settings["data.workers"] == 2:
            raise OutOfMemory("no memory is left")
        return planted(settings)

    found = searched(tmp_path, Program(tmp_path, fails))
    assert found.keep == {"training.optimizer_impl": "fused"}
    assert found.conclusion
    reasons = {one.factor: one.reason for one in found.conclusion.dropped}
    assert reasons["data.workers"] == "does not run"
    errors = {run.error for block in found.blocks for run in block.runs if run.error}
    assert errors == {"no memory is left"}


def test_a_faster_run_that_does_not_learn_is_rejected(tmp_path: Path) -> None:
    program = Program(tmp_path, planted)
    program.harms = lambda settings: settings["data.workers"] == 2
    found = searched(tmp_path, program)
    assert found.keep == {"training.optimizer_impl": "fused"}
    assert found.losses["1,0,0" if found.treatments[0].name == "data.workers" else "0,1,0"].outcome == "harmed"


def test_what_needs_too_much_memory_is_not_kept(tmp_path: Path) -> None:
    program = Program(tmp_path, planted)
    program.peak = lambda settings: 2e9 if settings["data.workers"] else 1e9
    found = searched(tmp_path, program, most_peak=1.5e9)
    assert found.keep == {"training.optimizer_impl": "fused"}
    assert found.conclusion
    assert {one.factor: one.reason for one in found.conclusion.dropped}["data.workers"] == "memory"


def test_an_interrupted_search_continues_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = searched(tmp_path / "whole", Program(tmp_path, planted))
    program = Program(tmp_path, planted)
    program.interrupt_at = 9
    (tmp_path / "part").mkdir()
    begun = searched(tmp_path / "part", program)
    assert begun.status == "interrupted"
    assert begun.runs == 8  # besides the first look
    program.interrupt_at = None
    ended = searched(tmp_path / "part", program, state=read(tmp_path / "part"))
    assert ended.keep == whole.keep
    combinations = [[run.combination for block in one.blocks for run in block.runs] for one in (ended, whole)]
    assert combinations[0][:8] == combinations[1][:8]


def test_a_time_limit_leaves_runs_to_confirm(tmp_path: Path) -> None:
    found = searched(tmp_path, Program(tmp_path, planted), budget=1e-6)
    assert found.runs == 0
    assert not found.keep
    assert "setting" in report.headline(found)


def test_the_runs_and_the_time_of_the_first_look_are_counted_apart(tmp_path: Path) -> None:
    found = msgspec.structs.replace(searched(tmp_path, Program(tmp_path, planted)), look_seconds=20.0)
    found = msgspec.structs.replace(found, seconds=20.0 + 2.0 * found.runs)
    assert found.seconds_a_run == 2
    said = Terminal(quiet=True, verbosity=0).render(report.document(tmp_path, found))
    assert f"{found.runs} runs in {units.seconds(2.0 * found.runs)} after a first look of {units.seconds(20.0)}" in said
    short = msgspec.structs.replace(
        found, blocks=[], keep={}, conclusion=None, seconds=21.0, look_seconds=20.0, budget=25.0
    )
    said = "25 s are too little: the first look took 20 s, a run takes 10 s, and 9 runs can prove one setting"
    assert said in report.headline(short)


def test_what_the_loader_has_measured_of_the_program_is_said_as_the_limit_of_its_data(tmp_path: Path) -> None:
    found = searched(tmp_path, Program(tmp_path, planted))
    known = msgspec.structs.replace(found, ready_data=ReadyData(2.1, "results/loader/one"))
    said = " ".join(Terminal(quiet=True, verbosity=0).render(report.document(tmp_path, known)).split())
    assert "2.10 times as fast, as gpubench loader has measured in results/loader/one: no settings of the data" in said
    assert "gpubench loader" not in Terminal(quiet=True, verbosity=0).render(report.document(tmp_path, found))


@pytest.mark.parametrize("changes", [{"samples": 8}, {}])
def test_the_report_says_what_to_run(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    found = searched(tmp_path, Program(tmp_path, planted, **changes))
    page = report.document(tmp_path, found)
    assert "data.workers=2" in page.headline
    report.write(tmp_path, found, "seed: 0\n")
    sound((tmp_path / "report.html").read_text())
    assert (tmp_path / "best.yaml").read_text() == "seed: 0\n"
    report.write(tmp_path, found, None)  # more runs have disproved it
    assert not (tmp_path / "best.yaml").exists()


def test_nothing_is_said_of_what_was_never_run(tmp_path: Path) -> None:
    found = searched(tmp_path, Program(tmp_path, planted), most_runs=3)
    never = [one.name for one in found.treatments if not found.has_run(one.name, 1)]
    assert len(never) == 2
    page = report.document(tmp_path, found)
    brief, full = (Terminal(quiet=True, verbosity=verbosity).render(page) for verbosity in (0, 1))
    assert not any(name in brief for name in never)
    assert all(name in full for name in never)


def test_the_live_table_gives_each_of_its_lines_a_row_and_no_gain_of_what_was_never_run(tmp_path: Path) -> None:
    state = searched(tmp_path, Program(tmp_path, planted), most_runs=3)
    state = msgspec.structs.replace(state, most_runs=30)
    tuner = Tuner(SearchFolder(tmp_path), state, of_tiny(), Program(tmp_path, planted), lambda _: None)
    block = tuner.next()
    assert block
    drawing = SearchDrawing(SimpleNamespace(draw=lambda experiment, progress: Text("the run")))
    drawing.show(tuner.tuning, block, tuner.plan(), tuner.standing())
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(drawing.draw("", object()))
    lines = console.export_text().splitlines()
    assert lines[2].startswith(block.why)
    rows = [line for line in lines if "=" in line]
    assert [" x [" in row for row in rows].count(True) == 1


def test_the_progress_of_a_patch_says_what_is_run() -> None:
    inner: Any = SimpleNamespace(
        draw=lambda experiment, progress: Text("the run"), describe=lambda progress: "patched, repeat 2 of 6"
    )
    drawing = SearchDrawing(inner)
    drawing.show_patch()
    assert [drawing.describe(object()) for _ in range(3)] == ["patch  patched, repeat 2 of 6"] * 3
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(drawing.draw("", object()))
    lines = console.export_text().splitlines()
    assert lines[0] == "patch"
    assert "the patched program is run beside that as it was" in " ".join(lines)
    assert lines[-1] == "the run"


@pytest.mark.parametrize("damage", ["another order", "too many"])
def test_a_search_that_this_version_would_not_have_made_is_not_continued(tmp_path: Path, damage: str) -> None:
    state = searched(tmp_path, Program(tmp_path, planted), most_runs=12)
    *blocks, last = state.blocks
    runs = [*reversed(last.runs)] if damage == "another order" else last.runs * 9
    state = msgspec.structs.replace(state, blocks=[*blocks, msgspec.structs.replace(last, runs=runs)])
    with pytest.raises(RunDirectoryError, match="this version"):
        searched(tmp_path, Program(tmp_path, planted), state=state)


SUBJECT = Subject({}, on_gpu=False, cores=4, ranks=1, sample_shape="", waits=0.5)
KNOWN = frozenset({"data.workers", "precision", "training.batch_size", "performance.cpu_threads", "data.pin_memory"})


def subject(**changes: Any) -> Subject:
    settings = {"data.workers": 0, "precision": "fp32", "training.batch_size": 8, "performance.cpu_threads": 4}
    settings["data.pin_memory"] = False
    return Subject(**(vars(SUBJECT) | {"settings": settings} | changes))


def chosen(about: Subject, **options: Any) -> tuple[dict[str, list[Any]], dict[str, str]]:
    treatments, untried = choose(about, KNOWN, **options)
    levels = {one.name: [changes[one.name] for changes in one.levels] for one in treatments}
    return levels, {one.name: one.reason for one in untried}


def test_levels_differ_from_what_is_set() -> None:
    levels, _ = chosen(subject())
    assert levels == {"precision": ["bf16"], "data.workers": [1, 2, 4], "performance.cpu_threads": [1, 2]}


@pytest.mark.parametrize(("now", "tried"), [("bf16", ["fp32"]), ("amp", ["fp32"]), ("fp32", None)])
def test_a_cpu_without_arithmetic_in_16_bits_is_tried_in_fp32(now: str, tried: list[str] | None) -> None:
    lacking = subject(settings={**subject().settings, "precision": now}, reduced_types=[])
    assert chosen(lacking)[0].get("precision") == tried
    having = subject(settings=lacking.settings, reduced_types=["bf16", "fp16"])
    assert chosen(having)[0].get("precision") == (["bf16"] if now == "fp32" else None)


def test_what_cannot_matter_is_not_tried() -> None:
    levels, untried = chosen(subject(waits=0.001))
    assert "data.workers" not in levels
    assert "0.1" in untried["data.workers"]
    assert untried["data.pin_memory"] == "the model runs on a CPU"


def test_another_batch_is_tried_on_request_only() -> None:
    assert "training.batch_size" in chosen(subject())[1]
    assert chosen(subject(), only=frozenset({"training.batch_size"}))[0] == {"training.batch_size": [16, 32]}
    assert chosen(subject(), asked={"training.batch_size": [8, 12]})[0]["training.batch_size"] == [12]


def test_the_arithmetic_can_be_kept() -> None:
    assert "precision" not in chosen(subject(), keep_arithmetic=True)[0]


def test_what_a_profile_proposes_comes_first() -> None:
    levels, _ = chosen(subject(fixes=[{"performance.cpu_threads": 3}, {"data.workers": 3}]))
    assert list(levels) == ["performance.cpu_threads", "data.workers", "precision"]
    assert levels["performance.cpu_threads"][0] == 3


def test_what_needs_too_much_memory_is_tried_with_settings_that_save_it_first() -> None:
    settings = {"precision": "fp32", "model.activation_checkpointing": False, "performance.expandable_segments": False}
    large = subject(settings=settings, on_gpu=True, is_too_large=True)
    treatments, _ = choose(large, frozenset(settings))
    assert [one.name for one in treatments] == [
        "model.activation_checkpointing",
        "performance.expandable_segments",
        "precision",
    ]
    small = subject(settings=settings, on_gpu=True)
    assert [one.name for one in choose(small, frozenset(settings))[0]] == ["precision"]


def test_a_gpu_has_other_levels() -> None:
    levels, untried = chosen(subject(on_gpu=True))
    assert levels["precision"] == ["tf32", "bf16"]
    assert levels["data.pin_memory"] == [True]
    assert untried["performance.cpu_threads"] == "the model runs on a GPU"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--only", "performance.compil"), "performance.compil"),
        (("--only", ","), "names no setting"),
        (("--only", "training.steps"), "training.steps"),
        (("--try", "seed=1"), "seed"),
        (("--budget", "soon"), "is not a time"),
        (("--memory", "much"), "is not a size"),
        (("--runs", "few"), "is not a number"),
        (("--try", "data.workers"), "KEY=VALUE"),
        (("--try", "data.workers=many"), "data.workers"),
        (("--inference", "--try", "training.optimizer_impl=fused"), "inference does not use it"),
        (("--inference", "--only", "training.read_loss"), "inference does not use it"),
        (("--keep-arithmetic", "--try", "precision=bf16"), "--keep-arithmetic tries no other precision"),
        (("--keep-arithmetic", "--only", "training.batch_size"), "--keep-arithmetic tries no other precision"),
        (("--data.workers=2", "--try", "data.workers=2"), "--try data.workers: 2 is its value already"),
        (("--resume", "."), "holds no search by tune"),
        (("--resume", ".", "--steps", "3"), "--resume"),
    ],
)
def test_bad_input_is_one_error_before_anything_runs(
    command_line: Callable[..., Any], arguments: Sequence[str], part: str
) -> None:
    done = (
        command_line("tune", "--config", "tiny", *arguments)
        if arguments[0] != "--resume"
        else command_line("tune", *arguments)
    )
    assert done.code == 2
    assert part in done.stderr.splitlines()[0]
    assert not done.results.exists()


def test_a_value_is_checked_before_anything_runs() -> None:
    with pytest.raises(SettingsError):
        of_tiny(**{"data.workers": "many"})


def test_a_limit_that_leaves_nothing_to_try_is_named_as_the_reason(tmp_path: Path) -> None:
    found = searched(tmp_path, Program(tmp_path, planted), most_runs=1)
    shown = report.document(tmp_path, found)
    assert "no setting was tried" in shown.headline
    assert "a limit of 1 run" in shown.headline
    assert f"--resume {tmp_path} --runs 3" in Terminal(quiet=True, verbosity=0).render(shown)


def test_the_headline_names_no_setting_whose_own_part_is_not_proved(tmp_path: Path) -> None:
    found = searched(tmp_path, Program(tmp_path, planted))
    assert found.conclusion
    (sure,) = found.conclusion.contributions[:1]
    idle = next(one for one in found.treatments if one.name != sure.factor)
    unsure = Contribution(idle.name, 1, Gain(1.02, 0.97, 1.07), Gain(1.01, 0.86, 1.18))
    for kept, named in (([sure, unsure], "data.workers=2"), ([unsure, unsure], "2 settings together")):
        conclusion = replace(found.conclusion, contributions=kept)
        page = report.document(tmp_path, msgspec.structs.replace(found, conclusion=conclusion))
        assert page.headline.endswith(f"as fast with {named}")
        said = Terminal(quiet=True, verbosity=0).render(page)
        assert f"not proved by themselves: {idle.name}" in said
