"""Treatments: what they change in a program, what the probe tells about it, and what they find nothing to change in."""

import importlib
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import DOCS
from probing import RECORDED, Loop, probed
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gpubench import probe
from gpubench.kinds.program.code_of_fixes import in_code
from gpubench.settings.programs import from_outside


def test_treatments_change_how_a_program_runs_and_the_probe_tells_how_it_does(tmp_path: Path) -> None:
    changes = {
        "data.workers": 1,
        "data.prefetch": 3,
        "training.optimizer_impl": "foreach",
        "performance.cpu_threads": 2,
        "performance.matmul_precision": "high",
        "performance.cudnn_benchmark": True,
    }

    def run() -> None:
        torch.set_num_threads(1)  # a treatment has priority over the program
        torch.backends.cudnn.benchmark = False
        Loop()()

    plain = probed(tmp_path, run)
    (tmp_path / "host").unlink()
    changed = probed(tmp_path, run, treatments=changes)
    assert plain.settings == {
        "precision": "fp32",
        "data.workers": 0,
        "data.pin_memory": False,
        "training.optimizer_impl": "auto",
        "training.grad_accumulation": 1,
        "performance.compile": False,
        "performance.compile_mode": "default",
        "performance.sdpa": "fused",
        "performance.cpu_threads": 1,
        "performance.matmul_precision": "highest",
        "performance.cudnn_benchmark": False,
    }
    assert changed.settings == plain.settings | changes | {"data.persistent_workers": False}
    assert changed.missed == {"performance.cudnn_benchmark": "the program uses no GPU"}
    assert [step["loss"] for step in changed.steps] == pytest.approx([step["loss"] for step in plain.steps])


def test_compiling_is_a_treatment_of_the_outermost_modules(tmp_path: Path) -> None:
    compiled = tmp_path / "compiled"

    def stand_in(module: nn.Module) -> None:
        compiled.write_text(type(module).__name__)

    def run() -> None:
        nn.Module.compile = stand_in  # type: ignore[assignment, method-assign]
        Loop()()

    assert probed(tmp_path, run, treatments={"performance.compile": True}).code == 0
    assert compiled.read_text() == "Sequential"


def test_the_workers_of_a_stream_are_not_changed(tmp_path: Path) -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.randn(48, 3))

    def run() -> None:
        loop = Loop()
        for batch in DataLoader(Stream(), batch_size=4):
            loop.step(batch)

    found = probed(tmp_path, run, treatments={"data.workers": 2})
    assert len(found.steps) == 12
    assert "data.workers" not in found.settings
    assert set(found.missed) == {"data.workers"}


