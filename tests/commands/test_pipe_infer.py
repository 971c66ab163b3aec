"""`gpubench pipe-infer` as a user runs it, on the small models."""

import csv
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from cli import complaint
from PIL import Image
from pipelines_made import stable_diffusion
from running import Finished, gpubench, metrics
from safetensors.torch import load_file, save_file

from gpubench.devices import physical_cores
from gpubench.runs.reader import Run
from gpubench.schema import FILES

CommandLine = Callable[..., Finished]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CPU = ("--device", "cpu", "--performance.cpu_threads=1")
DUMMY = ("--unet", "dummy", "--step-ms", "2", "--steps", "5", "--samples", "3", "--repeats", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One plain run of two ranks, shared by the tests that only look."""
    options = ("--world-size", "2", "--unet", "tiny", "--steps", "4", "--samples", "3", "--repeats", "1")
    done = gpubench("pipe-infer", *CPU, *options, results=tmp_path_factory.mktemp("tiny"))
    assert done.code == 0, done.stderr
    return done


def test_it_writes_the_whole_run_directory(tiny: Finished) -> None:
    assert {path.name for path in tiny.run.iterdir()} == {
        "run.json",
        "config.yaml",
        "environment.json",
        "samples",
        "samples.jsonl",
        "handoffs.jsonl",
        "timeline.jsonl",
        "timeline.trace.json",
        "telemetry.jsonl",
        "summary.json",
        "summary.csv",
        "report.html",
        "run.log",
        "tensorboard",
    }
    record = tiny.document("run.json")
    assert (record["status"], record["world_size"], record["repeats"]) == ("completed", 2, 1)
    assert (record["workload"]["scheduler"], record["workload"]["evaluations"]) == ("PNDMScheduler", 5)
    assert "<svg" in (tiny.run / "report.html").read_text()


def test_every_file_is_as_the_published_schema_says(tiny: Finished) -> None:
    """msgspec decodes by the very types that the schema is made from."""
    for name, kind in FILES.items():
        if not (tiny.run / name).exists():
            # of training; of repeats; of a run that was recorded; of one that followed its memory; of an edit
            others = ("steps.jsonl", "epochs.jsonl", "noise.json", "profile.json", "findings.json")
            assert name in (*others, "memory.json", "batch_sizes.json", "trades.json", "loader.json", "decision.json")
        elif name.endswith(".jsonl"):
            assert tiny.lines(name)
            for line in (tiny.run / name).read_bytes().splitlines():
                msgspec.json.decode(line, type=kind)
        else:
            msgspec.json.decode((tiny.run / name).read_bytes(), type=kind)
    assert not Run.open(tiny.run).problems


def test_every_sample_is_kept_with_its_digest_and_equals_the_reference(tiny: Finished) -> None:
    samples = tiny.lines("samples.jsonl")
    assert [(line["sample"], line["seed"]) for line in samples] == [(0, 0), (1, 1), (2, 2)]
    for line in samples:
        latent = load_file(tiny.run / line["latent"])["latent"]
        assert sha256(latent.numpy().tobytes()).hexdigest() == line["sha256"]
        assert line["started"] < line["finished"]
    found = tiny.document("summary.json")["pipeline"]["verification"]
    assert (found["reference"], found["samples"], found["identical"]) == (
        "diffusers StableDiffusionPipeline.__call__",
        3,
        3,
    )
    assert "3 of 3 samples are bit-identical" in tiny.stdout


def ended(tiny: Finished, folder: Path, **changes: Any) -> Path:
    """A copy of the run, as if it had ended with an error after its last sample."""
    path = Path(shutil.copytree(tiny.run, folder / "trial" / tiny.run.name))
    error = {"kind": "WorkerLost", "message": "rank 1 died", "hint": "look"}
    (path / "run.json").write_text(
        json.dumps(tiny.document("run.json") | {"status": "failed", "error": error} | changes)
    )
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "that run failed after its last sample: rank 1 died"),
        ({"status": "interrupted", "error": None}, "that run was interrupted after its last sample"),
        ({"status": "completed", "error": None}, None),
    ],
)
def test_to_resume_a_run_whose_samples_are_complete_ends_with_its_result(
    tiny: Finished, tmp_path: Path, changes: dict[str, Any], said: str | None
) -> None:
    path = ended(tiny, tmp_path, **changes)
    done = gpubench("pipe-infer", "--resume", str(path), results=tmp_path)
    assert done.code == 0, done.stderr
    assert "3 of 3 samples are bit-identical" in done.stdout
    first, *rest = done.stderr.splitlines()
    assert first == f"nothing to do: all 3 samples of {path} are finished"
    assert rest == ([said] if said else [])
    assert done.runs == [path]


def test_to_resume_a_run_that_was_cut_off_before_its_verification_verifies_it_unless_asked_not_to(
    tiny: Finished, tmp_path: Path
) -> None:
    path = ended(tiny, tmp_path, status="interrupted", error=None)
    (path / "summary.json").unlink()
    unasked = gpubench("pipe-infer", "--resume", str(path), "--no-verify", results=tmp_path)
    assert unasked.code == 0, unasked.stderr
    assert "its samples were not verified: add --verify to compare them" in unasked.stderr
    done = gpubench("pipe-infer", "--resume", str(path), results=tmp_path)
    assert done.code == 0, done.stderr
    assert "are finished and were never verified: this run compares them" in done.stderr
    assert "3 of 3 samples are bit-identical" in done.stdout


def test_to_resume_a_run_whose_samples_differ_from_the_reference_is_still_an_error(
    tiny: Finished, tmp_path: Path
) -> None:
    path = ended(tiny, tmp_path)
    summary = json.loads((path / "summary.json").read_text())
    summary["pipeline"]["verification"]["identical"] = 2
    (path / "summary.json").write_text(json.dumps(summary))
    done = gpubench("pipe-infer", "--resume", str(path), results=tmp_path)
    assert (done.code, "error: rank 1 died" in done.stderr) == (1, True)


def test_every_handoff_sent_was_received(tiny: Finished) -> None:
    keys = ("sample", "step", "sequence", "header_bytes", "latent_bytes", "state_bytes", "generator_bytes")
    ends: dict[str, list[tuple[int, ...]]] = {"send": [], "recv": []}
    for line in tiny.lines("handoffs.jsonl"):
        assert (line["rank"], line["peer"]) == ((0, 1) if line["direction"] == "send" else (1, 0))
        ends[line["direction"]].append(tuple(line[key] for key in keys))
    assert ends["send"] == ends["recv"]
    assert [(sample, step, sequence) for sample, step, sequence, *_ in ends["send"]] == [
        (0, 2, 0),
        (1, 2, 1),
        (2, 2, 2),
    ]
    stages = tiny.document("summary.json")["pipeline"]["stages"]
    assert [(stage["sent"], stage["received"]) for stage in stages] == [(3, 0), (0, 3)]


def test_the_log_says_who_each_rank_is_and_has_a_line_for_every_handoff(tiny: Finished) -> None:
    lines = [
        dict(pair.partition("=")[::2] for pair in shlex.split(line))
        for line in (tiny.run / "run.log").read_text().splitlines()
    ]
    who = [line for line in lines if "first_evaluation" in line]
    keys = ("level", "rank", "msg", "device", "threads", "first_evaluation", "last_evaluation", "evaluations")
    assert sorted(tuple(line[key] for key in keys) for line in who) == [
        ("INFO", "0", "rank 0 of 2", "cpu", "1", "0", "1", "5"),
        ("INFO", "1", "rank 1 of 2", "cpu", "1", "2", "4", "5"),
    ]
    assert len({line["pid"] for line in who}) == 2
    assert all(line["host"] for line in who)
    logged = [line for line in lines if line["logger"] == "gpubench.kinds.pipeline"]
    kept = tiny.lines("handoffs.jsonl")
    assert [(line["msg"].split()[0], line["rank"], line["sample"], line["step"]) for line in logged] == [
        ({"send": "sent", "recv": "received"}[one["direction"]], *(str(one[key]) for key in ("rank", "sample", "step")))
        for one in kept
    ]
    for line, one in zip(logged, kept, strict=True):
        assert (line["level"], line["from"], line["to"]) == ("DEBUG", "0", "1")
        size = sum(one[key] for key in ("header_bytes", "latent_bytes", "state_bytes", "generator_bytes"))
        assert int(line["bytes"]) == size
        assert (float(line["waited"]), float(line["took"])) == (one["waited"], one["total"])


def test_every_evaluation_is_done_once_by_the_rank_it_was_given_to(tiny: Finished) -> None:
    evaluations = [line for line in tiny.lines("timeline.jsonl") if line["kind"] == "evaluate"]
    done = sorted((line["sample"], line["step"], line["rank"]) for line in evaluations)
    assert done == [(sample, step, int(step >= 2)) for sample in range(3) for step in range(5)]


def test_each_ranks_time_sums_to_the_makespan(tiny: Finished) -> None:
    stages = tiny.document("summary.json")["pipeline"]["stages"]
    assert len(stages) == 2
    for stage in stages:
        times = dict(stage["times"])
        makespan = times.pop("makespan")
        assert makespan == pytest.approx(metrics(tiny)["makespan"]["estimate"])
        assert sum(times.values()) == pytest.approx(makespan)
        assert min(times.values()) >= 0


def test_throughput_and_baselines_follow_from_the_makespan(tiny: Finished) -> None:
    found = {name: metric["estimate"] for name, metric in metrics(tiny).items()}
    assert found["throughput"] == pytest.approx(3 / found["makespan"])
    assert found["pipeline_speedup"] == pytest.approx(found["sequential_makespan"] / found["makespan"])
    rows = list(csv.DictReader((tiny.run / "summary.csv").read_text().splitlines()))
    assert {row["name"]: float(row["estimate"]) for row in rows} == pytest.approx(found)


def test_the_trace_has_every_span_and_joins_every_handoff(tiny: Finished) -> None:
    trace = tiny.document("timeline.trace.json")["traceEvents"]
    evaluations = [event for event in trace if event["ph"] == "X" and "evaluat" in json.dumps(event)]
    assert len(evaluations) == 15
    assert {event["pid"] for event in trace} == {0, 1}
    starts, ends = ([event["id"] for event in trace if event["ph"] == phase] for phase in "sf")
    assert sorted(starts) == sorted(ends)
    assert len(starts) == 3


def test_tensorboard_holds_evaluation_times_by_rank_and_latencies(tiny: Finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = EventAccumulator(str(tiny.run / "tensorboard"))
    root.Reload()
    assert root.Scalars("summary/makespan")[0].value == pytest.approx(metrics(tiny)["makespan"]["estimate"])
    curve = EventAccumulator(str(tiny.run / "tensorboard" / "repeat-0"))
    curve.Reload()
    evaluations = [line for line in tiny.lines("timeline.jsonl") if line["kind"] == "evaluate" and line["rank"] == 1]
    assert [point.value for point in curve.Scalars("rank1/evaluation_time")] == [
        pytest.approx(line["total"]) for line in evaluations
    ]
    assert len(curve.Scalars("sample_latency")) == 3


def test_its_config_prints_as_it_was(tiny: Finished, tmp_path: Path) -> None:
    """So a run started from a run's config.yaml has every setting of it."""
    options = ("--config", str(tiny.run / "config.yaml"), "--print-config")
    done = gpubench("pipe-infer", *options, results=tiny.results)
    assert done.code == 0, done.stderr
    assert yaml.safe_load(done.stdout) == yaml.safe_load((tiny.run / "config.yaml").read_text())
    assert len(tiny.runs) == 1


def test_two_splits_are_run_side_by_side_and_compared_in_one_document(tmp_path: Path) -> None:
    options = ("--world-size", "3", "--vs", "split=balanced", "--json")
    done = gpubench("pipe-infer", *CPU, *DUMMY, *options, results=tmp_path)
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert [run["status"] for run in document["runs"]] == ["completed", "completed"]
    labels = [document["comparisons"][0][side]["label"] for side in ("baseline", "candidate")]
    assert labels == ["baseline", "split=balanced"]
    runs = [Path(run["path"]) for run in document["runs"]]
    owners = []
    for run in runs:
        lines = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
        steps = {line["step"]: line["rank"] for line in lines if line["kind"] == "evaluate"}
        owners.append([rank for _, rank in sorted(steps.items())])
    assert owners == [[0, 1, 2, 2, 2], [0, 0, 1, 1, 2]]
    digests = [
        [json.loads(line)["sha256"] for line in (run / "samples.jsonl").read_text().splitlines()] for run in runs
    ]
    assert digests[0] == digests[1]
    compared = gpubench("compare", *map(str, runs), "--json", results=tmp_path)
    assert compared.code == 0, compared.stderr
    names = {verdict["metric"] for verdict in json.loads(compared.stdout)["comparisons"][0]["verdicts"]}
    assert {"makespan", "throughput"} <= names


def test_under_torchrun_the_ranks_are_the_workers(tmp_path: Path) -> None:
    options = ("--repeats", "2", "--samples", "2", "-q")
    done = gpubench("pipe-infer", *CPU, *DUMMY[:-2], *options, results=tmp_path, launcher=TORCHRUN)
    assert done.code == 0, done.stderr
    record = done.document("run.json")
    assert (record["world_size"], record["repeats"], record["repeat_kind"]) == (2, 2, "in-process")
    assert [(line["repeat"], line["sample"]) for line in done.lines("samples.jsonl")] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert done.document("summary.json")["pipeline"]["verification"]["identical"] == 2


def test_a_pipeline_folder_makes_images_of_prompts_the_same_in_micro_batches(tmp_path: Path) -> None:
    stable_diffusion(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a cat\n\na dog\n")
    options = ("--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt"), "--output.images=true")
    sizes = ("--world-size", "2", "--steps", "2", "--samples", "3", "--micro-batch", "2", "--repeats", "1", "--verify")
    done = gpubench("pipe-infer", *CPU, *options, *sizes, results=tmp_path / "results")
    assert done.code == 0, done.stderr
    samples = done.lines("samples.jsonl")
    assert [line["prompt"] for line in samples] == ["a cat", "a dog", "a cat"]
    for line in samples:
        with Image.open(done.run / line["image"]) as image:
            assert (image.format, image.size) == ("PNG", (32, 32))
    assert [line["sample"] for line in done.lines("handoffs.jsonl") if line["direction"] == "send"] == [0, 2]
    assert "3 of 3 samples are bit-identical" in done.stdout


@pytest.mark.parametrize(
    ("threads", "world_sizes"), [((), ("1", "2")), (("--performance.cpu_threads=1",), ("1", "2", "3"))]
)
def test_samples_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, threads: tuple[str, ...], world_sizes: tuple[str, ...]
) -> None:
    options = ("--device", "cpu", "--unet", "tiny", "--steps", "3", "--samples", "2", "--repeats", "1", "--no-verify")
    expected = 1 if threads else physical_cores()
    made = set()
    for world_size in world_sizes:
        ranks = ("--world-size", world_size, "--baseline", "off", *threads)
        done = gpubench("pipe-infer", *options, *ranks, "-v", results=tmp_path / world_size)
        assert done.code == 0, done.stderr
        pipeline = done.document("summary.json")["pipeline"]
        assert pipeline["threads"] == done.document("environment.json")["threads"]["intra_op"] == expected
        made.add(tuple(digest["sha256"] for digest in pipeline["samples"]))
        assert f"made with {expected} thread" in done.stdout
    assert len(made) == 1


