"""Repeats that follow one another in one process, as under torchrun: each must find what the first one found."""

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from worked import as_in_a_fresh_process, small, working

from gpubench import events
from gpubench.channel import Activity
from gpubench.kinds.training.worker import rank as train_bench
from gpubench.worker import distributed
from gpubench.worker.loop import Event
from gpubench.worker.models import Workload, build

compiles = pytest.mark.filterwarnings("ignore")
"""torch.compile warns of its own parts."""


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    with as_in_a_fresh_process():
        yield


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one, so that the model is wrapped in DDP."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.cleanup_ddp()


@pytest.mark.usefixtures("group")
def test_a_repeat_finds_nothing_left_of_the_model_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[nn.Module]] = []
    left: list[int] = []

    def remembered(*arguments: Any, **more: Any) -> Workload:
        left.append(sum(model() is not None for model in models))
        built = build(*arguments, **more)
        models.append(weakref.ref(built.module))
        return built

    monkeypatch.setattr("gpubench.kinds.training.worker.rank.build", remembered)
    gc.disable()  # it might come by chance
    try:
        done = [event for event in working(repeats=3) if isinstance(event, events.RepeatDone)]
    finally:
        gc.enable()
    assert (len(done), left) == (3, [0, 0, 0])


@compiles
@pytest.mark.usefixtures("group")
def test_collectives_and_ranks_get_the_time_that_compiling_takes_until_the_warm_up_is_over() -> None:
    activity, seen = Activity(), []
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    compiling = {"compile": True, "compile_mode": "max-autotune"}
    waits: dict[str, Any] = {
        "measurement": {"stall_timeout": 100.0, "count_flops": False},
        "distributed": {"timeout": 5.0},
    }
    for event in working(activity, performance=compiling, **waits):
        if isinstance(event, events.ModelBuilt | events.RepeatDone):
            limit = backend.options._timeout.total_seconds()
            seen.append((type(event).__name__, limit, activity.patience_factor))
    before, after = ("ModelBuilt", 360.0, 3.0), ("RepeatDone", 5.0, 1.0)
    assert seen == [before, after, before, after]


def test_ordinary_set_up_may_take_what_the_host_allows_any_rank_and_a_little_more() -> None:
    settings = small()
    assert train_bench.patience_factor(settings) == 1.0
    assert train_bench.setup_timeout(settings) == settings.measurement.stall_timeout + train_bench.MARGIN
    assert train_bench.setup_timeout(small(distributed={"timeout": 5000.0})) == 5000.0


def products() -> tuple[nn.Module, object, object]:
    """Two matrix products, for which the compiler writes no kernel that a C++ compiler would have to translate."""
    layers = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))
    return layers, lambda size: torch.rand(size, 16), lambda module, batch: module(batch).square().mean()


def compiled(repeats: int) -> list[tuple[int, int]]:
    """(hits, misses) in the cache of compiled graphs, by repeat."""
    from torch._dynamo.utils import counters

    counters.clear()
    found, before = [], (0, 0)
    plain = {"name": "test_train_worker:products"}
    compiling = {"compile": True}
    for event in working(repeats=repeats, model=plain, performance=compiling, measurement={"count_flops": False}):
        if isinstance(event, events.RepeatDone):
            now = counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
            found.append((now[0] - before[0], now[1] - before[1]))
            before = now
    return found


@compiles
def test_each_repeat_compiles_all_by_itself_and_leaves_no_cache_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    run = train_bench.run_repeat

    def seen(*arguments: Any) -> Iterator[Event]:
        folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        yield from run(*arguments)
        assert list(Path(folders[-1]).iterdir())

    monkeypatch.setattr(train_bench, "run_repeat", seen)
    (first_hits, first_misses), (second_hits, second_misses) = compiled(2)
    assert first_misses == second_misses > 0
    assert first_hits == second_hits == 0
    assert len(set(folders)) == 2
    assert not any(Path(folder).exists() for folder in folders)
    assert not any(name in os.environ for name in train_bench.COMPILE_CACHES)


@compiles
def test_a_cache_that_the_users_environment_names_is_used_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (_, first), (hits, misses) = compiled(2)
    assert first > 0
    assert (hits, misses) == (first, 0), "the second repeat takes what the first one compiled"
    said = [record.message for record in caplog.records if record.name == "gpubench.train_bench"]
    assert said == ["TORCHINDUCTOR_CACHE_DIR is set: the time of the first step depends on the content of this cache"]


def test_a_peak_that_cannot_be_measured_beside_the_model_leaves_the_run_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.\nmore of it")

    monkeypatch.setattr(train_bench, "measure_peak", full)
    happened = list(working(measurement={"measure_peak": True}))
    assert sum(isinstance(event, events.RepeatDone) for event in happened) == 2
    (peak,) = (event for event in happened if isinstance(event, events.PeakMeasured))
    assert (peak.flops_per_s, peak.reason) == (None, "CUDA out of memory. Tried to allocate 256.00 MiB.")


def test_the_work_of_a_repeat_is_counted() -> None:
    training = {"steps": 3, "warmup_steps": 1, "batch_size": 2, "grad_accumulation": 2}
    sent = list(working(repeats=1, training=training))
    (built,) = (event for event in sent if isinstance(event, events.ModelBuilt))
    (work,) = (event.work for event in sent if isinstance(event, events.RepeatDone))
    assert work
    assert work.backward_passes == work.calls == work.batches == 8
    assert work.updated_first == work.updated_least == built.trainable_parameters
    assert (work.forwarded, work.counted_steps, work.unused_passes) == (16, 4, 0)
    assert work.elements
    assert work.elements % 16 == 0


def test_what_the_models_code_sets_for_float32_products_gives_way_to_the_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def faster(*arguments: Any, **more: Any) -> Workload:
        torch.set_float32_matmul_precision("high")
        return build(*arguments, **more)

    monkeypatch.setattr("gpubench.kinds.training.worker.rank.build", faster)
    for event in working(repeats=1):
        if isinstance(event, events.RepeatDone):
            assert torch.get_float32_matmul_precision() == "highest"
    (said,) = (record.message for record in caplog.records if record.name == "gpubench.worker.precision")
    assert "performance.matmul_precision=highest" in said
