"""Where a setting comes from: defaults < preset or file < environment < command line."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_settings import BaseSettings

import gpubench
from gpubench.commands import app
from gpubench.errors import SettingsError, UsageError
from gpubench.kinds.pipeline.settings import PipeSettings
from gpubench.registry import LOADER, OF_PROGRAMS, kind_of
from gpubench.settings.commands import COMMANDS
from gpubench.settings.field import aliases, fields
from gpubench.settings.keys import ENVIRONMENT_PREFIX
from gpubench.settings.loading import (
    Configuration,
    apply_overrides,
    load,
    nearest,
    negations,
    parse_assignments,
    parse_unknown_overrides,
)
from gpubench.settings.schema import RunSettings, TrainSettings


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_each_source_yields_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("momentum", "grad_accumulation", "batch_size", "learning_rate")
    file = write(tmp_path, "training: {grad_accumulation: 2, batch_size: 2, learning_rate: 2}")
    monkeypatch.setenv("GPUBENCH_TRAINING__BATCH_SIZE", "3")
    monkeypatch.setenv("GPUBENCH_TRAINING__LEARNING_RATE", "3")
    loaded = load(TrainSettings, file, {"training.learning_rate": "4"})
    assert [getattr(loaded.settings.training, key) for key in keys] == [0.9, 2, 3, 4]
    assert [loaded.origins.get(f"training.{key}") for key in keys] == [
        None,
        file,
        "GPUBENCH_TRAINING__BATCH_SIZE",
        "command line",
    ]


def test_a_preset_is_named_without_path_or_suffix() -> None:
    loaded = load(TrainSettings, "resnet50")
    assert loaded.settings.model.name == "resnet50"
    assert loaded.origins["model.name"] == "resnet50"


def test_a_preset_is_found_whatever_the_folder_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_text("experiment: mine")
    assert load(TrainSettings, "tiny").settings.experiment == "train-bench"
    assert load(TrainSettings, "./tiny").settings.experiment == "mine"


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "{}"])
def test_an_empty_file_changes_nothing(tmp_path: Path, text: str) -> None:
    assert load(TrainSettings, write(tmp_path, text)).settings == TrainSettings()


@pytest.mark.parametrize("alias", aliases(TrainSettings))
def test_an_alias_means_its_dot_key(tmp_path: Path, alias: str) -> None:
    value = {"model": "text", "data": "text", "target_precision": "1%", "measure_peak": "true"}.get(alias, "3")
    by_alias = load(TrainSettings, write(tmp_path, f"{alias}: {value}"))
    assert by_alias.settings == load(TrainSettings, None, {aliases(TrainSettings)[alias]: value}).settings
    assert list(by_alias.origins) == [aliases(TrainSettings)[alias]]


@pytest.mark.parametrize("text", ["training: {epochs: 3}", "training.epochs: 3", "epochs: 3"])
def test_a_file_may_nest_or_not(tmp_path: Path, text: str) -> None:
    assert load(TrainSettings, write(tmp_path, text)).settings.training.epochs == 3


@pytest.mark.parametrize("null", ["null", "none", "None"])
def test_null_takes_a_setting_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, null: str) -> None:
    file = write(tmp_path, "training: {steps: 5, batch_size: 5}")
    monkeypatch.setenv("GPUBENCH_TRAINING__BATCH_SIZE", null)
    training = load(TrainSettings, file, {"steps": null, "epochs": "2"}).settings.training
    assert (training.steps, training.batch_size, training.epochs) == (None, None, 2)


def test_settings_once_loaded_no_longer_see_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(TrainSettings).settings
    monkeypatch.setenv("GPUBENCH_SEED", "7")
    assert isinstance(settings, TrainSettings)
    assert not isinstance(settings, BaseSettings)
    assert TrainSettings.model_validate(settings.model_dump()).seed == 0


def test_a_value_that_makes_no_sense_is_told_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBENCH_MEASUREMENT__TARGET_PRECISION", "3")
    with pytest.raises(SettingsError) as caught:
        load(TrainSettings, None)
    said = "measurement.target_precision: '3' is a fraction"
    assert caught.value.hint == "did you mean 3%?"
    assert caught.value.message == f"{said} (from GPUBENCH_MEASUREMENT__TARGET_PRECISION)"


def test_a_finished_run_is_read_without_todays_environment(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUBENCH_SEED", "7")
    config = finished_run / "config.yaml"
    assert load(TrainSettings, str(config)).settings.seed == 0
    assert load(TrainSettings, str(config), {"seed": "8"}).settings.seed == 8
    elsewhere = write(tmp_path, config.read_text())  # the same text, but of no run
    assert load(TrainSettings, elsewhere).settings.seed == 7


def test_a_finished_run_is_read_though_todays_environment_is_wrong(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUBENCH_NO_SUCH_SETTING", "7")
    assert load(TrainSettings, str(finished_run / "config.yaml")).settings.experiment == "short"


def test_overrides_say_where_they_are_from(tmp_path: Path) -> None:
    base = load(TrainSettings, write(tmp_path, "training: {batch_size: 2, steps: 9}"))
    changed = base.with_overrides({"batch_size": "4"}, "--vs")
    assert (changed.settings.training.batch_size, changed.settings.training.steps) == (4, 9)
    assert changed.origins["training.batch_size"] == "--vs"
    assert base.settings.training.batch_size == 2


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        ([], {}),
        (["--training.epochs=5"], {"training.epochs": "5"}),
        (["--training.epochs", "5"], {"training.epochs": "5"}),
        (["--training.grad-accumulation=5"], {"training.grad_accumulation": "5"}),
        (["--data.path=a=b-c"], {"data.path": "a=b-c"}),
        (["--data.path="], {"data.path": ""}),
        (["--logging.wandb"], {"logging.wandb": "true"}),
        (
            ["--logging.wandb", "--performance.compile", "false"],
            {"logging.wandb": "true", "performance.compile": "false"},
        ),
        (["--training.weight_decay", "-1"], {"training.weight_decay": "-1"}),
        (["--training.steps=null"], {"training.steps": None}),
        (["--seed=1", "--seed=2"], {"seed": "2"}),
    ],
)
def test_options_by_dot_key(arguments: list[str], overrides: dict[str, Any]) -> None:
    assert parse_unknown_overrides(arguments) == overrides


@pytest.mark.parametrize("arguments", [["junk"], ["-x"], ["--"], ["--seed=1", "2"], ["--seed", "1", "2"]])
def test_what_is_no_option_is_refused_by_name(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match=f"unexpected argument '{arguments[-1]}'"):
        parse_unknown_overrides(arguments)


def test_assignments_are_options_without_dashes() -> None:
    found = parse_assignments(TrainSettings, ["precision=fp32", "data.path=a=b"])
    assert found == {"precision": "fp32", "data.path": "a=b"}


@pytest.mark.parametrize("text", ["", "precision", "precision=", "=fp32", "="])
def test_an_assignment_needs_both_sides(text: str) -> None:
    with pytest.raises(UsageError, match="is not KEY=VALUE"):
        parse_assignments(TrainSettings, [text])


def test_overrides_are_applied_to_a_copy() -> None:
    before = TrainSettings()
    after = apply_overrides(before, {"training.epochs": "5", "performance.compile": "true", "world_size": 2})
    assert (after.training.epochs, after.performance.compile, after.distributed.world_size) == (5, True, 2)
    assert before == TrainSettings()


def test_overrides_are_checked() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'training\.epoch'"):
        apply_overrides(TrainSettings(), {"training.epoch": 5})
    with pytest.raises(SettingsError, match=r"training\.epochs = 'x'"):
        apply_overrides(TrainSettings(), {"training.epochs": "x"})


@pytest.mark.parametrize(
    ("key", "offered"),
    [
        ("stps", "steps"),
        ("precison", "precision"),
        ("training.epoch", "training.epochs"),
        ("training.epochs.x", "training.epochs"),
        ("trainig.epochs", "training.epochs"),
        ("batchsize", "batch_size"),
        ("optimiser", "training.optimizer"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(key: str, offered: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        load(TrainSettings, None, {key: "1"})
    assert refusal.value.message == f"unknown setting {key!r}"
    assert refusal.value.hint == f"did you mean {offered!r}?"


@pytest.mark.parametrize(
    ("key", "offered"),
    [("work.seed", "seed"), ("work.sample", "work.samples"), ("sampling.step", "sampling.steps")],
)
def test_a_name_that_resembles_a_setting_of_another_section_more_is_answered_with_that(key: str, offered: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        load(PipeSettings, None, {key: "1"})
    assert refusal.value.hint == f"did you mean {offered!r}?"


def test_a_key_that_resembles_none_is_sent_to_the_list() -> None:
    with pytest.raises(SettingsError) as refusal:
        load(TrainSettings, None, {"qqq": "1"})
    assert refusal.value.hint == "--print-config shows every setting; --help the common ones"


@pytest.mark.parametrize("text", ["training: {epoch: 3}", "{training.epoch: 3}"])
def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingsError) as refusal:
        load(TrainSettings, file)
    assert refusal.value.message == f"unknown setting 'training.epoch' (from {file})"
    assert refusal.value.hint == "did you mean 'training.epochs'?"


@pytest.mark.parametrize(
    ("variable", "offered"),
    [
        ("GPUBENCH_TRAINING__EPOCH", "GPUBENCH_TRAINING__EPOCHS"),
        ("GPUBENCH_STEPS", "GPUBENCH_TRAINING__STEPS"),
        ("GPUBENCH_MODEL", "GPUBENCH_MODEL__NAME"),
        ("GPUBENCH_TRAINING_EPOCHS", "GPUBENCH_TRAINING__EPOCHS"),
    ],
)
def test_an_unknown_variable_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, variable: str, offered: str
) -> None:
    monkeypatch.setenv(variable, "3")
    with pytest.raises(SettingsError) as refusal:
        load(TrainSettings)
    assert refusal.value.message == f"unknown setting in environment variable {variable}"
    assert refusal.value.hint == f"did you mean '{offered}'?"


def test_no_variable_that_gpubench_sets_for_its_children_is_like_that_of_a_setting() -> None:
    package = Path(gpubench.__file__).parent
    named = {name for file in package.rglob("*.py") for name in re.findall(r'= "(_?GPUBENCH_\w*)"', file.read_text())}
    assert {name for name in named if not name.startswith("_")} == {ENVIRONMENT_PREFIX}
    assert "_GPUBENCH_STORE_SOCKET" in named


@pytest.mark.parametrize("null", [":", ": null", ": {}", ": ~"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_section_has_the_defaults(tmp_path: Path, command: str, null: str) -> None:
    cls = COMMANDS[command]
    sections = dict.fromkeys(key.partition(".")[0] for key in fields(cls) if "." in key)
    loaded = load(cls, write(tmp_path, "\n".join(f"{name}{null}" for name in sections)))
    assert loaded.settings == load(cls).settings
    assert set(loaded.origins) <= set(aliases(cls).values()), "an alias of a setting may be the name of a section"


@pytest.mark.parametrize("command", COMMANDS)
def test_null_is_the_default_of_every_setting(tmp_path: Path, command: str) -> None:
    cls = COMMANDS[command]
    everything = "\n".join(f"{key}: null" for key in fields(cls))
    assert load(cls, write(tmp_path, everything)).settings == load(cls).settings
    assert load(cls, None, dict.fromkeys(fields(cls), "null")).settings == load(cls).settings


def test_an_empty_section_takes_back_what_a_file_sets_in_it(tmp_path: Path) -> None:
    loaded = load(TrainSettings, write(tmp_path, "training: {steps: 5, seconds: null}\nseed: 3"), {"training": "null"})
    assert (loaded.settings.training.steps, loaded.settings.seed) == (None, 3)
    assert list(loaded.origins) == ["seed"]


HOW = {
    "option": ({"profiling.active": "2"}, "", {}),
    "file": ({}, "profiling: {active: 2}", {}),
    "variable": ({}, "", {"GPUBENCH_PROFILING__ACTIVE": "2"}),
}


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if not {"memory", LOADER} & set(command.split("-"))]
)
@pytest.mark.parametrize(("overrides", "text", "variables"), HOW.values(), ids=HOW)
def test_who_says_how_to_record_is_given_a_recording(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    overrides: dict[str, str],
    text: str,
    variables: dict[str, str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    loaded = load(COMMANDS[command], write(tmp_path, text), overrides)
    assert (loaded.settings.profiling.enabled, loaded.settings.profiling.active) == (True, 2)
    if "profile" not in command:
        assert "enabled: true" in loaded.to_yaml()
        assert loaded.origins["profiling.enabled"] == "default: profiling.active is set"
    silent = load(COMMANDS[command], write(tmp_path, text), {**overrides, "profiling.enabled": "false"})
    assert not silent.settings.profiling.enabled


@pytest.mark.parametrize("text", ["", "profiling:", "profiling: {enabled: null}", "profiling: {active: null}"])
def test_nothing_is_recorded_without_a_word_about_it(tmp_path: Path, text: str) -> None:
    assert not load(TrainSettings, write(tmp_path, text)).settings.profiling.enabled


@pytest.mark.parametrize("text", ["training: 5", "training: []", "training: [1]", "training: ''", "training: false"])
def test_a_section_is_not_a_value(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"^training = .*: a section of settings takes no value") as refusal:
        load(TrainSettings, write(tmp_path, text))
    assert refusal.value.hint == "for example training.batch_size"


def test_every_wrong_value_is_told_at_once() -> None:
    with pytest.raises(SettingsError, match=r"seed = '-1'.*; training\.steps = 'x'"):
        load(TrainSettings, None, {"seed": "-1", "steps": "x"})


def test_the_yaml_names_every_setting_and_its_source(tmp_path: Path) -> None:
    loaded = load(TrainSettings, write(tmp_path, "seed: 3"), {"training.epochs": "2"})
    lines = [line.split("#") for line in loaded.to_yaml().splitlines()]
    origins = {text.strip(): comment[0].strip() for text, *comment in lines if comment}
    assert len(origins) == len(fields(TrainSettings))
    assert origins["seed: 3"] == str(tmp_path / "mine.yaml")
    assert origins["epochs: 2"] == "command line"
    assert origins["device: null"] == "default"


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t #:'\"-"), max_size=120)


@settings(deadline=None)
@given(project=texts, path=texts, seed=st.integers(0, 2**63 - 1), rate=st.floats(1e-300, 1e300))
def test_the_yaml_reads_back_as_the_same_settings(project: str, path: str, seed: int, rate: float) -> None:
    wanted = TrainSettings.model_validate(
        {
            "seed": seed,
            "data": {"path": path},
            "training": {"learning_rate": rate},
            "logging": {"wandb_project": project},
        }
    )
    document = yaml.safe_load(Configuration(wanted, {}).to_yaml())
    assert TrainSettings.model_validate(document) == wanted


def test_every_command_that_has_settings_is_known_by_them() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    has_settings = {name for name, one in commands.items() if any("--print-config" in each.opts for each in one.params)}
    run_by_others = set(OF_PROGRAMS)  # what they run after --; tune has settings of both, and judge those of programs
    assert has_settings - {"tune", "judge"} | run_by_others == COMMANDS.keys()
    assert len(set(COMMANDS.values())) == len(COMMANDS), "a class does not tell whose it is"
    assert all(issubclass(cls, RunSettings) for cls in COMMANDS.values())


@pytest.mark.parametrize("variable", ["gpubench_seed", "GpuBench_Seed", "GPUBENCH_training__STEPS"])
def test_a_variable_counts_in_capitals_or_not(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "7")
    loaded = load(TrainSettings)
    assert 7 in (loaded.settings.seed, loaded.settings.training.steps)
    assert list(loaded.origins.values()) == [variable]


@pytest.mark.parametrize(
    ("argument", "overrides"),
    [
        ("--profiling.no-record-shapes", {"profiling.record_shapes": "false"}),
        ("--profiling.no_record_shapes", {"profiling.record_shapes": "false"}),
        ("--no-profiling.record-shapes", {"profiling.record_shapes": "false"}),
        ("--no-record-shapes", {"profiling.record_shapes": "false"}),
        ("--performance.no-compile", {"performance.compile": "false"}),
        ("--performance.no-channels-last", {"performance.channels_last": "false"}),
        ("--no-measure-peak", {"measurement.measure_peak": "false"}),
        ("--performance.no-compile=true", {"performance.compile": "false"}),
        ("--performance.no-compile=False", {"performance.compile": "true"}),
    ],
)
def test_a_setting_that_is_true_or_false_is_turned_off_by_its_negation(
    argument: str, overrides: dict[str, str]
) -> None:
    assert parse_unknown_overrides([argument, "--training.steps=5"], TrainSettings) == overrides | {
        "training.steps": "5"
    }


def test_a_negation_takes_no_value() -> None:
    with pytest.raises(UsageError, match="unexpected argument '5'"):
        parse_unknown_overrides(["--performance.no-compile", "5"], TrainSettings)
    with pytest.raises(UsageError, match=r"turns performance\.compile off and does not take the value '5'"):
        parse_unknown_overrides(["--performance.no-compile=5"], TrainSettings)


@pytest.mark.parametrize(("command", "cls"), COMMANDS.items())
def test_every_switch_has_a_negation_and_none_means_anything_else(command: str, cls: type[RunSettings]) -> None:
    switches = {key for key, field in fields(cls).items() if "bool" in str(field.annotation)}
    assert set(negations(cls).values()) == switches
    assert not negations(cls).keys() & {*fields(cls), *aliases(cls)}
    command = kind_of(command).run_by
    for option in typer.main.get_command(app).commands[command].params:  # type: ignore[attr-defined]
        for name in (*option.opts, *option.secondary_opts):
            key = negations(cls).get(name.removeprefix("--").replace("-", "_"))
            assert key in (None, option.name), f"{name} is an option of {command}"


def test_a_misspelt_negation_is_offered_what_it_may_mean() -> None:
    for typed, meant in (
        ("profiling.no_record_shape", "profiling.no_record_shapes"),
        ("no_compil", "no_compile"),
        ("performance.nocompile", "performance.no_compile"),
    ):
        with pytest.raises(SettingsError) as refused:
            load(TrainSettings, None, parse_unknown_overrides([f"--{typed}"], TrainSettings))
        assert refused.value.hint == f"did you mean '{meant}'?"
    assert nearest(TrainSettings, "profiling.no_record_shapes") == "profiling.record_shapes"


def test_a_file_has_no_negations(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        load(TrainSettings, write(tmp_path, "performance: {no_compile: true}"))
    assert refused.value.hint == "did you mean 'performance.compile'?"


def arguments_of(configuration: Configuration[TrainSettings]) -> dict[str, Any]:
    return configuration.settings.model.arguments


def test_arguments_of_a_callable_are_a_mapping_that_every_source_adds_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "model: {name: 'my:build', arguments: {width: 1, depth: 2, digits: '3', Bias: true}}")
    monkeypatch.setenv("GPUBENCH_MODEL__ARGUMENTS__DEPTH", "4")
    loaded = load(TrainSettings, file, parse_unknown_overrides(["--model.arguments.width=5"]))
    assert arguments_of(loaded) == {"width": 5, "depth": 4, "digits": "3", "Bias": True}
    other = loaded.with_overrides(parse_assignments(TrainSettings, ["model.arguments.width=0.5"]), "--vs")
    assert arguments_of(other) == arguments_of(loaded) | {"width": 0.5}
    assert (loaded.settings.model.name, other.settings.model.name) == ("my:build", "my:build")
    (line,) = [line for line in loaded.to_yaml().splitlines() if "arguments:" in line]
    assert line.endswith(f"# command line, GPUBENCH_MODEL__ARGUMENTS__DEPTH, {file}")
    assert arguments_of(load(TrainSettings, write(tmp_path, other.to_yaml()))) == arguments_of(other) | {"depth": 4}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-0.5", -0.5),
        ("true", True),
        ("off", False),
        ("null", None),
        ("a b", "a b"),
        ("'5'", "5"),
        ("[1]", "[1]"),
        ("2024-01-02", "2024-01-02"),
    ],
)
def test_an_argument_on_the_command_line_is_read_as_in_yaml(text: str, value: Any) -> None:
    assert parse_unknown_overrides([f"--model.arguments.one={text}"]) == {"model.arguments.one": value}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {arguments: 5}", "a section of settings takes no value"),
        ("model: {arguments: {a: [1]}}", "is not a number, true, false, null or a text"),
        ("model: {arguments: {a: .inf}}", "inf is not a finite number"),
        ("model: {arguments: {a: {b: 1}}}", "unknown setting 'model.arguments.a.b'"),
        ("model: {arguments: {1: 1}}", "unknown setting 'model.arguments.1'"),
    ],
)
def test_what_is_no_argument_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(TrainSettings, write(tmp_path, text))
    assert message in caught.value.message
