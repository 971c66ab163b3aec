import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded_runs import edit, write_run

from gpubench.compare.comparability import (
    ORDER,
    Normalisation,
    consequences,
    differences,
    headline,
    judge,
    normalise,
    summarise_side,
)
from gpubench.compare.compare import null
from gpubench.compare.evidence import RunEvidence, Side, open_run
from gpubench.errors import UsageError
from gpubench.events import WorkCounted
from gpubench.metrics import DEFINITIONS, Metric
from gpubench.report import phrases
from gpubench.runs.directory import CONFIG, RUN, RunRecord
from gpubench.runs.reader import Run
from gpubench.runs.steps import SteadyWindow
from gpubench.runs.summary import NO_MEASUREMENTS
from gpubench.settings.commands import COMMANDS
from gpubench.settings.defaults import complete
from gpubench.settings.field import fields, setting
from gpubench.settings.keys import flatten
from gpubench.settings.loading import completed, load
from gpubench.settings.roles import ROLES
from gpubench.settings.schema import TrainSettings

DEFAULTS = flatten(TrainSettings().model_dump(mode="json"))
GPU = {"name": "NVIDIA H200", "uuid": "GPU-1", "power_cap_w": 700.0, "sm_clock_mhz": 345, "index": 0}


def run(
    label: str = "r",
    *,
    settings: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
    git: dict[str, Any] | None = None,
    command: str = "train-bench",
    host: str = "one",
) -> RunEvidence:
    given = DEFAULTS | {"model.name": "resnet18", "precision": "fp32", "device": "cpu", "training.batch_size": 16}
    given |= settings or {}
    record = RunRecord(
        schema_version=1,
        experiment="e",
        run_id=label,
        command=command,
        argv=[],
        status="completed",
        started="2026-01-01T00:00:00.000Z",
        host=host,
        pid=1,
        pid_created=0.0,
        git=git,
        world_size=given["distributed.world_size"],
    )
    return RunEvidence(
        label=label,
        path=Path(label),
        record=record,
        status="completed",
        settings=given,
        environment={"host.name": host, "gpus": []} | (environment or {}),
        workload=workload or {},
        summary=msgspec.structs.replace(NO_MEASUREMENTS, steady=[SteadyWindow(0, 10, 50, True, 0.0, 1.0)]),
    )


def log(label: str) -> RunEvidence:
    metric = Metric("step_ms", "s", "lower", 1.0, None, 1, None, [1.0], None)
    return RunEvidence(
        label=label,
        path=Path("logs") / label,
        record=None,
        status="completed",
        settings={},
        environment={},
        workload={},
        summary=msgspec.structs.replace(NO_MEASUREMENTS, metrics=[metric]),
    )


def side(*runs: RunEvidence, label: str | None = None) -> Side:
    return Side(label or runs[0].label, runs)


def keys(baseline: RunEvidence, candidate: RunEvidence) -> list[str]:
    return [difference.key for difference in differences(baseline, candidate)]


def test_a_setting_is_the_same_to_a_comparison_whichever_command_has_it() -> None:
    for cls in COMMANDS.values():
        roles = {key: setting(field).role for key, field in fields(cls).items()}
        assert roles == {key: ROLES[key].role for key in roles}


def test_what_settings_depend_on_are_settings() -> None:
    assert {key for declared in ROLES.values() for key in declared.depends_on} <= ROLES.keys()


def test_every_fact_that_a_setting_decides_in_any_command_is_known_to_be_a_consequence() -> None:
    declared = (setting(field) for cls in COMMANDS.values() for field in fields(cls).values())
    assert {fact for one in declared for fact in one.environment} <= consequences().keys()


def test_the_same_run_differs_in_nothing() -> None:
    found = judge(side(run("a")), side(run("b")))
    assert found.comparable
    assert not found.forced
    assert found.reasons == []
    assert found.differences == []


def test_another_model_withholds_the_verdicts_and_is_named() -> None:
    found = judge(side(run()), side(run(settings={"model.name": "gpt2"})))
    assert not found.comparable
    assert found.reasons == [
        "not the same work, model.name resnet18 against gpt2: verdicts are withheld; --force gives them anyway"
    ]


