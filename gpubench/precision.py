"""A precision as one object: the context of the forward pass, the backward pass, and the optimizer step."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gpubench.defaults import refuse_on_cpu
from gpubench.errors import DeviceError
from gpubench.hardware import AMPERE
from gpubench.settings import Precision


class Arithmetic:
    """fp32 and tf32: nothing to wrap. The others build on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def forward(self) -> AbstractContextManager[object]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def scale(self) -> Tensor | None:
        """The gradient scale as a device scalar, read without synchronising; None where nothing is scaled."""
        return None


class Autocast(Arithmetic):
    """bf16: matrix products and convolutions in bfloat16, the rest as torch.autocast decides."""

    dtype = torch.bfloat16

    def forward(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self.dtype)


class ScaledAutocast(Autocast):
    """amp: float16 autocast, with a gradient scaler that skips the steps whose gradients overflowed."""

    dtype = torch.float16

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._scaler = torch.amp.GradScaler(device.type)
        self._one = torch.ones((), device=device)

    def backward(self, loss: Tensor) -> None:
        scaled = self._scaler.scale(loss)
        assert isinstance(scaled, Tensor)
        scaled.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.step(optimizer)
        self._scaler.update()

    def scale(self) -> Tensor | None:
        # get_scale() would wait for the device; scaling a one does not.
        scale = self._scaler.scale(self._one)
        assert isinstance(scale, Tensor)
        return scale


def arithmetic(precision: Precision, device: torch.device) -> Arithmetic:
    """The object for one run of `precision`, which `refuse` has let pass; a gradient scaler starts anew."""
    if precision is Precision.amp:
        return ScaledAutocast(device)
    if precision is Precision.bf16:
        return Autocast(device)
    return Arithmetic(device)


def refuse(precision: Precision, device: torch.device) -> None:
    """Raises DeviceError, with the reason, for what the device cannot do."""
    if device.type == "cpu":
        refuse_on_cpu(precision)
        return
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        # ROCm takes the TF32 switch everywhere and computes in full fp32 where there is no such unit.
        if precision is Precision.tf32 and "gfx94" not in torch.cuda.get_device_properties(device).gcnArchName:
            raise DeviceError(f"{name} has no TF32; AMD's CDNA 3 alone does", "use fp32, amp or bf16")
        return
    major, minor = torch.cuda.get_device_capability(device)
    if precision in {Precision.tf32, Precision.bf16} and (major, minor) < AMPERE:
        raise DeviceError(
            f"{name} has compute capability {major}.{minor}; {precision} needs 8.0 (Ampere) or later", "use amp or fp32"
        )


def set_float32_matmul(precision: Precision, requested: str | None) -> None:
    """How float32 products are computed: in full for fp32 and in TF32 otherwise, unless `requested` says.

    Convolutions follow: cuDNN would use TF32 for float32 by default, which is not what a run labelled fp32 claims.
    """
    torch.set_float32_matmul_precision(requested or ("highest" if precision is Precision.fp32 else "high"))
    torch.backends.cudnn.allow_tf32 = torch.get_float32_matmul_precision() != "highest"
