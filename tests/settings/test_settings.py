from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import reference
from pydantic import Field, ValidationError

from gpubench.kinds.memory.settings import MemorySettings
from gpubench.settings.field import Section, fields, of_program, setting, stays_inside, uncompared
from gpubench.settings.programs import ProgramSettings, from_outside
from gpubench.settings.schema import CompletedTrainSettings, TrainSettings
from gpubench.settings.sections import MeasurementSettings, TrainingSettings


@pytest.mark.parametrize("key", fields(TrainSettings))
def test_every_setting_says_what_it_means(key: str) -> None:
    description = fields(TrainSettings)[key].description
    assert description
    assert not description.endswith(".")
    assert "\n" not in description


def test_a_setting_cannot_be_declared_without_its_role_in_a_comparison() -> None:
    with pytest.raises(TypeError, match=r"Undeclared\.steps: declare it"):

        class Undeclared(Section):
            steps: int = 3


def test_a_text_or_a_path_counts_as_leading_out_of_the_folder_unless_it_is_declared_not_to() -> None:
    class Declared(Section):
        number: Annotated[float, Field(gt=0)] | None = uncompared(None, "")
        word: Literal["a", "all"] | int = uncompared("a", "")
        switch: bool = uncompared(False, "")
        sends: bool = uncompared(False, "", stays_inside=False)
        text: str | None = uncompared(None, "")
        path: Path = uncompared(Path(), "")
        mapping: dict[str, int] = uncompared({}, "")
        anything: Any = uncompared(None, "")
        name: str = uncompared("", "", stays_inside=True)

    inside = [key for key, field in fields(Declared).items() if stays_inside(field)]
    assert inside == ["number", "word", "switch", "name"]


def test_completed_settings_have_no_open_ones() -> None:
    with pytest.raises(ValidationError) as refusal:
        CompletedTrainSettings.model_validate({"device": None, "training": {"batch_size": None}})
    assert [problem["loc"] for problem in refusal.value.errors()] == [("device",), ("training", "batch_size")]


def test_every_setting_has_a_default() -> None:
    assert TrainSettings() == TrainSettings.model_validate({})


def test_settings_survive_json() -> None:
    settings = TrainSettings.model_validate({"data": {"path": "a/b"}, "precision": "bf16", "training": {"seconds": 2}})
    assert TrainSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainSettings().training.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize("name", ["resnet", "a b", "2026-11", "ü", "x" * 120])
def test_an_experiment_is_a_folder_name(name: str) -> None:
    assert TrainSettings(experiment=name).experiment == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "/", "a\\b", "a\nb", "a\n", "a\0b", "x" * 121, "ü" * 61]
)
def test_an_experiment_cannot_leave_its_folder(name: str) -> None:
    with pytest.raises(ValidationError, match="experiment"):
        TrainSettings(experiment=name)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "batch_size", 0),
        ("training", "batch_size", 1.5),
        ("training", "steps", 2**63),  # more than a worker can be told
        ("training", "seconds", 0),
        ("training", "seconds", float("inf")),
        ("training", "warmup_steps", -1),
        ("training", "learning_rate", float("nan")),
        ("training", "momentum", 1),
        ("training", "optimizer", "lion"),
        ("distributed", "world_size", 0),
        ("distributed", "bucket_mb", float("inf")),
        ("distributed", "timeout", 1e300),
        ("measurement", "target_precision", 1),
        ("measurement", "target_precision", "100%"),
        ("measurement", "target_precision", "x%"),
        ("measurement", "telemetry_interval", 0),
    ],
)
def test_a_value_out_of_range_is_refused(section: str, key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=rf"{section}\.{key}"):
        TrainSettings.model_validate({section: {key: value}})


def test_a_seed_is_one_that_torch_takes() -> None:
    with pytest.raises(ValidationError, match="seed"):
        TrainSettings(seed=2**63)


@pytest.mark.parametrize("key", ["steps", "epochs", "seconds"])
def test_one_limit_is_enough(key: str) -> None:
    assert getattr(TrainingSettings.model_validate({key: 5}), key) == 5


@pytest.mark.parametrize("pair", [("steps", "epochs"), ("steps", "seconds"), ("epochs", "seconds")])
def test_two_limits_are_one_too_many(pair: tuple[str, str]) -> None:
    with pytest.raises(ValidationError, match=rf"training\.{pair[0]} and training\.{pair[1]} both say when to stop"):
        TrainingSettings.model_validate(dict.fromkeys(pair, 5))


def test_a_fraction_of_more_than_the_whole_was_meant_as_a_percentage() -> None:
    for section in ({"measurement": {"target_precision": "1"}}, {"memory": {"spare": "5"}}):
        with pytest.raises(ValidationError, match=r"'(1|5)' is a fraction: did you mean \1%\?"):
            MemorySettings.model_validate(section)


@pytest.mark.parametrize(("text", "fraction"), [("1%", 0.01), ("0.5%", 0.005), ("0.02", 0.02), (0.02, 0.02)])
def test_a_target_is_a_fraction_or_a_percentage(text: Any, fraction: float) -> None:
    assert MeasurementSettings.model_validate({"target_precision": text}).target_precision == pytest.approx(fraction)


def test_a_program_takes_a_setting_as_a_model_does_and_has_no_other_values_of_it() -> None:
    of_models = {one.key: one.kind for one, _ in reference.settings_of(TrainSettings)}
    of_programs = {one.key: one.kind for one, _ in reference.settings_of(ProgramSettings)}
    shared = from_outside().keys() & of_models.keys()
    assert shared == from_outside().keys() - {
        *("data.cached", "data.persistent_workers", "performance.sdpa", "distributed.gradient_as_bucket_view"),
    }
    for key in shared:
        assert set(of_programs[key].split(", ")) <= set(of_models[key].split(", ")), key
        own, model = fields(ProgramSettings)[key], fields(TrainSettings)[key]
        assert own.get_default() is None, key
        assert replace(setting(own), depends_on=()) == replace(setting(model), depends_on=()), key


def test_a_setting_that_the_probe_does_not_set_is_none_of_a_program() -> None:
    with pytest.raises(TypeError, match=r"TrainingSettings\.momentum: declare how the probe sets it"):
        of_program(TrainingSettings, "momentum")