def test_an_argument_of_the_users_callable_decides_on_the_work() -> None:
    wide = run(settings={"model.arguments.width": 8})
    found = judge(side(wide), side(run(settings={"model.arguments.width": 9})))
    assert [(one.key, one.kind) for one in found.differences] == [("model.arguments.width", "workload")]
    assert not found.comparable
    assert not judge(side(wide), side(run())).comparable  # the callable's own default is unknown


def test_force_gives_verdicts_and_keeps_saying_why_not() -> None:
    found = judge(side(run()), side(run(settings={"model.name": "gpt2"})), force=True)
    assert found.forced
    assert not found.comparable
    assert "--force" in found.reasons[0]
    assert not judge(side(run()), side(run()), force=True).forced


def test_treatments_are_listed_and_withhold_nothing() -> None:
    found = judge(
        side(run(environment={"torch.version": "2.5", "threads.intra_op": 2})),
        side(run(settings={"precision": "bf16"}, environment={"torch.version": "2.6", "threads.intra_op": 2})),
    )
    assert found.comparable
    assert [(each.key, each.kind, each.baseline, each.candidate) for each in found.differences] == [
        ("precision", "treatment", "fp32", "bf16"),
        ("torch.version", "treatment", "2.5", "2.6"),
    ]


def test_differences_come_with_the_work_first() -> None:
    changed = {"training.steps": 9, "precision": "bf16", "training.batch_size": 32, "model.name": "gpt2"}
    found = differences(run(git={"dirty": False}), run(settings=changed, git={"dirty": True}))
    assert [difference.kind for difference in found] == list(ORDER)


def test_a_setting_that_a_program_decided_itself_is_compared_where_both_are_known(tmp_path: Path) -> None:
    def measured(given: dict[str, Any], **observed: Any) -> RunEvidence:
        path = write_run(tmp_path)
        (path / CONFIG).write_text(json.dumps({"data.workers": None, "data.prefetch": None} | given))
        edit(path / RUN, observed=observed or None)
        return open_run(path)

    alone, workers = measured({}, **{"data.workers": 0}), {"data.workers": 2, "data.prefetch": 4}
    assert keys(alone, measured({}, **workers)) == ["data.workers"]  # without workers, nothing is prefetched
    assert keys(measured(workers), measured({}, **workers)) == []
    assert keys(measured({}), measured({}, **workers)) == []
    assert keys(measured({}), measured(workers)) == ["data.workers", "data.prefetch"]


@pytest.mark.parametrize(
    ("ours", "theirs", "differ"),
    [
        ("python train.py", "python train.py --width 3", False),
        ("python train.py", "torchrun --nproc-per-node 2 train.py", False),
        ("python -m train", "python -m other.train", True),
        ("python slow.py", "python fast.py", True),
    ],
)
def test_different_programs_are_told(ours: str, theirs: str, differ: bool) -> None:
    found = judge(*(side(run(settings={"program.command": each})) for each in (ours, theirs)))
    assert any("different programs" in reason for reason in found.reasons) == differ


def test_facts_of_the_model_that_ran_count_as_the_work() -> None:
    ours, theirs = run(workload={"parameters": 10, "task": "t"}), run(workload={"parameters": 11, "task": "t"})
    assert [(each.key, each.kind) for each in differences(ours, theirs)] == [("parameters", "workload")]


def test_a_fact_that_only_one_side_recorded_is_no_difference() -> None:
    assert judge(side(run()), side(run(workload={"parameters": 11}))).comparable


def test_the_shape_that_ran_counts_more_than_the_one_asked_for() -> None:
    shape = {"sample_shape": "3 x 64 x 64"}
    assert keys(run(workload=shape), run(workload=shape, settings={"data.image_size": 64})) == []
    assert keys(run(), run(settings={"data.image_size": 64})) == ["data.image_size"]


def test_sequences_of_another_length_are_compared_by_their_tokens() -> None:
    ours, theirs = (run(workload={"sample_shape": f"{n} tokens", "tokens_per_sample": n}) for n in (32, 16))
    assert [(one.key, one.kind) for one in differences(ours, theirs)] == [
        ("sample_shape", "scale"),
        ("tokens_per_sample", "scale"),
    ]
    sides = side(ours), side(theirs)
    assert normalise("step_time", "s", *sides).withheld == (
        "a step is not the same work: 16 samples of 32 tokens against 16 samples of 16 tokens"
    )
    assert normalise("energy_per_sample", "J", *sides).withheld
    assert normalise("token_throughput", "tokens/s", *sides).withheld is None
    found = normalise("throughput", "samples/s", *sides)
    assert (found.metric, found.unit, found.baseline, found.candidate) == (
        "token_throughput",
        "tokens/s",
        1 / 32,
        1 / 16,
    )
    found = normalise("throughput", "samples/s", sides[0], side(of_ranks(theirs, 2)))
    assert (found.metric, found.baseline, found.candidate) == ("token_throughput_per_device", 1 / 32, 2 / 16)
    assert judge(*sides).reasons[-1].endswith("those per token and per device judged")