class Images(Loop):
    """A convolutional network without a DataLoader, whose weights and inputs are kept as the network sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []
        convolution = nn.Conv2d(3, 4, 3)
        convolution.register_forward_pre_hook(lambda module, args: self.seen.append((module.weight, args[0])))
        self.model = nn.Sequential(convolution, nn.Flatten(), nn.Linear(4 * 6 * 6, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def __call__(self) -> None:
        for _ in range(8):
            self.step(torch.randn(2, 3, 8, 8))


def test_channels_last_lays_out_weights_their_states_and_inputs(tmp_path: Path) -> None:
    def run(last: bool) -> Callable[[], None]:
        def loop() -> None:
            made = Images()
            made()
            weight, batch = made.seen[-1]
            state = made.optimizer.state[weight]["momentum_buffer"]
            for tensor in (weight, batch, state):
                assert tensor.is_contiguous(memory_format=torch.channels_last) == last
            print(*made.losses, file=(tmp_path / f"{last}").open("w"))

        return loop

    plain = probed(tmp_path, run(last=False))
    (tmp_path / "host").unlink()
    changed = probed(tmp_path, run(last=True), treatments={"performance.channels_last": True})
    assert (plain.code, changed.code) == (0, 0)
    assert (plain.settings["performance.channels_last"], changed.settings["performance.channels_last"]) == (False, True)
    assert changed.missed == {}
    one, other = ([float(loss) for loss in (tmp_path / name).read_text().split()] for name in ("False", "True"))
    assert one == pytest.approx(other, rel=1e-4)


def test_bf16_is_the_arithmetic_of_the_modules_and_the_loss_stays_in_fp32(tmp_path: Path) -> None:
    inside: set[torch.dtype] = set()
    outside: set[torch.dtype] = set()

    def run() -> None:
        loop = Loop(16)
        loop.model[0].register_forward_hook(lambda module, args, output: inside.add(output.dtype))  # type: ignore[index]
        for number, (batch,) in enumerate(loop.data):
            loop.optimizer.zero_grad()
            output = loop.model(batch)
            loss = output.square().mean()
            loss.backward()
            loop.optimizer.step()
            if number > 3:
                outside.update((output.dtype, loss.dtype, loop.model[0].weight.grad.dtype))  # type: ignore[index]
            if number == 3:
                inside.clear()
        assert (inside, outside) == ({torch.bfloat16}, {torch.float32})

    changed = probed(tmp_path, run, treatments={"precision": "bf16"})
    assert (changed.code, changed.missed) == (0, {})


@pytest.mark.parametrize(("asked", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), (None, torch.float16)])
def test_the_precision_of_a_program_that_has_autocast_and_a_scaler(
    tmp_path: Path, asked: str | None, dtype: torch.dtype
) -> None:
    def run() -> None:
        scaler = torch.amp.GradScaler("cpu")
        assert scaler.is_enabled() == (asked is None)
        with torch.autocast("cpu", torch.float16):
            assert nn.Linear(3, 1)(torch.randn(2, 3)).dtype is dtype
            Loop()()

    found = probed(tmp_path, run, treatments={"precision": asked} if asked else None)
    assert (found.code, found.missed) == (0, {})
    assert found.settings["precision"] == (asked or "amp")


class Casting(nn.Module):
    """Computes a model within a context of its own."""

    def __init__(self, model: nn.Module, *, gradients: bool = True) -> None:
        super().__init__()
        self.model, self._gradients = model, gradients

    def forward(self, batch: Tensor) -> Tensor:
        with torch.set_grad_enabled(self._gradients), torch.autocast("cpu", torch.bfloat16):
            output: Tensor = self.model(batch)
        return output.float()


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_inside_of_a_model_is_seen_also_in_compiled_code(tmp_path: Path, *, compiled: bool) -> None:
    def run() -> None:
        loop = Loop()
        loop.model = Casting(loop.model)
        if compiled:
            loop.model.compile(backend="aot_eager")
        loop()

    found = probed(tmp_path, run)
    assert (found.code, found.settings["performance.compile"], found.settings["precision"]) == (0, compiled, "bf16")


def test_autocast_of_a_teacher_inside_of_a_model_is_not_that_of_the_model(tmp_path: Path) -> None:
    class Student(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.teacher = model, Casting(nn.Linear(3, 1), gradients=False)

        def forward(self, batch: Tensor) -> Tensor:
            output: Tensor = self.model(batch) - self.teacher(batch)
            return output

    def run() -> None:
        loop = Loop()
        loop.model = Student(loop.model)
        loop()

    assert probed(tmp_path, run).settings["precision"] == "fp32"


def test_a_program_chooses_no_kernels_of_attention_against_a_treatment(tmp_path: Path) -> None:
    def run() -> None:
        torch.backends.cuda.enable_flash_sdp(True)
        query = torch.randn(1, 1, 4, 8)
        with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert not torch.backends.cuda.flash_sdp_enabled()
            nn.functional.scaled_dot_product_attention(query, query, query)
        Loop()()

    found = probed(tmp_path, run, treatments={"performance.sdpa": "math"})
    assert (found.code, found.missed) == (0, {})
    assert found.settings["performance.sdpa"] == "math"


def test_a_program_compiles_nothing_against_a_treatment(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        assert torch.compile(loop.model) is loop.model
        assert torch.compile()(loop.step) == loop.step
        loop()

    found = probed(tmp_path, run, treatments={"performance.compile": False})
    assert (found.code, found.missed) == (0, {})


def test_the_mode_of_compilation_is_a_treatment_of_what_is_compiled(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def compiled(model: nn.Module, **options: Any) -> nn.Module:
        asked.append(options)
        return model

    def run() -> None:
        loop = Loop()
        loop.model = torch.compile(loop.model, options={"max_autotune": True})  # type: ignore[assignment]
        loop()
        assert asked == [{"mode": "max-autotune"}]

    original, torch.compile = torch.compile, compiled  # type: ignore[assignment]
    try:
        found = probed(tmp_path, run, treatments={"performance.compile_mode": "max-autotune"})
    finally:
        torch.compile = original
    assert (found.code, found.missed) == (0, {})


def test_the_buckets_of_ddp(tmp_path: Path) -> None:
    changes = {"distributed.bucket_mb": 1.0, "distributed.gradient_as_bucket_view": True}

    def run() -> None:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        loop = Loop()
        loop.model = nn.parallel.DistributedDataParallel(loop.model)
        loop()
        torch.distributed.destroy_process_group()

    found = probed(tmp_path, run, treatments=changes)
    assert (found.code, found.missed) == (0, {})
    assert found.settings.items() >= (changes | {"distributed.strategy": "ddp"}).items()
    assert Path(__file__).name in found.events["modelbuilt"]["places"]["ddp"]


class Own(torch.optim.Adam):
    """An optimizer of the program, with the arguments of the class that it is made after and a loop of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.01 * parameter.grad


