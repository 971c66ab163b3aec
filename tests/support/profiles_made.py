"""Profiles and findings with realistic values, as a training loop that starves its GPU would leave them."""

from typing import Any

import msgspec

from gpubench.findings import Combination, Finding, Findings, Saving, Trial, Unanswered
from gpubench.trace.profile import (
    Box,
    Cause,
    Collective,
    Compiled,
    Copy,
    HostPart,
    Kernel,
    KernelChange,
    Lane,
    Launches,
    Module,
    Operator,
    Profile,
    ProfiledStep,
    RankProfile,
    StepPhase,
    StepTimeline,
    Straggler,
    Synchronisation,
    WallBreakdown,
)

MS = 1_000_000
STEPS = 6
GEMM = f"cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_256x128_32x3_nn_align8, {'int, ' * 20}int>"


def profile(ranks: int = 1, **changes: Any) -> Profile:
    found = [device_rank(rank=None if ranks == 1 else number, **changes) for number in range(ranks)]
    return Profile(found, [Straggler(ranks - 1, round(1.4 * MS), 58, 60)] if ranks > 1 else [])


def device_rank(**changes: Any) -> RankProfile:
    """6 steps of 177 ms, of which the device is idle for 77 ms."""
    idle: dict[Cause, int] = {
        "data_loader": 59 * STEPS * MS, "allocator": 0, "synchronisation": 3 * STEPS * MS,
        "pageable_copy": 4 * STEPS * MS, "python_and_launch": 10 * STEPS * MS, "unknown": 1 * STEPS * MS,
    }  # fmt: skip
    whole = WallBreakdown(
        wall=177 * STEPS * MS, compute=92 * STEPS * MS, exposed_communication=6 * STEPS * MS,
        exposed_copies=2 * STEPS * MS, idle=77 * STEPS * MS, communication=20 * STEPS * MS, copies=5 * STEPS * MS,
        hidden_communication=14 * STEPS * MS,
    )  # fmt: skip
    steps = [ProfiledStep(number, number * 177 * MS, 177 * MS, None, {}, {}) for number in range(STEPS)]
    rank = RankProfile(
        label="x.pt.trace.json.gz", rank=None, device_name="Tesla V100-DGXS-32GB", host_only=False, start=0,
        wall=whole.wall, step_numbers=list(range(STEPS)), device=whole, idle=idle, host={},
        critical_path={"compute": 90 * STEPS * MS, "data_loader": 60 * STEPS * MS, "python": 27 * STEPS * MS},
        steps=steps, phases=_phases(), modules=_modules(), operators=_operators(), kernels=_kernels(),
        launches=Launches(1200 * STEPS, 9 * STEPS * MS, 12_000, 340_000, 2300, 2.347, 61, 4000, 11 * MS, 3, 90_000),
        copies=_copies(), synchronisations=_synchronisations(),
        collectives=[Collective("ncclDevKernel_AllReduce_RING_LL", 10 * STEPS, 20 * STEPS * MS, 6 * STEPS * MS, None)],
        compiled=None, threads=3, zeroed_gradients=0, optimizer_kernels=160, optimizer_steps=STEPS,
        timeline=_timeline(),
        missing={"shapes": "record_shapes"}, notes=["3 kernels were launched before the trace began"],
    )  # fmt: skip
    return msgspec.structs.replace(rank, **changes)


def host_rank(**changes: Any) -> RankProfile:
    """4 steps of 50 ms on a CPU."""
    host: dict[HostPart, int] = {
        "data_loader": 62 * MS, "communication": 0, "copies": 4 * MS, "optimizer": 24 * MS, "operators": 90 * MS,
        "python": 20 * MS,
    }  # fmt: skip
    steps = [ProfiledStep(number, number * 50 * MS, 50 * MS, None, {}, {}) for number in range(4)]
    operators = [
        msgspec.structs.replace(one, device=0, kernels=0, bound="insufficient data", of_ceiling=None)
        for one in _operators()
    ]
    rank = device_rank(
        label="cpu.pt.trace.json", device_name=None, host_only=True, wall=200 * MS, device=None, idle={}, host=host,
        critical_path={}, steps=steps, step_numbers=[0, 1, 2, 3], operators=operators, kernels=[], launches=None,
        copies=[], synchronisations=[], collectives=[], compiled=Compiled(3, 2, 1, 2_000 * MS), missing={}, notes=[],
        phases=[StepPhase("data_wait", 62 * MS, 0, 0, 0), StepPhase("forward", 60 * MS, 0, 0, 0)],
        timeline=StepTimeline(1, 50 * MS, [Lane("host", [Box(0, 20 * MS, "data_wait", "data_wait")])], 0),
    )  # fmt: skip
    return msgspec.structs.replace(rank, **changes)


def findings(**changes: Any) -> Findings:
    found = Findings(
        headline="GPU idle 43.5 %: 76.6 % of it waits for the data loader",
        findings=[_data_loading(), _unfused(), _layout()],
        unanswered=[
            Unanswered("fp32-matmul", "input shapes", "record_shapes"),
            Unanswered("tensor-core-shapes", "input shapes", "record_shapes"),
        ],
        overhead=0.34,
        combination=Combination(
            {"data.workers": 4, "training.optimizer_impl": "fused"},
            Trial("confirmed", Saving(0.241, 0.22, 0.262), "results/combined", "results/base"),
        ),
        keep={"data.workers": 4, "training.optimizer_impl": "fused"},
    )
    return msgspec.structs.replace(found, **changes)


def changes() -> list[KernelChange]:
    return [
        KernelChange(GEMM, 30 * MS, 18 * MS, 48.0, 48.0),
        KernelChange("vectorized_elementwise_kernel", 4 * MS, 0, 161.0, 0.0),
        *(KernelChange(f"small_{number}", 1000, 2000, 1.0, 2.0) for number in range(12)),
    ]


