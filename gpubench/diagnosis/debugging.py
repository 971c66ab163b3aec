"""The rule about modes for debugging that were left on."""

from gpubench import units
from gpubench.diagnosis.case import Answers, ProfileCase, at_most, severity
from gpubench.findings import Finding

_MODES = {
    "math.detect_anomaly": (
        "anomaly detection looks for NaN in each gradient",
        "remove torch.autograd.set_detect_anomaly(True) and detect_anomaly()",
    ),
    "math.cuda_sync_debug_mode": (
        "torch.cuda.set_sync_debug_mode reports each wait for the GPU",
        "remove torch.cuda.set_sync_debug_mode()",
    ),
    "math.profiler": ("a profiler of the program's own is on", "remove the profiler where speed matters"),
    "variables.TORCH_DISTRIBUTED_DEBUG": (
        "TORCH_DISTRIBUTED_DEBUG=DETAIL compares each collective with the other ranks",
        "unset TORCH_DISTRIBUTED_DEBUG",
    ),
}
"""Facts of the environment that are such modes, with what they do and how to end them."""
_OFF = ("", "0", "OFF", "INFO", "False", "None")
ANOMALY = "math.detect_anomaly"


def debugging_modes(case: ProfileCase) -> Answers:
    """Finds modes that only debugging needs, in the environment of the run or in the trace itself."""
    modes = [key for key in _MODES if str(case.environment.get(key, "")) not in _OFF]
    checks = case.rank.anomaly
    if checks and ANOMALY not in modes:
        modes.insert(0, ANOMALY)
    if not modes:
        return
    cost = case.share(checks.host) if checks else 0.0
    evidence = [_MODES[key][0] for key in modes]
    if checks:
        waits = "" if case.on_cpu else ", each of which waits for the GPU"
        each = f"{units.digits(checks.calls / case.steps)} checks {case.per_step()}{waits}"
        evidence[modes.index(ANOMALY)] += f": {each}, {case.time_per_step(checks.host)} of the CPU"
    yield Finding(
        id="debugging-modes",
        title="anomaly detection is on" if modes == [ANOMALY] else "modes for debugging are on",
        severity=severity(cost),
        evidence=evidence,
        cause="each of them adds work or waits to every step",
        advice="; ".join(_MODES[key][1] for key in modes),
        expected=at_most(cost) if cost else None,
        threshold="wherever one is on, because measurements under it are of another program",
    )