def of_ranks(one: RunEvidence, ranks: int) -> RunEvidence:
    assert one.record
    return replace(one, record=msgspec.structs.replace(one.record, world_size=ranks))


@pytest.mark.parametrize(
    ("arguments", "shape", "kind"),
    [
        (("--long", ""), "8x{} int64", "scale"),
        (("", ""), "8x{} int64", "workload"),
        (("--wide", ""), "8x{} float32", "workload"),
        (("--large", ""), "8x3x{} int64", "workload"),
        (("--single", ""), " int64", "workload"),
        (("--odd", ""), "8x{} int64 and more", "workload"),
        (("--empty", ""), "", "workload"),
    ],
    ids=["an argument", "an edit", "numbers that are no tokens", "pictures", "a number", "more words", "no word"],
)
def test_only_arguments_change_the_length_of_sequences_of_a_program_by_intention(
    arguments: tuple[str, str], shape: str, kind: str
) -> None:
    def program(length: int, argument: str) -> RunEvidence:
        counted = WorkCounted(8, 1, 1, forwarded=64, calls=8, elements=64 * length, shapes=[shape.format(length)])
        made = run(settings={"program.command": f"python train.py {argument}"}, workload={"sample_shape": str(length)})
        return replace(made, summary=msgspec.structs.replace(made.summary, work=[counted]))

    ours, theirs = program(32, arguments[0]), program(16, arguments[1])
    (found,) = (one for one in differences(ours, theirs) if one.key == "sample_shape")
    assert found.kind == kind


def test_another_command_is_other_work() -> None:
    assert not judge(side(run()), side(run(command="pipe-infer"))).comparable


def test_a_setting_nobody_classified_is_a_treatment() -> None:
    found = differences(run(), run(settings={"performance.graphs": True}))
    assert [(each.key, each.kind) for each in found] == [("performance.graphs", "treatment")]


def test_names_and_places_are_not_compared() -> None:
    assert keys(run(), run(settings={"experiment": "x", "results": "y", "logging.level": "INFO"})) == []


def test_gpus_are_compared_one_by_one_without_their_clocks_of_the_moment() -> None:
    ours = run(environment={"gpus": [GPU, GPU]})
    theirs = run(environment={"gpus": [GPU | {"sm_clock_mhz": 1980}, GPU | {"power_cap_w": 350.0}]})
    assert keys(ours, theirs) == ["gpus.1.power_cap_w"]


def test_a_different_number_of_gpus_is_one_difference() -> None:
    assert keys(run(environment={"gpus": [GPU]}), run(environment={"gpus": [GPU, GPU]})) == ["gpus.count"]


def test_another_machine_is_listed_and_its_gpus_serial_numbers_are_not() -> None:
    ours, theirs = run(environment={"gpus": [GPU]}), run(host="two", environment={"gpus": [GPU | {"uuid": "GPU-2"}]})
    assert keys(ours, theirs) == ["host.name"]
    assert keys(ours, run(environment={"gpus": [GPU | {"uuid": "GPU-2"}]})) == ["gpus.0.uuid"]


@pytest.mark.parametrize("gpus", ["none", 3, [3], None, {"0": GPU}])
def test_gpus_of_a_wrong_type_are_no_gpus(gpus: object) -> None:
    assert keys(run(environment={"gpus": gpus}), run()) == []


def test_the_code_is_git_and_the_package_itself() -> None:
    ours = run(git={"commit": "a", "dirty": False}, environment={"packages.gpubench": "1"})
    theirs = run(git={"commit": "b", "dirty": False}, environment={"packages.gpubench": "2"})
    found = differences(ours, theirs)
    assert [(each.key, each.kind) for each in found] == [("packages.gpubench", "code"), ("git.commit", "code")]


