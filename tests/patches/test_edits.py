"""The edits that settings lead to: each diff is the expected one, applies, and leaves the numbers as they were."""

import ast
import os
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from patched_programs import ADAM, CASES, FUNCTIONS, FUSED, PLAIN, THREADS, WORKERS, Case

from gpubench.patches import diff
from gpubench.patches.edits import OF_DDP, OF_LOADERS, Patch, Program, edited
from gpubench.settings.programs import from_outside


def line_of(source: str, text: str) -> int:
    lines = source.splitlines()
    if text == "last":
        return len(lines)
    return next(number for number, line in enumerate(lines, 1) if text in line and not line.startswith("from"))


def patch_of(folder: Path, case: Case) -> Patch:
    (folder / "train.py").write_bytes(case.source.encode(case.encoding))
    places = {"loader": case.loader, "model": case.model} | dict(case.more)
    known = {name: f"train.py:{line_of(case.source, text)}" for name, text in places.items() if text in case.source}
    if case.loader == "last":
        known["loader"] = f"train.py:{line_of(case.source, 'last')}"
    optimizers = {
        f"torch.optim.{name}": [
            f"train.py:{number}" for number, line in enumerate(case.source.splitlines(), 1) if f"optim.{name}(" in line
        ]
        for name in ("SGD", "AdamW")
        if f"optim.{name}(" in case.source
    }
    return edited(case.settings, Program(folder, case.words, known, optimizers, "cpu"))


def text_of(patch: Patch) -> bytes:
    return diff.written(patch.files, ["a patch", "--- of a test"], lambda name, lines: f"{name} {lines.start}")


