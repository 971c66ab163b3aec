"""What a pipeline leaves behind when a rank, a hand-off or a model goes wrong, and how the rest is made."""

import json
import re
import signal
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import psutil
import pytest
from cli import complaint
from pipelines_made import stable_diffusion
from running import HOST, PATIENCE, Finished, gpubench, started
from safetensors.torch import load_file, save_file

from gpubench.events import Sample
from gpubench.runs.reader import Run

SAMPLES = 4
DUMMY = ("--unet", "dummy", "--step-ms", "2", "--steps", "8", "--samples", str(SAMPLES))
ALONE = ("--device", "cpu", "--performance.cpu_threads=1", "--repeats", "1", "--baseline", "off", "-q")


def pipeline(results: Path, *options: str, world_size: int = 2) -> Finished:
    common = (*DUMMY, *ALONE, "--no-verify", "--pipeline.deadline=6", "--world-size", str(world_size))
    return gpubench("pipe-infer", *common, *options, results=results)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of the samples as single-process diffusers makes them. A hand-off was late, but within the deadline."""
    late = ("--inject", "late,rank=0,sample=1,seconds=1", "--verify")
    done = pipeline(tmp_path_factory.mktemp("late"), *late)
    assert done.code == 0, done.stderr
    verification = done.document("summary.json")["pipeline"]["verification"]
    assert verification["identical"] == SAMPLES
    kept = finished_samples(done)
    return [kept[sample].sha256 for sample in range(SAMPLES)]


def finished_samples(done: Finished) -> dict[int, Sample]:
    """Those in samples.jsonl, having checked that their files are there, and no others, to the bit."""
    samples = {sample.sample: sample for sample in Run.open(done.run).lines("samples.jsonl", Sample)}
    assert {f"samples/{file.name}" for file in done.run.glob("samples/*")} == {s.latent for s in samples.values()}
    for sample in samples.values():
        latent = load_file(done.run / str(sample.latent))["latent"]
        assert sha256(latent.numpy().tobytes()).hexdigest() == sample.sha256
    return samples


def failure(done: Finished) -> str:
    """The message, having checked that it is told once, with a hint, and recorded."""
    assert done.code == 1, done
    assert "Traceback" not in done.stderr
    errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
    hints = [line.removeprefix("hint: ") for line in done.stderr.splitlines() if line.startswith("hint: ")]
    assert (len(errors), len(hints)) == (1, 1), done.stderr
    record = done.document("run.json")
    assert record["status"] == "failed"
    assert (record["error"]["message"], record["error"]["hint"]) == (errors[0], hints[0])
    return errors[0]


def blamed(done: Finished) -> str:
    """What the message says of the culprit, without what is never twice the same."""
    return re.sub(
        r" \(pid \d+ on \S+\)|(?<=for )\d+(?= s)", lambda found: "N" * found[0].isdigit(), failure(done).split("; ")[0]
    )


@pytest.mark.parametrize(  # test_link.py has the other kinds
    ("kind", "rank", "sample", "message"),
    [
        (
            "duplicate",
            1,
            1,
            "rank 2 expected sample 2 after 4 evaluations from rank 1, and got sample 1 (sequence 1 instead of 2): "
            "a hand-off came twice",
        ),
        (
            "shape",
            0,
            2,
            "rank 1 expected sample 2 after 4 evaluations from rank 0, and its latent is float32 [1, 1, 4, 64, 64] "
            "instead of float32 [1, 4, 64, 64]",
        ),
    ],
)
def test_a_hand_off_that_is_not_what_was_agreed_is_named_from_both_sides(
    tmp_path: Path, digests: list[str], kind: str, rank: int, sample: int, message: str
) -> None:
    done = pipeline(tmp_path, "--inject", f"{kind},rank={rank},sample={sample}", world_size=rank + 2)
    assert failure(done) == message
    whole = sample + 1 if kind == "duplicate" else sample
    assert {number: kept.sha256 for number, kept in finished_samples(done).items()} == dict(enumerate(digests[:whole]))


@pytest.mark.parametrize(
    ("fault", "message", "waiting"),
    [
        ("stop,rank=1,sample=2", "rank 1 has been silent for N s, in evaluation 5 of 8 of sample 2", ""),
        (
            "slow,rank=0,sample=2,seconds=100",
            "rank 0 has made no progress for N s, in evaluation 1 of 8 of sample 2",
            "rank 1 has been waiting for sample 2 from rank 0 for ",
        ),
        (
            "late,rank=0,sample=1,seconds=100",
            "rank 0 has made no progress for N s, in the packing of sample 1 for rank 1",
            "rank 1 has been waiting for sample 1 from rank 0 for ",
        ),
    ],
)
def test_a_rank_that_gets_nowhere_is_named_with_what_it_was_doing(
    tmp_path: Path, digests: list[str], fault: str, message: str, waiting: str
) -> None:
    done = pipeline(tmp_path, "--inject", fault)
    assert blamed(done) == message
    assert waiting in failure(done)
    assert_a_beginning(done, digests)
    log = (done.run / "run.log").read_text()
    assert "most recent call first" in log  # the stacks


def test_a_slow_rank_is_not_to_blame_within_the_deadline(tmp_path: Path, digests: list[str]) -> None:
    done = pipeline(tmp_path, "--inject", "slow,rank=1,sample=1,seconds=1")
    assert done.code == 0, done.stderr
    assert [sample.sha256 for _, sample in sorted(finished_samples(done).items())] == digests


def test_an_evaluation_that_takes_longer_than_the_deadline_is_not_killed_as_a_hang(tmp_path: Path) -> None:
    slow = ("--unet", "dummy", "--step-ms", "3000", "--pipeline.deadline=2", "--steps", "2", "--samples", "1")
    done = gpubench("pipe-infer", *ALONE, *slow, "--no-verify", "--world-size", "2", results=tmp_path)
    assert done.code == 0, done.stderr
    assert len(finished_samples(done)) == 1


def test_a_killed_rank_is_named_and_resume_makes_what_it_left_undone(tmp_path: Path, digests: list[str]) -> None:
    done = pipeline(tmp_path / "first", "--inject", "kill,rank=1,sample=3", world_size=3)
    assert blamed(done) == "rank 1 was killed by SIGKILL"
    assert "its last report was in evaluation 3 of 8 of sample 3" in failure(done)
    assert_a_beginning(done, digests)
    again = assert_that_resume_makes_the_rest(done, digests, tmp_path / "second")
    nothing = gpubench("pipe-infer", "--resume", str(again.run), results=tmp_path / "third")
    assert (nothing.code, nothing.stderr) == (0, f"nothing to do: all 4 samples of {again.run} are finished\n")
    assert not nothing.runs
    verified = gpubench("pipe-infer", "--resume", str(again.run), "--verify", results=tmp_path / "verified")
    assert verified.code == 0, verified.stderr
    assert "all 4 samples of" in verified.stderr
    assert "4 of 4 samples are bit-identical to a single-process loop" in verified.stdout
    assert "4 samples over 3 ranks on cpu: no sample was missing, so nothing was timed" in verified.stdout
    assert not (verified.run / "timeline.jsonl").exists()  # nothing was evaluated
    changed = gpubench("pipe-infer", "--resume", str(done.run), "--steps", "9", results=tmp_path / "third")
    said, _ = complaint(changed)
    assert said == "--resume makes the rest of the same samples, and sampling.steps=9 would change them"
    assert not changed.runs


def assert_a_beginning(done: Finished, digests: Sequence[str]) -> None:
    """The first samples are there, however many, and they are right."""
    kept = finished_samples(done)
    assert {number: sample.sha256 for number, sample in kept.items()} == dict(enumerate(digests[: len(kept)]))
    assert len(kept) < SAMPLES


def assert_that_resume_makes_the_rest(done: Finished, digests: Sequence[str], results: Path) -> Finished:
    kept = set(finished_samples(done))
    again = gpubench("pipe-infer", "--resume", str(done.run), "-q", results=results)
    assert again.code == 0, again.stderr
    samples = finished_samples(again)
    assert [samples[number].sha256 for number in range(SAMPLES)] == digests
    assert {number for number, sample in samples.items() if sample.resumed} == kept
    assert {line["sample"] for line in again.lines("timeline.jsonl")} == set(range(SAMPLES)) - kept
    record = again.document("run.json")
    assert (record["status"], record["resumed_from"]) == ("completed", str(done.run))
    return again


def test_a_latent_that_is_not_finite_is_named_with_its_sample_and_evaluation(tmp_path: Path) -> None:
    folder = stable_diffusion(tmp_path / "model")
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    damaged = load_file(weights)
    damaged["conv_out.bias"][0] = float("nan")
    save_file(damaged, weights)
    common = ("--model", str(folder), "--steps", "3", "--samples", "2", "--world-size", "2", "--no-verify")
    done = gpubench("pipe-infer", *ALONE, *common, results=tmp_path / "results")
    assert failure(done) == "rank 0 found sample 0 NaN or infinite after evaluation 1"
    assert not finished_samples(done)


def test_a_disk_that_takes_no_more_ends_the_run_and_what_was_kept_before_is_whole(
    tmp_path: Path, digests: list[str]
) -> None:
    full = ("bash", "-c", f'ulimit -f 40; exec {" ".join(HOST)} "$@"', "bash")  # 40 KiB, and a latent has 64
    done = gpubench("pipe-infer", *DUMMY, *ALONE, "--no-verify", results=tmp_path, launcher=full)
    assert re.match(r"cannot write \S+: File too large", failure(done)), done.stderr
    assert_a_beginning(done, digests)


BLOCKED = (*DUMMY, *ALONE, "--no-verify", "--world-size", "2", "--inject", "late,rank=0,sample=1,seconds=100")


def wait_for_a_sample(results: Path) -> Path:
    """The run directory under `results`, once its first sample is finished: rank 1 waits for the second."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for samples in results.glob("*/*/samples.jsonl"):
            if samples.read_bytes().count(b"\n"):
                return samples.parent
        time.sleep(0.05)
    raise TimeoutError(f"no sample under {results}")


def test_ctrl_c_ends_ranks_that_wait_for_one_another(tmp_path: Path, digests: list[str]) -> None:
    with started("pipe-infer", *BLOCKED, results=tmp_path) as going:
        run = wait_for_a_sample(tmp_path)
        family = going.workers
        assert len(family) >= 2
        going.process.send_signal(signal.SIGINT)
        done = going.finish(30)
    assert done.code == 130, done.stderr
    assert "error: interrupted" in done.stderr
    assert "Traceback" not in done.stderr
    assert not psutil.wait_procs(family, timeout=5)[1]
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert [sample.sha256 for sample in Run.open(run).lines("samples.jsonl", Sample)] == digests[:1]


def test_a_killed_host_leaves_no_workers_and_a_run_that_can_be_resumed(tmp_path: Path, digests: list[str]) -> None:
    with started("pipe-infer", *BLOCKED, results=tmp_path / "first") as going:
        path = wait_for_a_sample(tmp_path / "first")
        family = going.workers
        assert len(family) >= 2
        going.process.kill()
    assert not psutil.wait_procs(family, timeout=15)[1]
    assert Run.open(path).status == "interrupted"
    done = Finished(-signal.SIGKILL, "", "", tmp_path / "first")
    assert_that_resume_makes_the_rest(done, digests, tmp_path / "second")
