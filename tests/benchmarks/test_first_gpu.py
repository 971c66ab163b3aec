"""The checks of benchmarks/first_gpu.py: that each can be met and missed, and what becomes of one that breaks off."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from places import BENCHMARKS
from running import PATIENCE, environment

from gpubench.devices import Gpu
from gpubench.runs.reader import Run

STEP, PEAK = 0.01, 10**9


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def verdicts(found: Sequence[Any]) -> list[str]:
    return [bar.verdict for bar in found]


# --- A program that measured itself, and what gpubench says of it


@pytest.fixture
def measured(load: Callable[[str], Any], tmp_path: Path) -> Callable[..., Any]:
    """A run of steps of `total` seconds, a warm-up of 2 among them, with a throughput."""

    def make(
        count: int = 10, total: float = STEP, forward: float = 0.4 * STEP, peak: int = PEAK, *, steady: bool = True
    ) -> Any:
        step = {"rank": 0, "total": total, "phases": {"forward": forward, "backward": 0.5 * STEP, "optimizer": 0.0}}
        (tmp_path / "steps.jsonl").write_text("".join(f"{json.dumps(step)}\n" for _ in range(count)))
        window = {"repeat": 0, "first": 2, "steps": count - 2}
        known = {"throughput": 8 / total, "peak_memory_allocated": peak}
        metrics = [{"name": name, "estimate": estimate} for name, estimate in known.items() if steady and estimate]
        summary = {"steady": [window] if steady else [], "metrics": metrics}
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        return load("first_checks.here").Run(tmp_path)

    return make


def own(updates: int = 10) -> dict[str, Any]:
    parts = [{"forward": 0.4 * STEP, "backward": 0.5 * STEP, "optimizer": 0.0} for _ in range(updates)]
    return {"updates": updates, "samples": 8, "totals": [STEP] * (updates - 1), "parts": parts, "peak": PEAK}


def test_a_run_that_says_what_the_program_measured_meets_every_bar(
    load: Callable[[str], Any], measured: Callable[..., Any]
) -> None:
    found = list(load("first_checks.stopwatch").agreement("cuda:1", measured(), own()))
    assert verdicts(found) == ["met"] * 5
    assert found[0].figure == "10 of 10"


@pytest.mark.parametrize(
    ("said", "missed"),
    [
        ({"count": 9}, ["updates that are counted"]),
        ({"count": 11}, ["updates that are counted"]),
        ({"total": 0.98 * STEP}, ["time of a step", "time of a sample"]),
        ({"total": 1.02 * STEP}, ["time of a step", "time of a sample"]),
        ({"forward": 0.1 * STEP}, ["forward, the phase that is most wrong"]),
        ({"peak": 0}, ["peak memory"]),
        ({"peak": 11 * PEAK // 10}, ["peak memory"]),
        ({"steady": False}, ["steps that are measured"]),
    ],
)
def test_a_run_that_says_anything_else_misses_its_bar(
    said: dict[str, Any], missed: list[str], load: Callable[[str], Any], measured: Callable[..., Any]
) -> None:
    found = list(load("first_checks.stopwatch").agreement("cuda:1", measured(**said), own()))
    wrong = [bar.what.removeprefix("cuda:1: ") for bar in found if bar.verdict == "missed"]
    assert len(wrong) == len(missed)
    assert all(one.startswith(start) for one, start in zip(wrong, missed, strict=True))


def test_the_cost_of_the_probe_is_decided_by_all_rounds(load: Callable[[str], Any]) -> None:
    cost = load("first_checks.stopwatch").cost
    rounds = [[1.0, 1.01], [1.05, 1.04], [1.0, 1.05], []]
    assert verdicts([cost("cuda:0", ratios) for ratios in rounds]) == ["met", "missed", "undecided", "skipped"]


@pytest.mark.parametrize(("code", "verdict"), [("raise SystemExit('no such kernel')", "skipped"), ("", "missed")])
def test_a_program_that_fails_without_gpubench_too_shows_nothing_of_it(
    code: str, verdict: str, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = load("first_checks.here")
    (tmp_path / "trained.py").write_text(f"import sys; open(sys.argv[1], 'w').write('{{}}')\n{code}\n")
    monkeypatch.setattr(here, "PROGRAMS", tmp_path)
    place = here.Here(tmp_path / "results", [])
    found = load("first_checks.stopwatch").blamed(place, (), "a graph", here.Failed("CUDA error"))
    assert found.verdict == verdict
    assert found.figure.endswith("no such kernel" if verdict == "skipped" else "CUDA error")


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("Traceback\n  File\nRuntimeError: no triton\n\nSet TORCH_LOGS for more", "RuntimeError: no triton"),
        ("torch.AcceleratorError: CUDA error: launch\nCompile with DSA", "torch.AcceleratorError: CUDA error: launch"),
        ("error: the program ended\nhint: let it run", "the program ended"),
        ("killed", "killed"),
    ],
)
def test_a_failure_is_told_by_its_error_and_not_by_the_advice_below_it(
    printed: str, reason: str, load: Callable[[str], Any]
) -> None:
    assert load("first_checks.here").reason(printed) == reason


def test_one_gpu_leaves_out_what_needs_two_and_says_so(load: Callable[[str], Any], tmp_path: Path) -> None:
    place = load("first_checks.here").Here(tmp_path, ["a GPU"])
    (bar,) = load("first_checks.ranks").check(place)
    assert (bar.verdict, bar.figure) == ("skipped", "one GPU is visible")


AMD = Gpu(None, "AMD gfx942", "", None, None)
"""As the kernel tells of it: NVML does not know it, and only HIP its memory."""


def test_an_amd_gpu_is_sized_by_what_torch_tells_and_has_no_energy_counter(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = load("gpu_jobs.card")
    monkeypatch.setattr(card, "visible_gpus", lambda: [AMD])
    monkeypatch.setattr(card, "_by_torch", lambda: 192 * 2**30)
    found = card.Card.here()
    assert (str(found), found.slug) == ("AMD gfx942, 192.0 GiB", "amd-gfx942")
    assert all(job.fits for group in load("gpu_jobs").groups(found) for job in group.jobs)
    (bar,) = load("first_checks.energy").check(load("first_checks.here").Here(tmp_path, [AMD]))
    assert (bar.verdict, bar.figure) == ("skipped", "NVML does not know this GPU")


@pytest.mark.parametrize("check", ["stopwatch", "graphs", "energy", "inference", "ranks", "tuned", "faults"])
def test_without_a_gpu_a_check_is_skipped_with_the_reason(
    check: str, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("first_gpu")
    monkeypatch.setattr(script, "visible_gpus", list)
    assert script.main([check]) == 0
    assert f"{check}: no GPU is visible" in capsys.readouterr().out


# --- Energy and clocks


def sample(second: int, *, counted: float = 500.0, **facts: Any) -> tuple[float, dict[str, Any]]:
    """A second of 500 W, of which the counter has counted another power."""
    found = {"power_w": 500.0, "energy_j": counted * second, "sm_clock_mhz": 1900, "throttle_reasons": []}
    return float(second), {name: value for name, value in (found | facts).items() if value is not None}


@pytest.mark.parametrize(
    ("facts", "watts", "wanted"),
    [
        ({}, 500.0, ["met", "met", "met"]),
        ({"counted": 400.0}, 400.0, ["missed", "met", "met"]),
        ({}, 590.0, ["met", "missed", "met"]),
        ({"sm_clock_mhz": 600}, 500.0, ["met", "met", "missed"]),
        ({"sm_clock_mhz": 600, "throttle_reasons": ["SwPowerCap"]}, 500.0, ["met", "met", "met"]),
        ({"energy_j": None}, 500.0, ["skipped", "met"]),
        ({"sm_clock_mhz": None}, 500.0, ["met", "met", "missed"]),
    ],
    ids=["right", "counter", "others", "clock", "reason", "no-counter", "no-clock"],
)
def test_energy_is_that_of_the_power_and_of_the_gpu_that_was_used(
    facts: dict[str, Any], watts: float, wanted: list[str], load: Callable[[str], Any]
) -> None:
    metrics = {"energy_per_sample": watts / 100, "throughput": 100.0}
    samples = [sample(second, **facts) for second in range(5)]
    assert verdicts(list(load("first_checks.energy").judged(samples, metrics, 1980))) == wanted


def test_clocks_that_the_driver_does_not_report_are_skipped(load: Callable[[str], Any]) -> None:
    assert verdicts(list(load("first_checks.energy").judged([], {}, None))) == ["skipped", "skipped"]


# --- Faults and the search


@pytest.mark.parametrize(
    ("fault", "found", "verdict"),
    [
        ("item", {"synchronisation": "high"}, "met"),
        ("item", {"pinning": "high"}, "missed"),
        ("pageable", {"blocking-copies": "low"}, "met"),
        ("none", {}, "met"),
        ("none", {"too-few-workers": "low", "below-ceiling": "high"}, "met"),
        ("none", {"synchronisation": "high"}, "missed"),
    ],
)
def test_a_fault_is_met_where_it_is_named_and_a_program_without_where_none_is(
    fault: str, found: dict[str, str], verdict: str, load: Callable[[str], Any]
) -> None:
    assert load("first_checks.faults").judged("what", fault, found).verdict == verdict


def test_each_finding_that_a_fault_may_have_is_one_that_gpubench_has(load: Callable[[str], Any]) -> None:
    page = (BENCHMARKS.parent / "docs" / "profiling.md").read_text()
    for names in load("first_checks.faults").NAMED.values():
        for name in names:
            assert f"`{name}`" in page


@pytest.fixture
def search() -> Callable[..., Any]:
    """What a search leaves that kept or did not keep TF32."""
    from gpubench.gain import Gain
    from gpubench.tuning.conclusion import Conclusion
    from gpubench.tuning.result import Tuning

    def make(ratio: float = 4.0, *, kept: bool = True, proved: bool = True) -> Any:
        gain = Gain(ratio, 0.9 * ratio, 1.1 * ratio)
        conclusion = Conclusion(
            best=(1,), proved=proved, gain=gain, contributions=[], pairs=[], interactions=[], ladder=[], dropped=[],
            tried=[], noise=None,
        )  # fmt: skip
        return Tuning(
            status="completed", command="program", argv=[], started="", seconds=1.0, settings={}, precision="fp32",
            treatments=[], untried=[], most_peak=None, budget=120.0, most_runs=None, look=None, conclusion=conclusion,
            keep={"performance.matmul_precision": "high"} if kept else {},
        )  # fmt: skip

    return make


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        ({}, ["met", "met", "met"]),
        ({"kept": False}, ["missed", "met", "met"]),
        ({"proved": False}, ["met", "missed", "met"]),
        ({"ratio": 2.0}, ["met", "met", "missed"]),
    ],
    ids=["proved", "not-kept", "not-proved", "another-gain"],
)
def test_a_search_has_to_keep_and_prove_the_gain_that_is_known(
    made: dict[str, Any], wanted: list[str], search: Callable[..., Any], load: Callable[[str], Any]
) -> None:
    assert verdicts(list(load("first_checks.tuned").judged(search(**made), 4.1))) == wanted


# --- A job of the suite that breaks off, and what is sent


JUDGES = (
    "import bars, sys; sys.path.insert(0, 'benchmarks'); made = [bars.holds('a', '1', '1', good=True)]; bars.note(made)"
)
ENDS = {
    "met": ("sys.exit(bars.conclude(made))", "completed", ["met"]),
    "missed": ("sys.exit(bars.conclude([*made, bars.every('b', 1, 2)]))", "failed", ["met", "missed"]),
    "breaks": ("raise ValueError('a bug of the check')", "failed", ["met", "failed"]),
    "hangs": ("import time; time.sleep(600)", "stopped", ["met", "stopped"]),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_job_that_fails_or_hangs_is_a_verdict_and_keeps_those_before(
    end: str, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, status, wanted = ENDS[end]
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    seconds = 1.0 if end == "hangs" else 60.0
    job = load("gpu_jobs.job").Job("a", ("-c", f"{JUDGES}\n{code}"), "a check", seconds, verdicts=True)
    found = load("gpu_results").attempt(job, tmp_path, 100.0)
    assert (found.status, verdicts(found.verdicts)) == (status, wanted)
    if end == "breaks":
        assert found.verdicts[-1].figure == "ValueError: a bug of the check"


CLEANS_UP = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
try:
    time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[2]).touch()
"""


