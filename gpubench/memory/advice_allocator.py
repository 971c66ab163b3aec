"""Rules about what lies below the tensors: what the allocator keeps unused, and what libraries take for themselves."""

from gpubench import units
from gpubench.findings import Finding
from gpubench.hardware import AMPERE, HOPPER
from gpubench.memory.advice_case import Advice, Answers, Case, threshold
from gpubench.memory.workspaces import HANDLES, blas_workspace, capability

UNUSED = 0.05
"""Of the peak: the pieces in which the allocator takes memory always leave some over."""
WORKSPACES = 0.05
"""Of the peak: matrix products may be slower with less, which a smaller part is not worth."""

SMALL = 8 * 16 * 1024
"""Bytes of a workspace under CUBLAS_WORKSPACE_CONFIG=:16:8, the smaller of the two settings that
torch.use_deterministic_algorithms asks for: eight pieces of 16 KiB."""


def fragmentation(case: Case) -> Answers:
    size, level = case.held("fragmentation"), case.peak.level
    if level.reserved is None or case.share(size) < UNUSED:
        return
    if case.setting("performance.expandable_segments") is True:
        return
    yield Advice(
        size,
        Finding(
            id="fragmentation",
            title="the allocator holds memory that no tensor is in",
            severity=case.severity(size),
            evidence=[
                f"of {units.size(level.reserved)} from the driver {units.size(level.allocated)} are in use at the peak "
                f"{case.where}: {case.told(size)} are not",
            ],
            cause="memory comes in segments of fixed sizes, and what is free in one does not fit the next request",
            advice="PYTORCH_ALLOC_CONF=expandable_segments:True, with which a segment grows instead of another being "
            "taken",
            fix=case.fix(performance__expandable_segments=True),
            threshold=threshold(UNUSED, "segments always leave some over"),
        ),
    )


def workspaces(case: Case) -> Answers:
    size = case.held("workspaces")
    if case.share(size) < WORKSPACES or _is_amd(case):
        return
    # The last with small workspaces, and the first with large ones.
    usual, blas = HANDLES * blas_workspace(AMPERE), HANDLES * blas_workspace(HOPPER)
    config, rest = (":4096:2:16:8", usual) if size > usual else (":16:8", HANDLES * SMALL)
    advice = f"CUBLAS_WORKSPACE_CONFIG={config} in the environment leaves {units.size(rest)} of cuBLAS's"
    if size > blas:
        advice += "; torch.backends.cudnn.benchmark=False keeps cuDNN from trying what takes large ones"
    yield Advice(
        max(size - rest, 0),
        Finding(
            id="workspaces",
            title="libraries hold memory for themselves",
            severity=case.severity(size),
            evidence=[
                f"workspaces hold {case.told(size)} at the peak {case.where}",
                *([f"cuBLAS takes no more than {units.size(blas)} of it"] if size > blas else []),
            ],
            cause="cuBLAS takes a workspace for each thread that computes products, and keeps it"
            + ("; the rest is of other kernels, as cuDNN's for convolutions" if size > blas else ""),
            advice=f"{advice}; products may be slower with less",
            threshold=threshold(WORKSPACES, "products may be slower with less"),
        ),
    )


def _is_amd(case: Case) -> bool:
    """Whose libraries do not read cuBLAS's setting."""
    known = case.accelerator
    return known is not None and capability(known.key) is None
