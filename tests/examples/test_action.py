"""action.yml and its scripts, run as on a runner: what they measure and publish, and what they keep from whom."""

import importlib.util
import json
import os
import re
import shutil
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
from markdown_it import MarkdownIt
from places import ROOT
from running import environment
from sides_made import make_runs

CI = ROOT / "examples" / "ci"
ACTION, COMMENT = ROOT / "action.yml", CI / "comment" / "action.yml"
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
    (measuring, _), *comparing = calls(runner)
    gate = ["--fail-on", "step_time>3%", "--fail-on", "throughput>3%", "--strict"]
    program = ["--", "python", "train.py", "--note", "two words; $(touch owned)"]
    assert measuring[measuring.index("--vs-ref") :] == ["--vs-ref", "HEAD^1", *gate, "--repeats", "4", *program]
    assert [call[0] for call, _ in comparing] == ["compare"] * 3
    assert (report(runner) / "comparison.txt").read_text().startswith("head is")
    assert json.loads((report(runner) / "comparison.json").read_text())["comparisons"]
    assert not (runner / "owned").exists(), "no shell reads the program"


def test_what_is_measured_is_not_told_of_the_files_that_change_later_steps(
    runner: Path, measured: Callable[[int, float], int]
) -> None:
    measured(1, 1.0)
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
    if text:
        (runner / "comparison.txt").write_text(text, errors="surrogatepass")
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
        [sys.executable, "-I", str(COMMENT.with_name("comment.py"))],
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
        commented(runner, url, "first")
        mark = server.comments[-1]["body"].splitlines()[0]
        server.comments[0]["body"] = mark  # a person who copies the mark
        commented(runner, url, "second " + "x" * 70_000)
    assert len(server.comments) == 101
    assert server.comments[0]["body"] == mark
    assert server.comments[-1]["body"].splitlines()[4].startswith("    second ")
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


def test_no_step_puts_an_input_into_a_script() -> None:
    """What is between ${{ and }} becomes part of the script before a shell reads it."""
    for path in (ACTION, COMMENT, *CI.glob("*.yml")):
        known = yaml.safe_load(path.read_text())
        found = known["runs"]["steps"] if "runs" in known else [s for j in known["jobs"].values() for s in j["steps"]]
        assert found
        assert [step["run"] for step in found if "${{" in step.get("run", "")] == []


def test_only_the_job_that_comments_may_write_and_it_runs_on_a_machine_of_github() -> None:
    jobs = yaml.safe_load((CI / "github-actions.yml").read_text())["jobs"]
    assert "token" not in ACTION.read_text().replace("no step here has a token", "")
    assert jobs["measure"]["permissions"] == {"contents": "read"}
    assert "token" not in json.dumps(jobs["measure"]["steps"])
    assert jobs["comment"]["runs-on"] == "ubuntu-latest"
    assert jobs["comment"]["permissions"] == {"pull-requests": "write"}
    uses = [step.get("uses", "").partition("@")[0] for step in jobs["comment"]["steps"]]
    assert uses == ["actions/download-artifact", "<owner>/gpubench/examples/ci/comment"]


HOSTILE = """\
@everyone @owner/team #1 fixes #2 https://example.com <img src=x> <script>alert(1)</script> &#64;owner
![image](https://example.com/x.png) [link](javascript:alert(1)) <!-- --> ``` ~~~
```
@after-a-fence
~~~

@after-a-blank-line
\r@after-a-carriage-return\v@vertical\f@feed\x1c@separator\x85@next\u2028@line\u2029@paragraph
\t@after-a-tab
  </details> \x1b[2J \u202e \u200b \0
> @quoted
- @listed
| @cell |
    """