def _phases() -> list[StepPhase]:
    return [
        StepPhase("data_wait", 59 * STEPS * MS, 0, 0, 0),
        StepPhase("host_to_device", 5 * STEPS * MS, 5 * STEPS * MS, 2 * STEPS, 0),
        StepPhase("forward", 30 * STEPS * MS, 32 * STEPS * MS, 400 * STEPS, 0),
        StepPhase("backward", 40 * STEPS * MS, 60 * STEPS * MS, 600 * STEPS, 9 * STEPS * MS),
        StepPhase("optimizer", 12 * STEPS * MS, 8 * STEPS * MS, 161 * STEPS, 0),
        StepPhase("other", 31 * STEPS * MS, 0, 0, 0),
    ]


def _modules() -> list[Module]:
    inner = [
        Module(
            f"layer{1 + n // 6}.{n % 6}.conv2", "Conv2d", STEPS, MS, (20 - n) * MS, (38 - n) * MS, n * MS, 58 * MS - n
        )
        for n in range(18)
    ]
    return [
        Module("", "ResNet", STEPS, 30 * STEPS * MS, 32 * STEPS * MS, 60 * STEPS * MS, 9 * STEPS * MS, 3 * MS),
        *inner,
    ]


def _operators() -> list[Operator]:
    return [
        Operator(
            "aten::cudnn_convolution", f"[64, {64 + n}, 56, 56] [64, {64 + n}, 3, 3]", "float", 4 * STEPS, 2 * MS,
            (60 - n) * MS, 4 * STEPS, 4.2e11 if n % 2 else None, 9.1e8, "compute" if n % 2 else "memory",
            0.62 if n % 2 else None,
        )
        for n in range(20)
    ]  # fmt: skip


def _kernels() -> list[Kernel]:
    gemm = Kernel(
        f"void {GEMM}(Params, Params)",
        "compute",
        48 * STEPS,
        30 * STEPS * MS,
        400_000,
        620_000,
        900_000,
        "aten::cudnn_convolution",
    )
    return [
        gemm,
        *(Kernel(f"elementwise_{n}", "compute", 9, (30 - n) * MS, 900, 1100, 22_000, "aten::add_") for n in range(14)),
    ]


def _copies() -> list[Copy]:
    return [
        Copy(
            "host_to_device", False, 2 * STEPS, 30 * MS, 28 * MS, 77_070_336 * STEPS, "host_to_device",
            "aten::copy_ [64, 3, 224, 224] float", "train.py:41",
        ),
        Copy("dtype_cast", None, 12, 2 * MS, 9 * MS, None, "forward", "aten::copy_ float -> half", None),
    ]  # fmt: skip


def _synchronisations() -> list[Synchronisation]:
    return [Synchronisation("aten::item", "cudaStreamSynchronize", "train.py:57", STEPS, 40 * MS, 18 * MS, "other")]


def _timeline() -> StepTimeline:
    streams = [Box(n * 5 * MS, n * 5 * MS + 3 * MS, f"gemm_{n}", "compute") for n in range(14, 34)]
    host = [
        Box(0, 59 * MS, "data_wait", "data_wait"), Box(59 * MS, 64 * MS, "host_to_device", "host_to_device"),
        Box(64 * MS, 94 * MS, "forward", "forward"), Box(94 * MS, 134 * MS, "backward", "backward"),
        Box(134 * MS, 150 * MS, "optimizer", "optimizer"),
    ]  # fmt: skip
    idle = [
        Box(0, 62 * MS, "data_loader", "data_loader"),
        Box(62 * MS, 70 * MS, "python_and_launch", "python_and_launch"),
    ]
    copies = [Box(60 * MS, 65 * MS, "Memcpy HtoD (Pageable -> Device)", "copy")]
    lanes = [Lane("host", host), Lane("stream 7", streams), Lane("stream 20", copies), Lane("idle", idle)]
    return StepTimeline(3, 177 * MS, lanes, 412)


def _data_loading() -> Finding:
    return Finding(
        id="data-loading", title="The GPU waits for the data loader", severity="high",
        evidence=[
            "59 ms of a 177 ms step the GPU is idle while the main thread is in enumerate(DataLoader), 6 times",
            "the loader has no workers: every batch is made between two steps",
        ],
        cause="batches are made in the process that trains, and nothing is computed meanwhile",
        advice="let worker processes make batches ahead of time", fix={"data.workers": 4}, expected=Saving(0.333),
        threshold="from 5 % of the step on: less is within what steps differ by",
        measured=Trial("confirmed", Saving(0.206, 0.198, 0.214), "results/trial-1", "results/base"),
    )  # fmt: skip


def _unfused() -> Finding:
    return Finding(
        id="optimizer", title="The optimizer updates one tensor at a time", severity="medium",
        evidence=["161 kernels in Optimizer.step#SGD.step, 12 ms of a step"],
        cause="the update is a loop over parameters", advice="update all parameters in one kernel",
        fix={"training.optimizer_impl": "fused"}, expected=Saving(0.05), threshold="from 3 % on",
        measured=Trial("failed", None, None, "results/base", "the run with it ended: no fused kernels for this device"),
    )  # fmt: skip


def _layout() -> Finding:
    return Finding(
        id="layout", title="Layouts are changed between convolutions", severity="low",
        evidence=["nchwToNhwcKernel runs 53 times a step"], cause="the model is in NCHW, the kernels are in NHWC",
        advice="model.to(memory_format=torch.channels_last)", threshold="from 1 % on",
    )  # fmt: skip