def test_ctrl_c_lets_what_is_running_end_what_it_has_started(load: Callable[[str], Any], tmp_path: Path) -> None:
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"

    def interrupt() -> None:
        deadline = time.monotonic() + PATIENCE
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        load("processes").run_for([sys.executable, "-c", CLEANS_UP, str(started), str(cleaned)], PATIENCE, tmp_path)
    thread.join()
    assert cleaned.exists()


def test_a_job_for_which_no_time_is_left_is_skipped_with_the_reason(load: Callable[[str], Any], tmp_path: Path) -> None:
    job = load("gpu_jobs.job").Job("a", ("-c", ""), "a check", 60.0, verdicts=True)
    (bar,) = load("gpu_results").attempt(job, tmp_path, 10.0).verdicts
    assert (bar.verdict, bar.figure) == ("skipped", "needs about 60 s, and 10 s of the budget are left")


def test_ctrl_c_keeps_the_verdicts_so_far_and_ends_the_suite(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, results, records = load("gpu_suite"), load("gpu_results"), load("records")
    card = load("gpu_jobs.card").Card("NVIDIA H100 80GB HBM3", 80 * 2**30)
    machine = records.Machine("a CPU", "1 GiB", "a GPU", "Linux", "Python 3", "commit 1", "driver 1")
    monkeypatch.setattr(load("gpu_jobs.card").Card, "here", classmethod(lambda _: card))
    monkeypatch.setattr(records.Machine, "here", classmethod(lambda _: machine))
    bars, ran = load("bars"), list[str]()

    def run_for(command: Sequence[str], limit: float, folder: Path, environment: Any, *, together: bool) -> Any:
        ran.append(command[2])
        Path(environment[bars.VARIABLE]).write_text(
            json.dumps([{"what": "w", "figure": "f", "bar": "b", "verdict": "met"}])
        )
        if len(ran) == 2:
            raise KeyboardInterrupt
        return load("processes").Ended(0, "", "")

    monkeypatch.setattr(results, "run_for", run_for)
    assert suite.main(["--group", "first-gpu", "--output", str(tmp_path)]) == 130
    assert ran == ["stopwatch", "graphs"]
    document = json.loads((tmp_path / "summary.json").read_text())
    found = {job["name"]: [bar["verdict"] for bar in job["verdicts"]] for job in document["jobs"]}
    assert found == {"first-stopwatch": ["met"], "first-graphs": ["met", "interrupted"]}
    assert "first-energy" in document["waiting"]
    assert document["machine"]["driver"] == "driver 1"
    assert "gpubench is right on NVIDIA H100 80GB HBM3, 80.0 GiB, but 1 of 3 checks are open" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (["met", "met"], "gpubench is right on it: 2 met."),
        (["met", "skipped"], "gpubench is right on it: 1 skipped, 1 met."),
        (["met", "failed", "undecided"], "gpubench is right on it, but 2 of 3 checks are open: "),
        (["met", "missed", "stopped"], "gpubench is wrong on it in 1 of 3 checks: 1 missed, 1 stopped, 1 met."),
        (["skipped"], "gpubench was not checked on it: 1 skipped."),
    ],
)
def test_the_answer_comes_first_and_says_how_much_was_decided(
    found: list[str], said: str, load: Callable[[str], Any]
) -> None:
    assert load("gpu_tables").answer(found, "it").startswith(said)


