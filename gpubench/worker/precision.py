"""The precisions, each as an object with the forward context, the backward pass and the optimizer step."""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gpubench.errors import DeviceError
from gpubench.hardware import AMPERE
from gpubench.settings.defaults import refuse_on_cpu
from gpubench.settings.schema import Precision

log = logging.getLogger("gpubench.worker.precision")


class Arithmetic:
    """The precisions fp32 and tf32, which need neither autocast nor a gradient scaler."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def forward(self) -> AbstractContextManager[object]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the gradient scale, so that they can be clipped."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def scale(self) -> Tensor | None:
        """The gradient scale as a device scalar, without synchronising; None if nothing is scaled."""
        return None


class Autocast(Arithmetic):
    """The precision bf16: torch.autocast with bfloat16."""

    dtype = torch.bfloat16

    def forward(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self.dtype)


class HalfAutocast(Autocast):
    """The precision amp of inference: torch.autocast with float16."""

    dtype = torch.float16


class ScaledAutocast(HalfAutocast):
    """The precision amp of training: also with a gradient scaler, which skips steps with overflows."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._scaler = torch.amp.GradScaler(device.type)
        self._one = torch.ones((), device=device)

    def backward(self, loss: Tensor) -> None:
        scaled = self._scaler.scale(loss)
        assert isinstance(scaled, Tensor)
        scaled.backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.step(optimizer)
        self._scaler.update()

    def scale(self) -> Tensor | None:
        # get_scale() would wait for the device; scaling a tensor of one does not.
        scale = self._scaler.scale(self._one)
        assert isinstance(scale, Tensor)
        return scale


def arithmetic(precision: Precision, device: torch.device, *, inference: bool = False) -> Arithmetic:
    """The implementation of `precision`, which `refuse` must have accepted."""
    if precision is Precision.amp:
        return HalfAutocast(device) if inference else ScaledAutocast(device)
    if precision is Precision.bf16:
        return Autocast(device)
    return Arithmetic(device)


def refuse(precision: Precision, device: torch.device) -> None:
    """Raises DeviceError with the reason if the device does not support `precision`."""
    if device.type == "cpu":
        refuse_on_cpu(precision)
        return
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        # ROCm accepts the TF32 switch on every GPU, and computes in full fp32 if the GPU has no TF32.
        if precision is Precision.tf32 and "gfx94" not in torch.cuda.get_device_properties(device).gcnArchName:
            raise DeviceError(f"{name} has no TF32; of AMD's GPUs only CDNA 3 has it", "use fp32, amp or bf16")
        return
    major, minor = torch.cuda.get_device_capability(device)
    if precision in {Precision.tf32, Precision.bf16} and (major, minor) < AMPERE:
        raise DeviceError(
            f"{name} has compute capability {major}.{minor}; {precision} needs 8.0 (Ampere) or later", "use amp or fp32"
        )


def set_float32_matmul(precision: Precision, requested: str | None) -> None:
    """Sets how float32 matrix products and convolutions are computed.

    `requested` is a value of torch.set_float32_matmul_precision. By default they are computed in full fp32 for the
    precision fp32, and otherwise in TF32. Convolutions must be set too, because cuDNN uses TF32 by default.

    torch 2.9 added a second interface, `fp32_precision`. This function sets the older one, because torch then updates
    the newer one. If only the newer one were set, torch would raise an error wherever the older one is read, as in
    torch.compile. A value that was set for all backends through the newer interface is reset, because "off" in the
    older interface means "as for all backends" in the newer one.
    """
    backends: Any = torch.backends
    for backend in (backends, backends.cudnn):
        if getattr(backend, "fp32_precision", "none") != "none":
            backend.fp32_precision = "none"
    torch.set_float32_matmul_precision(requested or ("highest" if precision is Precision.fp32 else "high"))
    torch.backends.cudnn.allow_tf32 = torch.get_float32_matmul_precision() != "highest"


def restore_float32_matmul(precision: Precision, requested: str | None) -> None:
    """Calls `set_float32_matmul` again after the model's code has run, and warns if that code changed the setting."""
    found = _float32_matmul()
    set_float32_matmul(precision, requested)
    expected = _float32_matmul()
    if found != expected:
        log.warning(
            "the model's code changed how float32 products are computed; the change is undone, and the run uses "
            "performance.matmul_precision=%s",
            torch.get_float32_matmul_precision(),
        )


def _float32_matmul() -> tuple[str, bool] | None:
    """The precision of products, and whether convolutions use TF32; None if torch's two interfaces disagree."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None