@pytest.mark.parametrize("text", [HOSTILE, "\n\n@first", "\ud800@broken", "`" * 70_000, "\n" * 70_000, "\t@" * 30_000])
def test_whatever_a_report_says_is_commented_as_code_of_limited_size(runner: Path, text: str) -> None:
    with github() as (server, url):
        commented(runner, url, text)
    (comment,) = server.comments
    assert len(comment["body"]) < 65_536
    assert comment["body"].count("\n") < 500
    kinds = [token.type for token in MarkdownIt("commonmark", {"html": True}).parse(comment["body"])]
    texts = ["paragraph_open", "inline", "paragraph_close"]
    assert kinds in (
        ["html_block", *texts, "code_block"],
        ["html_block", *texts, "code_block", *texts],
        ["html_block", *texts, *texts],
    )
    outside = [line for line in comment["body"].splitlines() if line and not line.startswith("    ")]
    assert len(outside) <= 3
    assert not any(one in line for line in outside[1:] for one in "@<>[]`#")
    assert all(char.isprintable() or char == "\n" for char in comment["body"])


def test_a_report_that_is_no_file_is_not_followed(runner: Path) -> None:
    (runner / "secret").write_text(TOKEN)
    with github() as (server, url):
        for harm in ("link", "pipe", "none"):
            file = runner / "comparison.txt"
            if harm == "link":
                file.symlink_to(runner / "secret")
            elif harm == "pipe":
                os.mkfifo(file)
            assert "no comparison was left" in commented(runner, url, "")
            file.unlink(missing_ok=True)
    assert server.asked == []


ATTACK = """\
import glob, os
spy = "import os\\nwith open({loot!r}, 'a') as file: print(*os.environ.items(), file=file)\\n"
for folder in glob.glob(os.environ["RUNNER_TEMP"] + "/gpubench/lib/python*/site-packages"):
    open(folder + "/spy.py", "w").write(spy)
    open(folder + "/spy.pth", "w").write("import spy")
for path in glob.glob(os.environ["GITHUB_ACTION_PATH"] + "/**/*.py", recursive=True):
    content = open(path).read()
    open(path, "w").write(spy + content)
exec(spy)
"""
"""A program that puts code into the environment that runs it and into the scripts of the action."""
PYTHON = f"""#!{sys.executable}
import glob, os, subprocess, sys
words = sys.argv[1:]
if words[:2] != ["-m", "venv"]:
    os.execv(sys.executable, [sys.executable, *words])
subprocess.run([sys.executable, "-m", "venv", "--without-pip", words[-1]], check=True)
for name, text in (("pip", "exit 0"), ("gpubench", f"exec {{words[-1]}}/bin/python {{os.environ['STAND_IN']}} $@")):
    with open(f"{{words[-1]}}/bin/{{name}}", "w") as file:
        file.write(f"#!/bin/sh\\n{{text}}\\n")
    os.chmod(file.name, 0o755)
"""
"""A `python3` whose environments have a gpubench that is not installed."""
RUNS_THE_PROGRAM = """\
import json, pathlib, subprocess, sys
words = sys.argv[1:]
if words[0] == "compare":
    print("head is slower than base")
    sys.exit()
runs = pathlib.Path(words[words.index("--results") + 1])
for side in ("base", "head"):
    (runs / side / "run").mkdir(parents=True)
subprocess.run([sys.executable, *words[words.index("--") + 2 :]], check=True)
print(json.dumps({"runs": [{"path": str(runs / side / "run")} for side in ("base", "head")]}))
"""