def test_treatments_that_find_nothing_to_change_are_reported_and_change_nothing(tmp_path: Path) -> None:
    every = {
        "data.workers": 1,
        "data.pin_memory": True,
        "data.prefetch": 2,
        "data.persistent_workers": True,
        "data.cached": True,
        "training.optimizer_impl": "fused",
        "performance.channels_last": True,
        "performance.compile_mode": "default",
        "performance.cudnn_benchmark": True,
        "performance.sdpa": "fused",
        "performance.expandable_segments": True,
        "distributed.bucket_mb": 1.0,
        "distributed.gradient_as_bucket_view": True,
        "precision": "fp32",
    }
    loop = Loop()
    losses = [0.0]

    def run() -> None:
        loop.optimizer = torch.optim.LBFGS(loop.model.parameters())
        loop.optimizer = torch.optim.RMSprop(loop.model.parameters(), foreach=False)
        for _ in range(8):
            loop.step(torch.randn(4, 3))
        losses[:] = loop.losses

    run()
    expected, loop = list(losses), Loop()
    found = probed(tmp_path, run, treatments=every)
    assert found.code == 0
    assert found.missed.keys() == every.keys()
    assert [step["loss"] for step in found.steps] == expected
    always = {"performance.compile", "performance.matmul_precision", "performance.cpu_threads", "seed"}
    assert every.keys() | always == from_outside().keys()


