"""benchmarks/gpu_suite.py without a GPU: its groups, a rehearsal with tiny models on the CPU, and what it keeps."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from places import BENCHMARKS
from running import PATIENCE, environment, simulated

COMMANDS = {"train-bench", "pipe-infer", "profile", "memory", "compare"}
GIB = 2**30
EIGHT_MINUTES = 480.0
LOAN = 29 * 60.0  # a loan of half an hour, less what starting costs


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def card(load: Callable[[str], Any]) -> Callable[..., Any]:
    def make(gibibytes: float = 80, name: str = "NVIDIA H100 80GB HBM3") -> Any:
        return load("gpu_jobs.card").Card(name, int(gibibytes * GIB))

    return make


@pytest.fixture
def here(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a GPU the one that the suite finds."""

    def put(found: Any) -> None:
        monkeypatch.setattr(load("gpu_jobs.card").Card, "here", classmethod(lambda _: found))
        machine = load("records").Machine("a CPU", "1 GiB", "a GPU", "Linux", "Python 3", "commit 1")
        monkeypatch.setattr(load("records").Machine, "here", classmethod(lambda _: machine))

    return put


@pytest.mark.parametrize("gibibytes", [8, 23.4, 80, 140])
def test_every_group_is_done_in_eight_minutes_and_all_in_half_an_hour(
    load: Callable[[str], Any], card: Callable[..., Any], gibibytes: float
) -> None:
    groups = load("gpu_jobs").groups(card(gibibytes))
    assert len({group.name for group in groups}) == len(groups)
    for group in groups:
        assert 0 < group.seconds <= EIGHT_MINUTES, group.name
        assert group.seconds <= load("gpu_suite").BUDGET, group.name
    assert sum(group.seconds for group in groups if not group.by_name) <= LOAN


def test_what_only_a_gpu_can_tell_comes_first(load: Callable[[str], Any], card: Callable[..., Any]) -> None:
    names = [group.name for group in load("gpu_jobs").groups(card())]
    assert names == ["first-gpu", "tests", "speed", "memory", "overhead", "profiles", "pipelines", "compile"]
    first = load("gpu_jobs").groups(card())[1].jobs[0]
    assert "gpu and device" in first.arguments
    assert "tests/worker/test_gpu.py" in first.arguments


def test_the_jobs_cover_all_five_commands_and_need_only_jobs_of_their_group(
    load: Callable[[str], Any], card: Callable[..., Any]
) -> None:
    groups = load("gpu_jobs").groups(card())
    jobs = [job for group in groups for job in group.jobs]
    assert len({job.name for job in jobs}) == len(jobs)
    named = {part for job in jobs for part in job.arguments}
    assert COMMANDS - named == {"memory"}  # which memory_check.py calls, twice
    assert "benchmarks/memory_check.py" in named
    for group in groups:
        for number, job in enumerate(group.jobs):
            assert set(job.after) <= {one.name for one in group.jobs[:number]}, job.name


def test_batches_follow_from_the_memory_of_the_gpu(card: Callable[..., Any]) -> None:
    sizes = [card(mebibytes / 1024).batch("resnet50", 2560) for mebibytes in (24000, 81559, 143771)]
    assert sizes == [416, 1408, 2560]
    assert [card(gibibytes).batch("sd15-unet", 8) for gibibytes in (8, 24, 80)] == [0, 6, 8]


def test_no_batch_takes_more_than_the_memory_by_prediction(
    load: Callable[[str], Any], card: Callable[..., Any]
) -> None:
    needs = load("gpu_jobs.card").NEEDS
    for gibibytes in (8, 12, 16, 24, 40, 80, 141, 288):
        for model, (constant, each) in needs.items():
            batch = card(gibibytes).batch(model, 4096)
            assert not batch or constant + each * batch < 0.9 * gibibytes * GIB


def test_the_published_figure_stands_beside_its_own_device_and_batch_alone(
    load: Callable[[str], Any], card: Callable[..., Any]
) -> None:
    def quoted(found: Any) -> set[str]:
        return {job.name for group in load("gpu_jobs").groups(found) for job in group.jobs if job.reference}

    assert quoted(card(140.4, "NVIDIA H200")) == {"resnet50-amp"}
    assert quoted(card()) == quoted(card(140.4, "NVIDIA H200 NVL")) == set()