def losses_of(path: Path) -> list[float]:
    """The losses of a program that is run in a fork, without a compiler."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            warnings.simplefilter("ignore")
            torch.compiler.set_stance("force_eager")
            names: dict[str, object] = {"__name__": "__main__", "__file__": str(path)}
            exec(compile(path.read_bytes(), str(path), "exec"), names)
            losses = repr(names["losses"])
            names.clear()  # ends the workers of its DataLoaders
            os.write(writing, losses.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return [float(one) for one in text.strip("[]").split(",") if one]


def applies(folder: Path, patch: Path) -> None:
    """Checks that both programs accept a patch, from the folder of the program."""
    for command in (["git", "apply", "--check"], ["patch", "--dry-run", "-p1", "--fuzz=0", "-i"]):
        done = subprocess.run([*command, str(patch)], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_setting_becomes_the_expected_edit_or_a_sentence(tmp_path: Path, case: Case) -> None:
    patch = patch_of(tmp_path, case)
    said = " ".join(patch.left.values())
    assert case.left in said
    assert bool(case.left) == bool(said), said
    if not case.diff:
        assert not patch.files
        return
    written = text_of(patch)
    body = written.partition(b"@@")[2].decode(case.encoding, "strict")
    lines = body.replace("\r\n", "\r\0").replace("\n", "\n\0").replace("\r\0", "\r\n\0").split("\0")
    assert "".join(line for line in lines if line[:1] in ("-", "+", "\\")) == case.diff
    (file := tmp_path / "best.patch").write_bytes(written)
    applies(tmp_path, file)
    before = losses_of(tmp_path / "train.py") if case.runs else []
    subprocess.run(["git", "apply", str(file)], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "train.py").read_bytes() == patch.files["train.py"].after
    compile((tmp_path / "train.py").read_bytes(), "train.py", "exec")
    if case.runs:
        after = losses_of(tmp_path / "train.py")
        assert len(before) == 2
        assert after == pytest.approx(before, rel=1e-5 if case.same else 0.05)


def test_most_programs_of_the_table_are_different() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_setting_of_a_program_leads_to_an_edit_or_a_sentence(tmp_path: Path) -> None:
    values = {"training.optimizer_impl": "fused", "precision": "bf16", "performance.matmul_precision": "high"}
    for key in from_outside():
        value = values.get(key, 5.0 if key == "distributed.bucket_mb" else 1)
        patch = patch_of(tmp_path, Case(key, PLAIN, {key: value}))
        assert bool(patch.edits) != bool(patch.left), key
    assert {*OF_LOADERS, *OF_DDP} <= from_outside().keys()


def test_settings_of_ddp_are_arguments_of_its_call(tmp_path: Path) -> None:
    source = PLAIN.replace(
        "model = nn.Linear(4, 3)\n",
        "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(nn.Linear(4, 3), device_ids=[0])\n",
    )
    settings = {"distributed.bucket_mb": 5.0, "distributed.gradient_as_bucket_view": True}
    patch = patch_of(tmp_path, Case("ddp", source, settings, more={"ddp": "= DDP("}))
    after = patch.files["train.py"].after.decode()
    assert "DDP(nn.Linear(4, 3), device_ids=[0], bucket_cap_mb=5, gradient_as_bucket_view=True)" in after


@pytest.mark.parametrize(
    ("call", "settings", "expected"),
    [
        ("TrainingArguments('out')", {"data.workers": 2}, "TrainingArguments('out', dataloader_num_workers=2)"),
        ("TrainingArguments('out')", {"precision": "bf16"}, "TrainingArguments('out', bf16=True)"),
        ("TrainingArguments('x', optim='adamw_torch')", {"training.optimizer_impl": "fused"}, '"adamw_torch_fused")'),
        ("TrainingArguments('out')", {"performance.compile": True}, "TrainingArguments('out', torch_compile=True)"),
    ],
)
def test_what_the_trainer_of_transformers_does_is_set_by_its_arguments(
    tmp_path: Path, call: str, settings: dict[str, object], expected: str
) -> None:
    source = f"from transformers import Trainer, TrainingArguments\ngiven = {call}\nTrainer(None, given).train()\n"
    (tmp_path / "train.py").write_text(source)
    place = "train.py:3 (by transformers)"
    program = Program(tmp_path, ["python", "train.py"], {"loader": place, "model": place}, {"AdamW": [place]}, "cpu")
    patch = edited(settings, program)
    assert expected in patch.files["train.py"].after.decode()
    apart = {"performance.cpu_threads": 1, "performance.channels_last": True}
    found = edited(apart, program)
    assert "set_num_threads(1)" in found.files["train.py"].after.decode()
    assert "move it to torch.channels_last" in found.left["performance.channels_last"]
    (tmp_path / "train.py").write_text(source.replace("TrainingArguments(", "Made("))
    assert "set" in next(iter(edited(settings, program).left.values()))


@pytest.mark.parametrize(
    ("place", "words", "sentence"),
    [
        ("../other.py:3", "", "is not below"),
        ("/usr/lib/x.py:3", "", "is not below"),
        ("gone.py:3", "", "cannot be read"),
        ("venv/lib/site-packages/x.py:1", "", "is an installed package"),
        ("book.ipynb:1", "", "is not a file that a diff"),
        ('a"b.py:1', "", "is not a file that a diff"),
        ("train.py:9999", "", "by another name"),
        ("train.py", "", "is not below"),
        pytest.param(f"train.py:{'9' * 5000}", "", "is not below", id="a line of thousands of digits"),
        ("train.py:²", "", "is not below"),
    ],
)
def test_a_place_that_cannot_be_edited_is_a_sentence(tmp_path: Path, place: str, words: str, sentence: str) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    patch = edited(WORKERS, Program(tmp_path, ["python", "train.py"], {"loader": place}))
    assert not patch.files
    assert sentence in patch.left["data.workers"]


def test_the_patch_of_a_program_in_a_folder_of_a_repository_applies_there(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    folder = tmp_path / "a folder"
    folder.mkdir()
    patch = patch_of(folder, Case("x", FUNCTIONS, WORKERS, loader="train(first, DataLoader("))
    (tmp_path / "best.patch").write_bytes(text_of(patch))
    applies(folder, tmp_path / "best.patch")


def test_the_name_of_a_file_may_have_spaces_and_umlauts(tmp_path: Path) -> None:
    name = "my tr\u00e4in.py"
    (tmp_path / name).write_text(PLAIN)
    program = Program(tmp_path, ["python", name], {"loader": f"{name}:{line_of(PLAIN, 'DataLoader(')}"})
    patch = edited(WORKERS, program)
    (tmp_path / "best.patch").write_bytes(text_of(patch))
    applies(tmp_path, tmp_path / "best.patch")
    assert diff.applied(text_of(patch), lambda one: (tmp_path / one).read_bytes()) == patch.files


@pytest.mark.parametrize(("device", "is_edited"), [("cpu", True), ("cuda", False)])
def test_a_loss_that_autocast_refuses_on_a_gpu_is_not_put_into_it(tmp_path: Path, device: str, is_edited: bool) -> None:
    source = PLAIN.replace("nn.functional.cross_entropy(model(x), y)", "nn.BCELoss()(model(x).sigmoid()[:, 0], y / 3)")
    (tmp_path / "train.py").write_text(source)
    place = f"train.py:{line_of(source, 'model(x)')}"
    patch = edited({"precision": "bf16"}, Program(tmp_path, ["python", "train.py"], {"model": place}, {}, device))
    assert bool(patch.files) is is_edited
    assert is_edited or f"not around BCELoss at {place}" in patch.left["precision"]


def test_a_file_beside_a_script_from_elsewhere_is_not_taken_for_one_here(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(PLAIN)
    place = f"train.py:{line_of(PLAIN, 'DataLoader(')}"  # as the probe names it
    words = ["python", str(tmp_path / "there" / "train.py")]
    patch = edited(WORKERS, Program(tmp_path / "here", words, {"loader": place}))
    assert not patch.files
    assert "is not below" in patch.left["data.workers"]


def test_what_a_link_is_to_is_edited(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "impl.py").write_text(PLAIN)
    (tmp_path / "train.py").symlink_to("real/impl.py")
    place = f"train.py:{line_of(PLAIN, 'DataLoader(')}"
    patch = edited(WORKERS, Program(tmp_path, ["python", "train.py"], {"loader": place}))
    assert list(patch.files) == ["real/impl.py"]
    (tmp_path / "best.patch").write_bytes(text_of(patch))
    applies(tmp_path, tmp_path / "best.patch")


def test_edits_of_lines_beside_each_other_find_their_lines(tmp_path: Path) -> None:
    settings = {"performance.compile": True, "data.persistent_workers": True, **WORKERS, **FUSED}
    patch = patch_of(tmp_path, Case("x", ADAM, settings))
    assert not patch.left
    after = patch.files["train.py"].after.decode()
    for line in ("num_workers=1, persistent_workers=True)", "model.compile()", "lr=0.1, fused=True)"):
        assert line in after


def test_a_sentence_names_the_line_of_the_file_as_it_is(tmp_path: Path) -> None:
    source = PLAIN.replace("batch_size=4)", "batch_size=4, num_workers=int('0'))")
    patch = patch_of(tmp_path, Case("x", source, {"performance.compile": True, **THREADS, **WORKERS}))
    assert patch.left["data.workers"].startswith(f"train.py:{line_of(source, 'DataLoader(')} computes num_workers")


def test_what_needs_workers_is_left_with_them(tmp_path: Path) -> None:
    source = PLAIN.replace("batch_size=4)", "batch_size=4, num_workers=int('0'))")
    patch = patch_of(tmp_path, Case("x", source, {"data.persistent_workers": True, "data.workers": 1}))
    assert not patch.files
    assert patch.left.keys() == {"data.persistent_workers", "data.workers"}


@pytest.mark.parametrize(
    ("key", "value", "device"),
    [
        ("precision", "bf16", 'cpu" if not print("run") else "cpu'),
        ("performance.compile_mode", 'default") or print("run', "cpu"),
        ("performance.compile_mode", "{0.__class__}\n", "cpu"),
        ("performance.matmul_precision", 'high"); print("run', "cpu"),
    ],
)
def test_no_value_of_a_setting_becomes_code(tmp_path: Path, key: str, value: str, device: str) -> None:
    """A search that somebody has sent names values and devices of its own."""
    (tmp_path / "train.py").write_text(PLAIN)
    place = f"train.py:{line_of(PLAIN, 'model(x)')}"
    places = {"model": place, "optimizer": f"train.py:{line_of(PLAIN, 'optim')}"}
    settings = {key: value} | ({"performance.compile": True} if "compile" in key else {})
    patch = edited(settings, Program(tmp_path, ["python", "train.py"], places, {}, device))
    assert "train.py" in patch.files
    tree = ast.parse(patch.files["train.py"].after)
    called = [ast.unparse(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)]
    assert called.count("print") == PLAIN.count("print(")
    texts = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant)]
    assert (device if key == "precision" else value) in texts