def test_a_repository_that_only_one_side_knows_is_no_difference() -> None:
    ours = run(git={"commit": "a", "dirty": False})
    assert keys(ours, run(git=None)) == keys(run(git=None), ours) == []
    assert keys(ours, run(git={"commit": "b"})) == ["git.commit"]


def test_another_batch_size_withholds_what_is_per_step() -> None:
    ours, theirs = side(run()), side(run(settings={"training.batch_size": 32}))
    found = judge(ours, theirs)
    assert found.comparable
    assert found.reasons == [
        "training.batch_size 16 against 32: per-step figures are withheld, per-sample and per-device ones judged"
    ]
    withheld = normalise("step_time", "s", ours, theirs).withheld
    assert withheld == "a step is not the same work: 16 samples against 32 samples"
    assert normalise("phase_backward", "s", ours, theirs).withheld
    assert normalise("phase_of_a_later_version", "s", ours, theirs).withheld
    assert normalise("throughput", "samples/s", ours, theirs) == Normalisation("throughput", "samples/s", 1, 1, None)
    assert normalise("mfu", "fraction", ours, theirs).withheld is None


def test_accumulation_that_makes_up_for_the_batch_size_withholds_nothing() -> None:
    theirs = side(run(settings={"training.batch_size": 8, "training.grad_accumulation": 2}))
    assert "compared without division" in judge(side(run()), theirs).reasons[0]
    assert normalise("step_time", "s", side(run()), theirs).withheld is None


def test_figures_of_more_ranks_are_judged_per_device() -> None:
    ours, theirs = side(run()), side(run(settings={"distributed.world_size": 4}))
    assert "per device" in judge(ours, theirs).reasons[0]
    divided = Normalisation("throughput_per_device", "samples/s", 1, 4, None)
    assert normalise("throughput", "samples/s", ours, theirs) == divided
    assert normalise("step_time", "s", ours, theirs).withheld
    assert normalise("energy_per_sample", "J", ours, theirs).metric == "energy_per_sample"


def test_times_of_a_step_and_rates_of_a_job_are_known_as_such() -> None:
    per = {name: definition.per for name, definition in DEFINITIONS.items()}
    rates = {"throughput", "steady_throughput", "token_throughput", "mean_of_rates"}
    assert {name for name, what in per.items() if what == "job"} == rates
    timed = {name for name in per if name.startswith(("phase_", "latency_"))}
    timed |= {"step_time", "first_step_time", "warmup_time"}
    assert {name for name, what in per.items() if what == "step"} == timed


def test_two_logs_of_other_tools_are_compared_by_nothing_but_their_numbers() -> None:
    found = judge(side(log("a.csv")), side(log("b.csv")))
    assert found.comparable
    assert found.reasons == ["logs of another tool: only their numbers are compared"]
    assert normalise("step_time", "s", side(log("a.csv")), side(log("b.csv"))).withheld is None


def test_a_log_of_another_tool_is_not_comparable_with_a_run() -> None:
    found = judge(side(run("r")), side(log("b.csv")))
    assert not found.comparable
    assert found.reasons[0].startswith("b.csv is a log of another tool")


def test_settings_that_could_not_be_read_are_told_and_withhold() -> None:
    lost = run("lost")
    lost.settings.clear()
    found = judge(side(run()), side(lost))
    assert not found.comparable
    assert "the settings of lost could not be read" in found.reasons[0]
    assert found.differences == []
    assert normalise("step_time", "s", side(run()), side(lost)).withheld


def test_an_environment_that_could_not_be_read_is_told_and_withholds_nothing() -> None:
    lost = run("lost")
    lost.environment.clear()
    found = judge(side(run(environment={"torch.version": "2.5"})), side(lost))
    assert found.comparable
    assert "the environment of lost could not be read" in found.reasons[0]
    assert found.differences == []


def test_a_group_has_to_repeat_one_configuration() -> None:
    group = side(run("a"), run("b"), run("c", settings={"precision": "bf16"}), label="exp")
    found = judge(side(run()), group)
    assert not found.comparable
    assert "the runs of exp do not repeat one configuration, precision fp32 against bf16 in c" in found.reasons[0]
    assert judge(side(run()), group, force=True).forced