class Simulated:
    """Runs the jobs of a workflow. Those on runners of GitHub have a machine each, and all others share one."""

    def __init__(self, folder: Path, program: str, known: dict[str, str]) -> None:
        self._folder, self._program, self._known = folder, program, known
        self._artifacts = folder / "artifacts"

    def run(self, workflow: Path) -> None:
        for name, job in yaml.safe_load(workflow.read_text())["jobs"].items():
            machine = self._folder / (name if str(job["runs-on"]).startswith("ubuntu") else "self-hosted")
            for folder in ("bin", "work", "temp"):
                (machine / folder).mkdir(parents=True, exist_ok=True)
            (machine / "bin" / "python3").write_text(PYTHON)
            (machine / "bin" / "python3").chmod(0o755)
            shutil.rmtree(machine / "gpubench", ignore_errors=True)
            (machine / "gpubench").mkdir()
            shutil.copy(ACTION, machine / "gpubench")
            shutil.copytree(CI, machine / "gpubench" / "examples" / "ci")
            said = {
                "github.token": TOKEN,
                "github.workspace": str(machine / "work"),
                "runner.temp": str(machine / "temp"),
            }
            self._steps(job["steps"], machine, said, machine)

    def _steps(self, steps: list[dict[str, Any]], machine: Path, said: dict[str, str], action: Path) -> None:
        for step in steps:
            given = {key: filled(value, said) for key, value in step.get("with", {}).items()}
            used = step.get("uses", "").partition("@")[0]
            if used == "actions/checkout":
                (machine / "work" / "train.py").write_text(self._program)
            elif used == "actions/upload-artifact":
                shutil.copytree(given["path"], self._artifacts / given["name"])
            elif used == "actions/download-artifact":
                shutil.copytree(self._artifacts / given["name"], machine / "work" / given["path"])
            elif used:
                there = machine / used.removeprefix("<owner>/")
                made = yaml.safe_load((there / "action.yml").read_text())
                inputs = {key: given.get(key, one.get("default", "")) for key, one in made["inputs"].items()}
                inner = said | {f"inputs.{key}": value for key, value in inputs.items()}
                self._steps(made["runs"]["steps"], machine, inner, there)
                outputs = {key: filled(one["value"], inner) for key, one in made.get("outputs", {}).items()}
                said |= {f"steps.{step.get('id')}.outputs.{key}": value for key, value in outputs.items()}
            else:
                self._shell(step, machine, said, action)

    def _shell(self, step: dict[str, Any], machine: Path, said: dict[str, str], action: Path) -> None:
        output = machine / "output"
        output.write_text("")
        known = self._known | {key: filled(value, said) for key, value in step.get("env", {}).items()}
        known |= {
            "PATH": f"{machine / 'bin'}:{os.environ['PATH']}",
            "RUNNER_TEMP": str(machine / "temp"),
            "GITHUB_ACTION_PATH": str(action),
            "GITHUB_OUTPUT": str(output),
        }
        there = machine / "work" / filled(step.get("working-directory", "."), said)
        subprocess.run(["bash", "-e", "-c", step["run"]], cwd=there, env=known, timeout=120, check=True)
        for line in output.read_text().splitlines():
            key, _, value = line.partition("=")
            said[f"steps.{step['id']}.outputs.{key}"] = value


def filled(text: str, said: dict[str, str]) -> str:
    """A value of a workflow with its expressions replaced by what they say."""
    return re.sub(r"\$\{\{ *([\w.-]+) *\}\}", lambda found: said[found[1]], str(text))


def test_a_program_that_changes_all_that_it_can_reach_does_not_see_the_token(tmp_path: Path) -> None:
    loot = tmp_path / "loot"
    (tmp_path / "stand_in.py").write_text(RUNS_THE_PROGRAM)
    pull_request = {"number": 7, "head": {"repo": {"full_name": "us/ours"}}}
    (tmp_path / "event.json").write_text(json.dumps({"pull_request": pull_request}))
    with github() as (server, url):
        known = {
            "STAND_IN": str(tmp_path / "stand_in.py"),
            "GITHUB_EVENT_PATH": str(tmp_path / "event.json"),
            "GITHUB_EVENT_NAME": "pull_request",
            "GITHUB_REPOSITORY": "us/ours",
            "GITHUB_API_URL": url,
            "NO_PROXY": "127.0.0.1",
        }
        Simulated(tmp_path, ATTACK.format(loot=str(loot)), known).run(CI / "github-actions.yml")
    assert len(loot.read_text().splitlines()) > 1, "more than the program itself ran its code"
    assert TOKEN not in loot.read_text()
    assert "head is slower than base" in server.comments[0]["body"]


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
    for job, made in (("measure", action), ("comment", yaml.safe_load(COMMENT.read_text()))):
        (used,) = [one for one in workflow["jobs"][job]["steps"] if "gpubench" in one.get("uses", "")]
        assert {*used["with"]} <= {*made["inputs"]}
        assert {key for key, one in made["inputs"].items() if one.get("required")} <= {*used["with"]}
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