def test_a_model_that_changed_before_the_rest_was_made_is_refused(tmp_path: Path, command_line: CommandLine) -> None:
    stable_diffusion(tmp_path / "model")
    fault = ("--inject", "kill,rank=0,sample=1", "--samples", "2", "--steps", "2", "--repeats", "1", "--no-verify")
    first = gpubench("pipe-infer", *CPU, "--model", str(tmp_path / "model"), *fault, results=tmp_path / "results")
    assert first.code == 1, first.stderr
    assert {"text_encoder", "tokenizer", "scheduler", "vae"} < set(first.document("run.json")["workload"]["files"])
    weights = tmp_path / "model" / "text_encoder" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    said, advised = complaint(command_line("pipe-infer", "--resume", str(first.run)))
    assert said.startswith("text_encoder folder changed after the finished samples were made: ")
    assert advised == "restore the earlier one, or start a new run without --resume"
    assert len(first.runs) == 1


def test_as_many_samples_as_prompts_are_made_and_fewer_are_told(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na fish\n")
    options = (*CPU, "--unet", "tiny", "--prompts", str(tmp_path / "prompts.txt"), "--steps", "1", "--repeats", "1")
    every = gpubench("pipe-infer", *options, "--no-verify", results=tmp_path / "every")
    assert [line["prompt"] for line in every.lines("samples.jsonl")] == ["a cat", "a dog", "a fish"]
    some = gpubench("pipe-infer", *options, "--no-verify", "--samples", "2", results=tmp_path / "some")
    assert "prompt 3 is not used: --samples 2 is less than the 3 prompts" in some.stdout + some.stderr
    assert len(some.lines("samples.jsonl")) == 2