def test_a_program_that_sets_no_seed_trains_the_same_again_with_one(tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for number, seed in enumerate((3, 3, 4)):
        folder = tmp_path / str(number)
        folder.mkdir()
        torch.seed()
        random.seed()
        np.random.seed()

        def run() -> None:
            loop = Loop(8)
            for _ in range(8):
                loop.step(torch.randn(4, 3) + random.random() + float(np.random.rand()))

        found = probed(folder, run, treatments={"seed": seed})
        assert found.missed == {}
        losses.append([step["loss"] for step in found.steps])
    assert losses[0] == losses[1] != losses[2]


def test_workers_are_needed_for_what_workers_do_and_a_gpu_for_pinning(tmp_path: Path) -> None:
    changes = {"data.pin_memory": True, "data.prefetch": 2, "data.persistent_workers": True}
    assert probed(tmp_path, lambda: Loop()(), treatments=changes).missed.keys() == changes.keys()
    (tmp_path / "host").unlink()
    found = probed(tmp_path, lambda: Loop()(), treatments={"data.workers": 1, "data.persistent_workers": True})
    assert found.missed == {}
    assert found.settings["data.persistent_workers"] is True


def test_an_optimizer_that_refuses_a_treatment_is_made_as_the_program_asks(tmp_path: Path) -> None:
    loop = Loop(8)

    def run() -> None:
        generated = (each for each in loop.model.parameters())
        refusing = torch.optim.AdamW(generated, differentiable=True)  # which excludes fused=True
        assert len(refusing.param_groups[0]["params"]) == 4
        loop.optimizer = torch.optim.RMSprop(loop.model.parameters())
        loop()

    found = probed(tmp_path, run, treatments={"training.optimizer_impl": "fused"})
    assert found.code == 0
    assert "refuses" in found.missed["training.optimizer_impl"]


def test_an_optimizer_of_the_program_has_no_implementation_to_choose(tmp_path: Path) -> None:
    loop = Loop()

    def run() -> None:
        loop.optimizer = Own(loop.model.parameters())
        loop()

    found = probed(tmp_path, run)
    assert found.code == 0
    assert "training.optimizer_impl" not in found.settings
    (tmp_path / "host").unlink()
    found = probed(tmp_path, run, treatments={"training.optimizer_impl": "fused"})
    assert "Own" in found.missed["training.optimizer_impl"]


def line(place: str) -> str:
    """Returns the line of the source that a place names."""
    path, _, number = place.partition(" ")[0].rpartition(":")
    return Path(path).read_text().splitlines()[int(number) - 1].strip()


def test_the_probe_finds_the_lines_that_treatments_change(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "trainer.py"
    library.parent.mkdir()
    library.write_text(
        "def optimizer(cls, *args):\n    return cls(*args)\n"
        "def again(cls, loader):\n    return cls(loader.dataset, batch_size=loader.batch_size)\n"
    )

    def run() -> None:
        sys.path.insert(0, str(library.parent))
        import trainer  # type: ignore[import-not-found]

        loop = Loop()
        loop.optimizer = trainer.optimizer(torch.optim.Adam, loop.model.parameters())
        own = DataLoader(TensorDataset(torch.randn(48, 3)), batch_size=4)
        loop.data = trainer.again(DataLoader, own)
        loop()

    built = probed(tmp_path, run).events["modelbuilt"]
    places, (optimizer,) = built["places"], built["optimizers"]["torch.optim.Adam"]
    assert places.keys() == {"loader", "model", "model self.model"}
    assert "own = DataLoader(" in line(places["loader"])
    assert "self.model(batch)" in line(places["model"])
    assert "trainer.optimizer(" in line(optimizer)
    assert optimizer.endswith(" (by trainer)")


def test_an_installed_probe_does_not_name_itself_as_who_made_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    shutil.copytree(Path(probe.__file__).parent, packages / "_installed_probe")
    monkeypatch.syspath_prepend(str(packages))
    places = importlib.import_module("_installed_probe.observed").SourcePlaces()
    places.remember(1, 2)
    assert "remember(1, 2)" in line(places.remembered[1])
    assert "(by" not in places.remembered[1]


def test_all_optimizers_that_can_be_fused_are_named_with_their_lines(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def run() -> None:
        loop = Loop(12)
        made = [torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(2)]
        more = torch.optim.AdamW(loop.model.parameters()), torch.optim.RMSprop(loop.model.parameters())
        own = Own(loop.model.parameters())
        loop()
        del made, more, own

    optimizers = probed(tmp_path, run).events["modelbuilt"]["optimizers"]
    assert {name: len(lines) for name, lines in optimizers.items()} == {"torch.optim.AdamW": 2, "torch.optim.SGD": 1}


def test_a_fix_in_code_puts_the_arguments_of_a_call_together_with_its_place() -> None:
    places = {"loader": "train.py:3", "model": "train.py:7"}
    fix = {"data.workers": 4, "data.pin_memory": True}
    assert in_code(fix, places, {}) == "DataLoader(..., num_workers=4, pin_memory=True) at train.py:3"
    more = places | {
        "loader 2": "train.py:5",
        "model net": "train.py:7",
        "model head": "train.py:8",
        "model 6": "train.py:9",
    }
    assert in_code({"data.workers": 4}, more, {}) == "DataLoader(..., num_workers=4) at train.py:3 and train.py:5"
    assert in_code({"performance.compile": True}, more, {}).endswith("train.py:7, and likewise head")
    graphs = {"performance.compile": True, "performance.compile_mode": "reduce-overhead"}
    compiled = in_code(graphs, places, {})
    assert compiled.startswith("model = torch.compile(model, mode='reduce-overhead') ")
    assert "train.py:7" in compiled
    for key in ("precision", "performance.sdpa", "performance.channels_last"):
        code = from_outside()[key].code
        assert isinstance(code, Mapping)
        assert {value: in_code({key: value}, {}, {}) for value in code} == code
    fused = {"training.optimizer_impl": "fused"}
    assert in_code(fused, places, {}) == "torch.optim.<Optimizer>(..., fused=True)"
    made = {"torch.optim.Adam": ["train.py:4", "train.py:5"], "torch.optim.SGD": []}
    named = "torch.optim.Adam(..., fused=True) at train.py:4 and train.py:5; torch.optim.SGD(..., fused=True)"
    assert in_code(fused, places, made) == named


def test_every_treatment_is_in_the_table_of_the_documentation_with_what_it_does_to_numbers() -> None:
    page = DOCS / "your-program.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    for key, treatment in from_outside().items():
        (row,) = (row for row in rows if f"`{key}`" in row.split("|")[1] and row.count("|") == 5)
        assert row.endswith(f"| {'the same' if treatment.numbers == 'same' else treatment.numbers} |")


def region(name: str) -> AbstractContextManager[Any]:
    found: AbstractContextManager[Any] = torch.profiler.record_function(name)
    return found


def test_regions_of_the_program_are_phases_outside_of_the_others(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop(16)

        class Inner(nn.Module):
            def forward(self, batch: Tensor) -> Tensor:
                with region("inside"):
                    return batch

        loop.model.append(Inner())  # type: ignore[operator]
        again = torch.profiler.record_function("again")
        with region("epoch"):
            for number, (batch,) in enumerate(loop.data):
                with region(f"step {number}"), region("outer"), region("nested"):
                    output = loop.model(batch)
                with region("loss"):
                    loss = output.square().mean()
                with region("backward"):
                    loss.backward()
                with region("update"):
                    loop.optimizer.step()
                for _ in range(2):
                    with again, again:
                        loop.losses.append(loss.item())

    found = probed(tmp_path, run)
    assert found.code == 0
    own = {"outer", "nested", "loss", "update", "again"}
    assert found.phases(since=4) == {"data_wait", "forward", "backward", "optimizer", "other"} | own
    for step in found.steps:
        assert sum(step["phases"].values()) == pytest.approx(step["total"])
    assert sum(step["total"] for step in found.steps) == pytest.approx(found.events["repeatdone"]["wall"])


def test_a_region_that_ends_out_of_order_leaves_no_phase_open(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop(12)
        opened: list[Any] = []
        loop.model.register_forward_hook(lambda *_: opened.pop().__exit__(None, None, None))
        for (batch,) in loop.data:
            opened.append(torch.profiler.record_function("crossing"))
            opened[-1].__enter__()
            loop.step(batch)

    found = probed(tmp_path, run)
    assert found.code == 0
    assert found.phases(since=4) == {"data_wait", "forward", "backward", "optimizer", "other", "crossing"}


def test_an_optimizer_that_is_made_while_the_program_is_recorded_leaves_the_recording_of_modules(
    tmp_path: Path,
) -> None:
    def run() -> None:
        loop = Loop(100)
        call = nn.Module.__call__
        for number, (batch,) in enumerate(loop.data):
            loop.step(batch)
            if number in (3, 6):
                loop.optimizer = torch.optim.SGD(loop.model.parameters())
            if number == 7:
                assert nn.Module.__call__ is not call

    found = probed(tmp_path, run, profiling=RECORDED.model_dump() | {"wait": 6})
    assert found.code == 0
    assert "tracerecorded" in found.names


def test_a_profiler_that_the_program_starts_while_it_is_recorded_is_reported(tmp_path: Path) -> None:
    def run() -> None:
        torch.autograd.profiler.profile.__enter__ = lambda self: self  # type: ignore[method-assign]
        loop = Loop(100)
        for number, (batch,) in enumerate(loop.data):
            loop.step(batch)
            if number == 5:
                torch.autograd.profiler.profile().__enter__()

    found = probed(tmp_path, run, profiling=RECORDED.model_dump())
    assert "profiler of its own while it is recorded" in found.events["log"]["message"]