def test_a_dry_run_prints_groups_jobs_and_minutes_without_a_gpu(
    load: Callable[[str], Any], here: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    here(None)
    assert load("gpu_suite").main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    for group in load("gpu_jobs").groups(load("gpu_jobs.card").ASSUMED):
        assert f"| {group.name} " in printed
        assert f"{group.seconds / 60:.1f} min" in printed
        assert all(f"| {job.name} " in printed for job in group.jobs)
    assert load("gpu_suite").main(["--dry-run", "--memory", "12", "--group", "profiles"]) == 0
    assert "skipped: not even one sample fits into 12.0 GiB" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_run(
    load: Callable[[str], Any], here: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    here(None)
    assert load("gpu_suite").main([]) == 2
    assert "error: no GPU is visible\nhint: --rehearse" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--reference"], ["--output", str(BENCHMARKS / "reference" / "other")]])
def test_figures_of_a_simulated_device_never_become_a_reference(
    load: Callable[[str], Any],
    card: Callable[..., Any],
    here: Callable[..., None],
    options: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted((BENCHMARKS / "reference").rglob("*"))
    here(card(name="NVIDIA H100 80GB HBM3 (simulated)"))
    assert load("gpu_suite").main(options) == 2
    assert "NVIDIA H100 80GB HBM3 (simulated) measures nothing" in capsys.readouterr().err
    here(card())
    assert load("gpu_suite").main(["--rehearse", *options]) == 2
    assert "a rehearsal measures nothing" in capsys.readouterr().err
    assert sorted((BENCHMARKS / "reference").rglob("*")) == before


def test_a_second_call_goes_on_where_the_first_one_stopped(
    load: Callable[[str], Any],
    card: Callable[..., Any],
    here: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    suite, result, run = load("gpu_suite"), load("gpu_results").Result, load("gpu_results").Run
    profiled = load("profiled").Profiled("a headline", 0.5, 1, 0.1, None, {}, {}, 2, 0, ["launch-bound"], {})
    ran: list[str] = []

    def attempt(job: Any, output: Path, remaining: float) -> Any:
        ran.append(job.name)
        status = "skipped" if len(ran) == 3 else "failed" if len(ran) == 2 else "completed"
        left = run("a/b", "completed", {"mfu": {"estimate": 0.4, "interval": None}}, ["a warning"], profiled)
        return result(job.name, job.shows, ["python", *job.arguments], status, "", runs=[left])

    here(card())
    monkeypatch.setattr(suite, "attempt", attempt)
    arguments = ["--group", "overhead", "--group", "compile", "--output", str(tmp_path)]
    assert suite.main(arguments) == 1
    assert ran == ["overhead", "equal-runs", "gpt2-compile"]
    document = json.loads((tmp_path / "summary.json").read_text())
    assert "gpt2-bf16" in document["waiting"]
    assert suite.main(arguments) == 1  # equal-runs has failed, and is not tried again unless that is asked for
    assert ran[3:] == ["gpt2-compile"]
    assert suite.main([*arguments, "--again"]) == 0
    assert ran[4:] == ["overhead", "equal-runs", "gpt2-compile"]
    text = (tmp_path / "summary.md").read_text()
    assert "NVIDIA H100 80GB HBM3, 80.0 GiB. Published dense peaks: fp32 66.9" in text
    assert text.count("python benchmarks/gpu_suite.py --group overhead") == 3
    assert text.count("a headline") == text.count("40.0 %") == 3
    assert len(json.loads((tmp_path / "summary.json").read_text())["jobs"]) == 3


def test_results_of_two_devices_are_not_put_into_one_table(
    load: Callable[[str], Any],
    card: Callable[..., Any],
    here: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = load("gpu_summary")
    summary.write(summary.Suite.of(card(), rehearsed=False), tmp_path)
    here(card(140, "NVIDIA H200"))
    assert load("gpu_suite").main(["--output", str(tmp_path)]) == 2
    assert f"{tmp_path} holds results of NVIDIA H100 80GB HBM3, 80.0 GiB" in capsys.readouterr().err


@pytest.mark.stress
def test_a_rehearsal_measures_two_runs_and_judges_them(tmp_path: Path) -> None:
    only = ("--group", "pipelines", "--job", "pipe-sd15", "--job", "compare")
    command = [sys.executable, str(BENCHMARKS / "gpu_suite.py"), "--rehearse", "--budget", "3000", *only]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE, env=environment()
    )
    found = {job["name"]: job for job in json.loads((tmp_path / "summary.json").read_text())["jobs"]}
    assert [job["status"] for job in found.values()] == ["completed", "completed", "completed"], done.stdout
    for name in ("pipe-sd15-fp16-1", "pipe-sd15-fp16-2"):
        (run,) = found[name]["runs"]
        assert run["metrics"]["verified_samples"]["estimate"] == 1
    assert "throughput" in found["compare-ranks"]["printed"]
    assert "| compare-ranks " in done.stdout


def test_an_undecided_bar_is_no_failure_and_a_missed_one_is(load: Callable[[str], Any]) -> None:
    ended, status_of = load("processes").Ended, load("gpu_results").status_of
    job = load("gpu_jobs.job").Job("a", (), "", 1.0)
    assert [status_of(ended(code, "", ""), job) for code in (0, 1, 2, 3, 4, None)] == [
        *("completed", "failed", "failed", "failed", "completed", "stopped")
    ]
    rehearsed = load("gpu_suite").rehearsed(job)
    assert status_of(ended(3, "", ""), rehearsed) == "completed"
    assert status_of(ended(1, "", ""), rehearsed) == "failed"


def test_a_job_that_needs_the_runs_of_another_is_skipped_without_them(
    load: Callable[[str], Any], tmp_path: Path
) -> None:
    job = load("gpu_jobs.job").Job("b", ("-c", ""), "", 1.0, after=("a",))
    found = load("gpu_results").attempt(job, tmp_path, 100.0)
    assert (found.status, found.note) == ("skipped", "a left no run")


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_that_is_here_sizes_the_jobs(load: Callable[[str], Any]) -> None:
    found = load("gpu_jobs.card").Card.here()
    assert found.name == torch.cuda.get_device_name(0)
    assert found.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert found.simulated == simulated()


def test_packages_that_an_image_lacks_or_has_too_old_are_named_and_pytorch_never_is(load: Callable[[str], Any]) -> None:
    wheels = load("gpu_wheels")
    everything = wheels.lacking({}, "3.12")
    assert {"msgspec", "pydantic", "pytest", "diffusers", "jinja2"} <= set(everything)
    assert not {"torch", "triton", "gpubench", "sympy", "networkx"} & set(everything)
    assert not any(name.startswith("nvidia-") for name in everything if name != "nvidia-ml-py")
    image = wheels.installed("# a comment\nnumpy==1.21.0\nPyYAML==6.0.3\njinja2==3.1.6\nlocal @ file:///x\n")
    found = wheels.lacking(image, "3.12")
    assert "jinja2" not in found
    assert "pyyaml" not in found
    assert found["numpy"][1].startswith("1.21.0 is installed, ")
    assert found["msgspec"][1] == "absent"


@pytest.mark.parametrize(
    ("capability", "refused"), [((7, 5), {"bf16", "tf32"}), ((8, 0), set()), (None, set())], ids=["T4", "A100", "AMD"]
)
def test_a_card_is_given_no_precision_that_it_refuses(
    load: Callable[[str], Any], capability: tuple[int, int] | None, refused: set[str]
) -> None:
    card = load("gpu_jobs.card").Card("a GPU", 80 * GIB, capability)
    jobs = [job for group in load("gpu_jobs").groups(card) for job in group.jobs]
    words = {word for job in jobs for word in job.arguments if word.startswith("--precision=")}
    assert {word.removeprefix("--precision=") for word in words} == {"fp32", "amp", "fp16", "bf16", "tf32"} - refused
    assert len({job.name for job in jobs}) == len(jobs)