def test_what_is_sent_names_no_user_no_host_no_path_and_no_serial_number(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sendable = load("sendable")
    monkeypatch.setattr(sendable, "private_names", lambda: ("alice", "lab-7"))
    found = sendable.sendable(
        {
            "called": ["python benchmarks/gpu_suite.py --output /home/alice/out.d/here --group first-gpu"],
            "printed": 'File "/home/alice/gpubench/benchmarks/bars.py", line 3\nalice@lab-7: ~/data/secret.txt',
            "gpu": "GPU-face0000-0000-0000-0000-000000000001 of 3 samples/s, https://a.b/c/d and 1/2",
            "seconds": 1.5,
        }
    )
    assert found == {
        "called": ["python benchmarks/gpu_suite.py --output .../here --group first-gpu"],
        "printed": 'File ".../bars.py", line 3\n...@...: .../secret.txt',
        "gpu": "GPU of 3 samples/s, https://a.b/c/d and 1/2",
        "seconds": 1.5,
    }


def test_the_files_of_a_reference_name_no_host_no_path_and_no_serial_number(
    load: Callable[[str], Any], finished_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = load("gpu_results")
    monkeypatch.setattr(load("sendable"), "private_names", lambda: ("lab-7",))
    results.keep(finished_run, tmp_path)
    kept = tmp_path / finished_run.name
    record, environment = (json.loads((kept / name).read_text()) for name in ("run.json", "environment.json"))
    uuid = "GPU-face0000-0000-0000-0000-000000000001"
    environment["gpus"] = [{"name": "NVIDIA H100", "uuid": uuid}]
    (kept / "environment.json").write_text(json.dumps(environment))
    (tmp_path / "log.txt").write_text(f"{finished_run}/run.json on lab-7: {uuid}")
    assert Path(record["argv"][0]).is_absolute()
    results.publish(tmp_path)
    text = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert not [word for word in (uuid, str(finished_run.parent), record["argv"][0], "lab-7") if word in text]
    published = json.loads((kept / "run.json").read_text())
    assert (published["host"], published["started"]) == ("...", record["started"])
    assert json.loads((kept / "environment.json").read_text())["host"]["name"] == "..."
    assert Run.open(kept).record.host == "..."


def test_the_names_that_are_taken_out_are_those_of_this_user_and_host(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sendable = load("sendable")
    monkeypatch.setattr(sendable.getpass, "getuser", lambda: "root")
    monkeypatch.setattr(sendable.socket, "gethostname", lambda: "box-12.lab.example.org")
    assert sendable.private_names.__wrapped__() == ("box-12.lab.example.org", "box-12")
    assert sys.executable not in sendable.text(f"{sys.executable} failed")


# --- On the simulated CUDA


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs a script of the benchmarks on devices that are slower than the processor, and returns what it printed."""
    monkeypatch.setenv("FAKECUDA_KERNEL_US", "1000")

    def start(script: str, *arguments: str) -> str:
        command = [sys.executable, str(BENCHMARKS / script), *arguments]
        made = environment() | {"BENCHMARK_BARS": str(tmp_path / "bars.json")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=made)
        assert not done.stderr.startswith("Traceback"), done.stderr
        return done.stdout

    return start


@pytest.mark.parametrize(
    ("check", "part", "wanted"),
    [
        ("graphs", "graph", ["CUDA graph of the whole step: updates that are counted"]),
        ("ranks", "ddp", [f"DDP, rank {rank}: updates that are counted" for rank in range(2)]),
    ],
)
@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_what_does_not_depend_on_speed_is_met_on_two_simulated_gpus(
    check: str, part: str, wanted: list[str], started: Callable[..., str], tmp_path: Path
) -> None:
    printed = started("first_gpu.py", check, "--part", part, "--tiny")
    found = {bar["what"]: bar["verdict"] for bar in json.loads((tmp_path / "bars.json").read_text())}
    assert {what: found.get(what) for what in wanted} == dict.fromkeys(wanted, "met"), printed


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_group_leads_with_the_answer_and_leaves_one_document_that_can_be_sent(
    started: Callable[..., str], tmp_path: Path
) -> None:
    jobs = ("first-stopwatch", "first-inference")
    chosen = (part for job in jobs for part in ("--job", job))
    printed = started("gpu_suite.py", "--group", "first-gpu", *chosen, "--output", str(tmp_path), "--budget", "3000")
    document = json.loads((tmp_path / "summary.json").read_text())
    assert [job["name"] for job in document["jobs"]] == list(jobs)
    found = {bar["what"]: bar["verdict"] for job in document["jobs"] for bar in job["verdicts"]}
    for device in ("cuda:0", "cuda:1"):
        assert found[f"{device}: updates that are counted"] == "met", printed
        assert found[f"{device}: peak memory, from the allocator of the device"] == "met", printed
    assert found["inference: calls that are counted"] == "met", printed
    assert {"met"} <= set(found.values()) <= {"met", "missed", "undecided", "skipped"}
    assert printed.startswith("gpubench is ")
    assert "(simulated)" in document["name"]
    assert "cuDNN" in document["machine"]["driver"]
    assert str(tmp_path) not in (tmp_path / "summary.json").read_text()
