import functools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpubench.channel import Activity
from gpubench.errors import DeviceError, NonFiniteLoss
from gpubench.events import Step
from gpubench.settings.schema import Precision
from gpubench.worker.loop import StepReader
from gpubench.worker.precision import (
    Arithmetic,
    Autocast,
    ScaledAutocast,
    arithmetic,
    refuse,
    restore_float32_matmul,
    set_float32_matmul,
)
from gpubench.worker.timing import CpuClock, StepTimer

CPU = torch.device("cpu")
LARGEST_HALF = torch.finfo(torch.float16).max


@pytest.fixture(autouse=True)
def _global_state() -> Iterator[None]:
    threads, matmul, convolution = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = convolution


def forward(rules: Arithmetic, module: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The output and a loss whose gradient with respect to every output is 1."""
    with rules.forward():
        output = module(inputs)
        return output, output.float().sum()


@pytest.mark.parametrize(
    ("precision", "inside"),
    [(Precision.fp32, torch.float32), (Precision.bf16, torch.bfloat16), (Precision.amp, torch.float16)],
)
def test_products_have_the_precision_asked_for_and_gradients_stay_float32(
    precision: Precision, inside: torch.dtype
) -> None:
    rules = arithmetic(precision, CPU)
    module = nn.Linear(4, 3)
    output, loss = forward(rules, module, torch.ones(2, 4))
    assert output.dtype == inside
    rules.backward(loss)
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    assert module(torch.ones(2, 4)).dtype == torch.float32, "the context ends with the forward pass"


@pytest.mark.parametrize(
    ("precision", "kind"), [(Precision.fp32, Arithmetic), (Precision.bf16, Autocast), (Precision.amp, ScaledAutocast)]
)
def test_only_amp_scales(precision: Precision, kind: type[Arithmetic]) -> None:
    rules = arithmetic(precision, CPU)
    assert type(rules) is kind
    scale = rules.scale()
    assert (scale is None) == (precision is not Precision.amp)
    if scale is not None:
        assert float(scale) == 65536


def test_an_fp32_step_is_the_textbooks() -> None:
    rules = arithmetic(Precision.fp32, CPU)
    module = nn.Linear(4, 1, bias=False)
    before = module.weight.detach().clone()
    inputs = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    _, loss = forward(rules, module, inputs)
    rules.backward(loss)
    rules.step(torch.optim.SGD(module.parameters(), lr=0.5))
    assert torch.equal(module.weight.detach(), before - 0.5 * inputs)


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
def test_overflowed_gradients_skip_the_step_halve_the_scale_and_are_marked(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**18))
    rules = arithmetic(Precision.amp, CPU)
    module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125, fused=fused)
    timer = StepTimer(CpuClock(), Activity(), 0, 0)
    first = rules.scale()
    assert first is not None
    reader = StepReader(float(first))

    scales, moved = [float(first)], []
    for number in range(6):
        timer.begin(number)
        before = module.weight.detach().clone()
        _, loss = forward(rules, module, torch.full((1, 4), 0.25))
        rules.backward(loss)
        rules.step(optimizer)
        optimizer.zero_grad()
        after = rules.scale()
        assert after is not None
        timer.issued(0, 1, [loss.detach(), after])
        scales.append(float(after))
        moved.append(not torch.equal(before, module.weight.detach()))
    timer.stop()
    steps = reader.read(timer)

    # The gradient of every output is the scale itself, in float16: it overflows until the scale is below 65504.
    overflows = [scale > LARGEST_HALF for scale in scales[:-1]]
    assert overflows == [True, True, True, False, False, False]
    assert moved == [not overflow for overflow in overflows]
    assert scales[1:] == [scale / 2 if scale > LARGEST_HALF else scale for scale in scales[:-1]]
    assert [step.skipped for step in steps] == overflows


def finished(*readings: list[float]) -> StepTimer[int]:
    """A timer with one finished step for each list of readings."""
    timer = StepTimer(CpuClock(), Activity(), repeat=3, rank=0)
    for number, values in enumerate(readings):
        timer.begin(number)
        timer.issued(0, 1, [torch.tensor(value) for value in values])
    timer.stop()
    return timer


def test_only_a_falling_scale_is_a_skipped_step() -> None:
    timer = finished([1.0, 1024.0], [1.0, 2048.0], [1.0, 1024.0], [1.0, 1024.0])
    assert [step.skipped for step in StepReader(1024.0).read(timer)] == [False, False, True, False]


def test_the_scale_is_remembered_from_one_reading_to_the_next() -> None:
    reader = StepReader(1024.0)
    reader.read(finished([1.0, 1024.0]))
    (step,) = reader.read(finished([1.0, 512.0]))
    assert step.skipped


def test_without_a_scale_nothing_is_skipped_and_the_loss_is_kept() -> None:
    steps: list[Step] = StepReader(None).read(finished([2.5], [1.5]))
    assert [(step.loss, step.skipped) for step in steps] == [(2.5, False), (1.5, False)]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_and_names_the_step_but_loses_none(loss: float) -> None:
    reader = StepReader(None)
    steps = reader.read(finished([1.0], [loss], [2.0]))
    assert [step.loss for step in steps] == [1.0, None, 2.0]
    with pytest.raises(NonFiniteLoss, match=rf"became {loss} at step 1 \(counting from 0\) of repeat 4"):
        reader.raise_if_diverged()


def set_anew(where: str, precision: str) -> None:
    """Sets TF32 by the interface that came with torch 2.9."""
    target: Any = torch.backends
    for name in filter(None, where.split(".")):
        target = getattr(target, name)
    target.fp32_precision = precision


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has one interface to TF32 only")
@pytest.mark.parametrize("precision", [Precision.fp32, Precision.tf32])
@pytest.mark.parametrize("before", ["tf32", "ieee"])
@pytest.mark.parametrize("where", ["", "cudnn", "cudnn.conv", "cudnn.rnn", "cuda.matmul"])
def test_tf32_is_as_asked_by_both_interfaces_of_torch_whichever_was_used_before(
    where: str, before: str, precision: Precision
) -> None:
    set_anew(where, before)
    set_float32_matmul(precision, None)
    wanted = precision is Precision.tf32
    backends: Any = torch.backends
    newer = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    assert {one.fp32_precision == "tf32" for one in newer} == {wanted}
    # The older one raises where the two disagree.
    assert torch.get_float32_matmul_precision() == ("high" if wanted else "highest")
    assert backends.cuda.matmul.allow_tf32 is backends.cudnn.allow_tf32 is wanted


def test_float32_products_that_the_models_code_changed_are_set_again_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_float32_matmul(Precision.fp32, None)
    restore_float32_matmul(Precision.fp32, None)
    assert not caplog.records
    torch.backends.cudnn.allow_tf32 = True
    restore_float32_matmul(Precision.fp32, None)
    assert torch.backends.cudnn.allow_tf32 is False
    assert len(caplog.records) == 1


def test_tf32_is_refused_on_a_cpu_with_the_reason() -> None:
    with pytest.raises(DeviceError, match=r"tf32 is a format of NVIDIA's tensor cores") as refusal:
        refuse(Precision.tf32, CPU)
    assert refusal.value.hint == "use fp32 or bf16"


@pytest.mark.parametrize(
    ("capability", "refused"),
    [((7, 0), {"tf32", "bf16"}), ((7, 5), {"tf32", "bf16"}), ((8, 0), set()), ((9, 0), set()), ((12, 0), set())],
)
def test_a_gpu_is_refused_what_its_tensor_cores_lack(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], refused: set[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Imaginary GPU")
    monkeypatch.setattr(torch.version, "hip", None)
    gpu = torch.device("cuda", 0)
    version = ".".join(map(str, capability))
    for precision in Precision:
        if precision not in refused:
            refuse(precision, gpu)
            continue
        with pytest.raises(
            DeviceError, match=rf"Imaginary GPU has compute capability {version}; {precision} needs 8.0"
        ):
            refuse(precision, gpu)


@pytest.mark.parametrize(
    ("precision", "requested", "products", "convolutions"),
    [
        (Precision.fp32, None, "highest", False),
        (Precision.tf32, None, "high", True),
        (Precision.bf16, None, "high", True),
        (Precision.amp, None, "high", True),
        (Precision.fp32, "medium", "medium", True),
        (Precision.bf16, "highest", "highest", False),
    ],
)
def test_float32_products_and_convolutions_follow_the_precision_unless_told(
    precision: Precision, requested: str | None, products: str, convolutions: bool
) -> None:
    set_float32_matmul(precision, requested)
    assert torch.get_float32_matmul_precision() == products
    assert torch.backends.cudnn.allow_tf32 is convolutions


@pytest.mark.parametrize(("architecture", "refused"), [("gfx90a", True), ("gfx942", False)])
def test_of_amds_gpus_only_those_with_tf32_compute_in_it(
    monkeypatch: pytest.MonkeyPatch, architecture: str, refused: bool
) -> None:
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda", 0)
    refuse(Precision.bf16, device)
    with pytest.raises(DeviceError, match="has no TF32") if refused else nullcontext():
        refuse(Precision.tf32, device)
