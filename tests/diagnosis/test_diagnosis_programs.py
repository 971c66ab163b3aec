"""What programs of users do without need: float64, clones, gradients for nothing, few samples; and the order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_made import (
    H100,
    PERCENT,
    STEPS,
    case,
    copy,
    cpu,
    gpu,
    ids,
    kernel,
    only,
    operator,
    phase,
    python,
    saving,
    training,
)
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.trace.analyse import analyse
from gpubench.trace.load import read
from gpubench.trace.profile import Attention, RankProfile, UnusedGradients

PRODUCT = "[64, 1024] [1024, 2048]"


def multiplying(dtype: str, part: int, name: str = "aten::mm") -> RankProfile:
    return cpu(operators=[operator(name, 0, host=part, shapes=PRODUCT, dtype=dtype)])


def test_a_model_in_float64_takes_twice_the_time_of_float32_on_a_cpu() -> None:
    finding = only(case(multiplying("float64", 60 * PERCENT)))
    assert (finding.id, finding.severity, finding.place) == ("float64", "high", "model")
    assert saving(finding) == pytest.approx(0.3)
    assert finding.evidence[1] == "aten::mm [64, 1024] [1024, 2048]: 1 time a step, 60 ms a step (60.0 %)"
    assert ids(case(multiplying("float32", 60 * PERCENT))) == []
    assert ids(case(multiplying("float64", 10 * PERCENT - 1))) == []
    assert ids(case(multiplying("float64", 60 * PERCENT, "aten::sum"))) == []  # a loss that is summed in float64


@pytest.mark.parametrize(("device", "saved"), [(H100, 0.2), ("NVIDIA GeForce RTX 4090", 0.4)])
def test_float64_costs_more_on_gpus_that_have_few_units_for_it(device: str, saved: float) -> None:
    by_shapes = [operator("aten::addmm", 40 * PERCENT, shapes=f"[2048] {PRODUCT}", dtype="float64")]
    by_name = [kernel("ampere_dgemm_128x64_tn", 40 * PERCENT)]
    for given in ({"operators": by_shapes}, {"kernels": by_name}, {"operators": by_shapes, "kernels": by_name}):
        found = [each for each in diagnose(case(gpu(device_name=device, **given))).findings if each.id == "float64"]
        assert [saving(each) for each in found] == [pytest.approx(saved)]


def cloning(part: int, **parts: Any) -> ProfileCase:
    usual: dict[str, Any] = {"phase": "forward", "host": part, "example": "aten::clone [8] [8] float32 <- float32"}
    return case(cpu(copies=[copy("same", **usual | parts)]))


def test_clones_of_the_programs_own_code_are_found_with_their_line() -> None:
    finding = only(cloning(7 * PERCENT, where="net.py:8 in forward"))
    assert (finding.id, finding.severity) == ("clones", "medium")
    assert saving(finding) == pytest.approx(0.07)
    assert finding.evidence == [
        "aten::clone [8] [8] float32 <- float32: 1 time a step in forward, 7 ms a step (7 %) at net.py:8 in forward"
    ]
    assert ids(cloning(5 * PERCENT - 1)) == []
    assert ids(cloning(7 * PERCENT, phase="backward")) == []  # what autograd has to keep
    assert ids(cloning(7 * PERCENT, example="aten::copy_ [8] [8]")) == []  # a buffer that is filled


def stepping(optimizer: int, shapes: str, part: int, **parts: Any) -> ProfileCase:
    rank = cpu(
        host={"optimizer": optimizer},
        phases=[phase("optimizer", host=optimizer), phase("backward", host=part)],
        operators=[operator("aten::mm", 0, host=part, shapes=shapes, dtype="float32")],
        python=python(operators=40 * STEPS, operator_median=80_000, median=1_000),
        **parts,
    )
    return case(rank)


@pytest.mark.parametrize("shapes", ["[4, 1024] [1024, 2048]", "[2048, 4] [4, 1024]"])
def test_products_of_few_rows_read_all_weights_for_them(shapes: str) -> None:
    (finding,) = (each for each in diagnose(stepping(30 * PERCENT, shapes, 40 * PERCENT)).findings if each.id[0] == "s")
    assert finding.id == "small-batch"
    assert saving(finding) == pytest.approx(0.7 * 0.75)
    assert finding.evidence[0].endswith("30.0 % in the optimizer and 40.0 % in matrix products of at most 8 rows")
    assert finding.evidence[1].startswith(f"aten::mm {shapes}: 1 time a step")


@pytest.mark.parametrize(
    ("optimizer", "shapes", "part"),
    [
        (30, "[9, 1024] [1024, 2048]", 40),
        (30, "[4, 1024] [1024, 2048]", 19),  # less than half of the step
        (60, "[4, 1024] [1024, 2048]", 4),  # products are not what it is about
        (30, "[64, 1024] [1024, 1]", 40),  # few outputs, not few samples
        (30, "", 40),
    ],
)
def test_products_of_more_rows_or_of_little_time_do_not_make_a_batch_small(
    optimizer: int, shapes: str, part: int
) -> None:
    assert "small-batch" not in ids(stepping(optimizer * PERCENT, shapes, part * PERCENT))


def test_other_processes_leave_no_cores_free() -> None:
    def found(others: float, cores: int = 3) -> list[str]:
        rank = cpu(host={"data_loader": 60 * PERCENT})
        known: dict[str, Any] = {
            "metrics": {"phase_data_wait": 0.6, "step_time": 1.0},
            "environment": {"cpu.usable_cores": cores},
        }
        settings = training(data__workers=0, performance__cpu_threads=1, distributed__world_size=1)
        return [each.title for each in diagnose(case(rank, settings=settings, others=others, **known)).findings]

    assert any("while CPU cores are free" in title for title in found(0))
    assert any("while CPU cores are free" in title for title in found(1.0))
    assert not any("cores are free" in title for title in found(1.8))
    assert any("while CPU cores are free" in title for title in found(1.8, cores=8))


def test_threads_for_cores_that_others_use_are_not_proposed() -> None:
    def found(others: float) -> list[Any]:
        settings = training(performance__cpu_threads=1, distributed__world_size=1)
        slow = python(operators=10 * STEPS, operator_median=9_000_000, median=1_000)
        made = case(cpu(python=slow), settings=settings, environment={"cpu.usable_cores": 4}, others=others)
        return [each for each in diagnose(made).findings if each.id == "too-few-threads"]

    assert [each.fix for each in found(0)] == [{"performance.cpu_threads": 4}]
    (beside,) = found(1.8)
    assert beside.fix == {"performance.cpu_threads": 2}
    assert "other processes kept 1.8 cores busy meanwhile" in beside.evidence
    assert not found(3.0)


def test_the_most_severe_finding_is_first_and_of_equals_the_largest_saving() -> None:
    rank = cpu(
        copies=[
            copy("same", phase="forward", host=19 * PERCENT, example="aten::clone"),
            copy("layout_change", phase="forward", host=8 * PERCENT),
        ],
        unused_gradients=UnusedGradients(calls=STEPS, total=30 * PERCENT, modules=["Net"], where=None),
        phases=[phase("backward", host=PERCENT)],
    )
    found = diagnose(case(rank)).findings
    assert [(each.id, each.severity) for each in found] == [
        ("unused-gradients", "high"),  # though what it saves is unknown
        ("clones", "medium"),
        ("layout-in-model", "medium"),
    ]


def recorded(tmp_path: Path, step: Callable[[], object]) -> RankProfile:
    """Returns the profile of three steps on the CPU."""
    path = tmp_path / "made.pt.trace.json"
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recording:
        for number in range(3):
            with record_function(f"ProfilerStep#{number}"):
                step()
    recording.export_chrome_trace(str(path))
    return analyse([read(path)]).ranks[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with record_function("module: net (Net)"):
            found: torch.Tensor = self.body(x)
            return found


def test_calls_whose_gradients_nothing_uses_are_told_from_all_others(tmp_path: Path) -> None:
    net, frozen = Net(), Net().requires_grad_(False)
    x = torch.randn(8, 16)

    def train() -> None:
        net.zero_grad()
        (net(x).square().mean() + net(x).mean()).backward()

    def validate() -> None:
        train()
        for _ in range(2):
            net(x).detach()

    def without() -> None:
        train()
        with torch.no_grad():
            net(x)
        with torch.inference_mode():
            net(x)

    def teach() -> None:
        net.zero_grad()
        (net(x) - frozen(x)).square().mean().backward()
        frozen(x)

    assert recorded(tmp_path, train).unused_gradients is None
    assert recorded(tmp_path, without).unused_gradients is None
    assert recorded(tmp_path, teach).unused_gradients is None
    assert recorded(tmp_path, lambda: net(x)).unused_gradients is None  # nothing shows that it trains
    steps = iter([train, train, validate])
    assert recorded(tmp_path, lambda: next(steps)()).unused_gradients is None  # its backward pass may be yet to come
    found = recorded(tmp_path, validate).unused_gradients
    assert found
    assert (found.calls, found.modules) == (6, ["Net"])
    assert found.total > 0


def test_checkpointed_calls_are_used_by_the_backward_pass(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(8, 16)

    def train() -> None:
        checkpoint: Any = torch.utils.checkpoint.checkpoint
        checkpoint(net, net(x), use_reentrant=False).mean().backward()

    assert recorded(tmp_path, train).unused_gradients is None


def test_a_clone_after_contiguous_is_counted_apart_from_it(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(32, 64)

    def step() -> None:
        with record_function("module: net (Net)"):
            made = x.t().contiguous().clone()
        (net(x[:, :16]).mean() + made.mean()).backward()

    found = [each for each in recorded(tmp_path, step).copies if each.example.startswith("aten::clone")]
    assert [(each.kind, each.calls) for each in found] == [("same", 3)]


def test_attention_that_is_written_out_is_found_with_its_module(tmp_path: Path) -> None:
    q = torch.randn(4, 32, 16, requires_grad=True)

    def step() -> None:
        with record_function("module: layers.0.attn (Attention)"):
            (torch.softmax(q @ q.transpose(1, 2), -1) @ q).sum().backward()

    (found,) = recorded(tmp_path, step).attention
    assert found.module == "layers.0.attn"


def test_the_line_of_attention_is_in_its_evidence_or_what_records_it() -> None:
    def attending(where: str | None) -> tuple[list[str], list[str]]:
        one = Attention(
            groups=4, queries=32, keys=32, head_size=16, dtype="float32", calls=STEPS, backward_calls=0,
            products=20 * PERCENT, softmax=20 * PERCENT, elementwise=0, backward=0, fallback=False, obstacles=[],
            where=where, module="attn",
        )  # fmt: skip
        missing = {} if where else {"stacks": "with_stack"}
        found = diagnose(case(cpu(attention=[one], missing=missing)))
        return found.findings[0].evidence, [each.needs for each in found.unanswered]

    evidence, needs = attending("net.py:9 in forward")
    assert any(" in module attn at net.py:9 in forward: " in each for each in evidence)
    assert not needs
    assert attending(None)[1] == ["with_stack"]
