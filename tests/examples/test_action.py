"""action.yml and its scripts, run as on a runner: what they measure and publish, and what they keep from whom."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from places import ROOT
from running import environment
from sides_made import make_runs

CI = ROOT / "examples" / "ci"
ACTION = ROOT / "action.yml"
TOKEN = "secret-token"
BOT = "github-actions[bot]"
STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, shutil, subprocess, sys
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps([sys.argv[1:], sorted(name for name in os.environ if name.startswith("GITHUB_"))]) + "\\n")
if sys.argv[1] == "train-bench":
    code = int(os.environ["CODE"])
    if code in (0, 3, 4):
        runs = pathlib.Path(sys.argv[sys.argv.index("--results") + 1])
        for side in ("base", "head"):
            shutil.copytree(pathlib.Path("results") / side, runs / side)
        made = [{{"path": str(next((runs / side).iterdir()))}} for side in ("base", "head")]
        print(json.dumps({{"runs": made}}))
    else:
        print("error: none", file=sys.stderr)
    sys.exit(code)
sys.exit(subprocess.call([sys.executable, "-m", "gpubench", *sys.argv[1:]]))
"""
"""A `gpubench` that measures nothing: it gives runs that were made before. What it compares is real."""


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the checkout and has the files of a runner, whose environment it sets."""
    for name in FILES:
        (tmp_path / name.lower()).touch()
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    (tmp_path / "gpubench").write_text(STAND_IN)
    (tmp_path / "gpubench").chmod(0o755)
    for name, value in (("RUNNER_TEMP", str(tmp_path)), ("GITHUB_EVENT_NAME", "pull_request"), *INPUTS.items()):
        monkeypatch.setenv(name, value)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


FILES = ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_PATH", "GITHUB_STEP_SUMMARY")
INPUTS = {
    "PROGRAM": "python train.py --note 'two words; $(touch owned)'",
    "BASE": "HEAD^1",
    "FAIL_ON": "step_time>3%\nthroughput>3%\n",
    "STRICT": "true",
    "OPTIONS": "--repeats 4",
}


@pytest.fixture
def measured(runner: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], int]:
    """Runs measure.py: `gpubench train-bench` exits with a code and has measured steps so many times as long."""
    script = module("measure")
    monkeypatch.setattr(script, "GPUBENCH", runner / "gpubench")

    def run(code: int, slower: float = 1.0) -> int:
        make_runs(runner / "results", "base", 1.0)
        make_runs(runner / "results", "head", slower)
        monkeypatch.setenv("CODE", str(code))
        return int(script.main())

    return run


def calls(runner: Path) -> list[tuple[list[str], list[str]]]:
    return [tuple(json.loads(line)) for line in (runner / "calls.jsonl").read_text().splitlines()]


def report(runner: Path) -> Path:
    return Path((runner / "github_output").read_text().strip().removeprefix("report="))


def test_a_slower_pull_request_fails_with_a_comparison_of_its_base_and_its_head(
    runner: Path, measured: Callable[[int, float], int]
) -> None:
    assert measured(3, 1.1) == 3
    text = (report(runner) / "comparison.md").read_text()
    assert text.startswith("### head is")
    assert "slower than base" in text.splitlines()[0]
    assert (runner / "github_step_summary").read_text() == text
    assert (report(runner) / "comparison.html").read_text().startswith("<!doctype html>")
    (measuring, _), (comparing, _) = calls(runner)
    gate = ["--fail-on", "step_time>3%", "--fail-on", "throughput>3%", "--strict"]
    program = ["--", "python", "train.py", "--note", "two words; $(touch owned)"]
    assert measuring[measuring.index("--vs-ref") :] == ["--vs-ref", "HEAD^1", *gate, "--repeats", "4", *program]
    assert comparing[0] == "compare"
    assert not (runner / "owned").exists(), "no shell reads the program"


def test_what_is_measured_is_not_told_of_the_files_that_change_later_steps(
    runner: Path, measured: Callable[[int, float], int]
) -> None:
    measured(0, 1.0)
    for _, known in calls(runner):
        assert not {*known} & {*FILES}


@pytest.mark.parametrize("code", [1, 2, 130])
def test_what_could_not_be_measured_fails_with_the_code_of_the_measurement(
    runner: Path, measured: Callable[[int, float], int], code: int
) -> None:
    assert measured(code, 1.0) == code
    assert f"exited with {code}" in (runner / "github_step_summary").read_text()


def test_code_of_forks_is_not_run_with_secrets(
    runner: Path, measured: Callable[[int, float], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_EVENT_NAME", "pull_request_target")
    assert measured(0, 1.0) == 2
    assert not (runner / "calls.jsonl").exists()


class GitHub(BaseHTTPRequestHandler):
    """The comments of one pull request, on loopback."""

    comments: list[dict[str, Any]]
    asked: list[str]
    refused: bool

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, code: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(403 if self.refused else code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> str:
        self.asked.append(f"{self.command} {self.path}")
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        size = int(self.headers.get("Content-Length") or 0)
        return str(json.loads(self.rfile.read(size))["body"]) if size else ""

    def do_GET(self) -> None:
        self.body()
        page = int(self.path.rpartition("page=")[2])
        self.answer(self.comments[100 * (page - 1) : 100 * page])

    def do_POST(self) -> None:
        text = self.body()
        self.comments.append({"id": len(self.comments), "body": text, "user": {"login": BOT}})
        self.answer({}, 201)

    def do_PATCH(self) -> None:
        self.comments[int(self.path.rpartition("/")[2])]["body"] = self.body()
        self.answer({})


@contextmanager
def github() -> Iterator[tuple[type[GitHub], str]]:
    handler = type("Once", (GitHub,), {"comments": [], "asked": [], "refused": False})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield handler, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def commented(runner: Path, url: str, text: str, event: dict[str, Any] | None = None) -> str:
    """Runs comment.py as the action does, and returns what it printed."""
    pull_request = {"number": 7, "head": {"repo": {"full_name": "us/ours"}}}
    (runner / "event.json").write_text(json.dumps({"pull_request": pull_request} if event is None else event))
    (runner / "comparison.md").write_text(text)
    known = {
        "GITHUB_EVENT_PATH": str(runner / "event.json"),
        "GITHUB_REPOSITORY": "us/ours",
        "GITHUB_API_URL": url,
        "REPORT": str(runner),
        "TOKEN": TOKEN,
        "PROGRAM": "python train.py",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-I", str(CI / "comment.py")],
        env=os.environ | known,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert TOKEN not in done.stdout
    return done.stdout


def test_a_comment_is_written_once_and_then_replaced(runner: Path) -> None:
    with github() as (server, url):
        theirs = {"id": 0, "body": "", "user": {"login": "somebody"}}
        server.comments += [dict(theirs, id=number) for number in range(100)]
        commented(runner, url, "### first")
        mark = server.comments[-1]["body"].splitlines()[0]
        server.comments[0]["body"] = mark  # a person who copies the mark
        commented(runner, url, "### second " + "x" * 70_000)
    assert len(server.comments) == 101
    assert server.comments[0]["body"] == mark
    assert server.comments[-1]["body"].startswith(f"{mark}\n### second ")
    assert len(server.comments[-1]["body"]) < 65_536
    assert [one.split()[0] for one in server.asked] == ["GET", "GET", "POST", "GET", "GET", "PATCH"]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({}, "not a pull request"),
        ({"pull_request": {"number": 7, "head": {"repo": {"full_name": "fork/ours"}}}}, "from a fork"),
        ({"pull_request": {"number": 7, "head": {"repo": None}}}, "from a fork"),
    ],
)
def test_nothing_is_sent_for_a_fork_or_without_a_pull_request(runner: Path, event: dict[str, Any], said: str) -> None:
    with github() as (server, url):
        assert said in commented(runner, url, "text", event)
    assert server.asked == []


def test_a_token_that_may_not_write_is_a_warning(runner: Path) -> None:
    with github() as (server, url):
        server.refused = True
        assert commented(runner, url, "text").startswith("::warning::")


def steps() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(ACTION.read_text())["runs"]["steps"]
    return found


def test_no_step_puts_an_input_into_a_script() -> None:
    """What is between ${{ and }} becomes part of the script before a shell reads it."""
    files = (ACTION, *CI.glob("*.yml"))
    for path in files:
        known = yaml.safe_load(path.read_text())
        found = known["runs"]["steps"] if path == ACTION else [s for j in known["jobs"].values() for s in j["steps"]]
        assert found
        assert [step["run"] for step in found if "${{" in step.get("run", "")] == []


def test_the_token_reaches_the_comment_alone() -> None:
    holders = [step["name"] for step in steps() if "token" in json.dumps({"env": step.get("env"), "run": step["run"]})]
    assert holders == ["Comment on the pull request"]


def test_the_workflows_ask_for_no_more_than_they_need() -> None:
    for path in CI.glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert "pull_request_target" not in str(workflow[True])  # YAML reads `on` as true
        allowed = [workflow["permissions"], *(job.get("permissions", {}) for job in workflow["jobs"].values())]
        merged = {what: how for one in allowed for what, how in one.items()}
        writes = {what for what, how in merged.items() if how != "read"}
        assert writes <= ({"pull-requests"} if path.name == "github-actions.yml" else set())
        checkouts = [
            step for job in workflow["jobs"].values() for step in job["steps"] if "checkout" in step.get("uses", "")
        ]
        assert checkouts
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_the_workflow_uses_inputs_and_outputs_that_the_action_has() -> None:
    action = yaml.safe_load(ACTION.read_text())
    workflow = yaml.safe_load((CI / "github-actions.yml").read_text())
    (used,) = [one for one in workflow["jobs"]["speed"]["steps"] if "gpubench" in one.get("uses", "")]
    assert {*used["with"]} <= {*action["inputs"]}
    assert "program" in used["with"]
    outputs = re.findall(r"steps\.speed\.outputs\.(\w+)", (CI / "github-actions.yml").read_text())
    assert {*outputs} <= {*action["outputs"]}


@pytest.mark.stress
def test_a_pull_request_is_measured_as_on_a_runner(tmp_path: Path) -> None:
    """A merge of a pull request, checked out with its base and nothing else."""
    origin, checkout = tmp_path / "origin", tmp_path / "checkout"
    origin.mkdir()

    def git(*words: str, cwd: Path = origin) -> None:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e@l", *words], cwd=cwd, check=True)

    program = (ROOT / "examples" / "session" / "train.py").read_text()
    (origin / "train.py").write_text(program)
    git("init", "--quiet", "--initial-branch", "main")
    git("add", ".")
    git("commit", "--quiet", "--message", "Train")
    git("switch", "--quiet", "--create", "change")
    (origin / "train.py").write_text(program.replace("time.sleep(0.002)", "time.sleep(0.02)"))
    git("commit", "--quiet", "--all", "--message", "Slower storage")
    git("switch", "--quiet", "main")
    git("merge", "--quiet", "--no-ff", "--no-edit", "change")
    git("clone", "--quiet", "--depth", "2", f"file://{origin}", str(checkout), cwd=tmp_path)
    inputs = INPUTS | {
        "PROGRAM": f"{sys.executable} train.py",
        "OPTIONS": "--steps 5 --repeats 3",
        "GITHUB_EVENT_NAME": "pull_request",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }
    known = environment() | inputs | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CI / "measure.py")]
    done = subprocess.run(command, cwd=checkout, env=known, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 3, done
    assert re.match(r"### head is .+ (slower than|as slow as) base in throughput", (tmp_path / "summary").read_text())