def test_what_unequal_runs_tell_of_noise_no_option_changes() -> None:
    group = side(run("a"), run("b", settings={"precision": "bf16"}), label="exp")
    with pytest.raises(UsageError) as refused:
        null(group)
    assert refused.value.message == (
        "no noise can be measured: the runs of exp do not repeat one configuration, precision fp32 against bf16 in b"
    )
    assert refused.value.hint == "--null takes runs of one configuration"


def test_runs_of_a_group_may_have_their_own_seed_and_length() -> None:
    group = side(run("a"), run("b", settings={"seed": 7, "training.steps": 99}))
    assert judge(group, group).comparable


def test_the_headline_names_the_work() -> None:
    assert headline(run()) == "resnet18, fp32, batch 16 on cpu"
    assert headline(run(settings={"distributed.world_size": 2})) == "resnet18, fp32, batch 16 x 2 ranks on cpu"
    assert headline(log("old.csv")) == "step_ms of another tool's log"
    undone = run()
    undone.settings.pop("precision")
    assert headline(undone) == "resnet18, ?, batch 16 on cpu"
    lost = run()
    lost.settings.clear()
    assert headline(lost) == "train-bench, settings unknown"


def test_a_side_in_short() -> None:
    found = summarise_side(side(run("a"), run("b"), label="exp"))
    assert (found.label, found.paths, found.runs, found.repeats) == ("exp", ["a", "b"], 2, 2)
    assert (found.command, found.started) == ("train-bench", "2026-01-01T00:00:00.000Z")
    assert summarise_side(side(log("old.csv"))).command is None


MATMUL = {"math.float32_matmul_precision": "highest", "math.matmul_allow_tf32": False, "math.cudnn_allow_tf32": False}
TF32 = {"math.float32_matmul_precision": "high", "math.matmul_allow_tf32": True, "math.cudnn_allow_tf32": True}


def kept(folder: Path, evidence: RunEvidence, **changes: Any) -> RunEvidence:
    """The same run with the config.yaml that a run of these changes leaves."""
    given = {"device": "cpu", "model": "gpt2-tiny", "results": str(folder)} | changes
    folder.mkdir()
    (folder / CONFIG).write_text(completed(load(TrainSettings, None, given), complete).to_yaml())
    assert evidence.record
    return replace(evidence, files=Run(folder, evidence.record))


def follows(baseline: RunEvidence, candidate: RunEvidence) -> dict[str, str | None]:
    return {difference.key: difference.follows for difference in differences(baseline, candidate)}


def test_how_float32_products_are_computed_follows_from_the_precision() -> None:
    fp32, bf16 = run(environment=MATMUL), run(settings={"precision": "bf16"}, environment=TF32)
    assert follows(fp32, bf16) == {"precision": None} | dict.fromkeys(MATMUL, "precision")
    (line,) = phrases.consequences(differences(fp32, bf16))
    assert line.startswith("follows from precision: math.float32_matmul_precision highest -> high, ")
    listed, rest = phrases.listed(differences(fp32, bf16))
    assert ([one.key for one in listed], rest) == (["precision"], "")


def test_products_that_the_user_set_apart_follow_from_that() -> None:
    chosen = run(settings={"precision": "bf16", "performance.matmul_precision": "high"}, environment=TF32)
    found = follows(run(settings={"precision": "bf16"}, environment=MATMUL), chosen)
    assert found == {"performance.matmul_precision": None} | dict.fromkeys(MATMUL, "performance.matmul_precision")
    assert follows(run(environment=MATMUL), run(environment=TF32)) == dict.fromkeys(MATMUL, None)


def test_what_was_filled_in_follows_from_what_the_user_chose(tmp_path: Path) -> None:
    two = {"distributed.world_size": 2, "performance.cpu_threads": 1}
    one = run(settings={"performance.cpu_threads": 2}, environment={"threads.intra_op": 2})
    both = run(settings=two, environment={"threads.intra_op": 1})
    filled = kept(tmp_path / "one", one), kept(tmp_path / "two", both, world_size=2)
    root = "distributed.world_size"
    assert follows(*filled) == {root: None, "performance.cpu_threads": root, "threads.intra_op": root}
    given = filled[0], kept(tmp_path / "given", both, world_size=2, **{"performance.cpu_threads": 1})
    assert follows(*given)["performance.cpu_threads"] is None, "the user said so"
    assert follows(*given)["threads.intra_op"] == "performance.cpu_threads"
