"""What a run's efficiency is measured against: how its operations were counted, and who says what the device can do."""

from gpubench import units
from gpubench.comparison.evidence import RunEvidence


def ceilings(run: RunEvidence) -> list[str]:
    """A sentence each."""
    said = []
    if (flops := run.flops) and flops.model_flops_per_sample:
        said.append(f"{units.count(flops.model_flops_per_sample, 'FLOP')} a sample, counted by {flops.method}")
    if peak := run.peak:
        said.append(
            f"{units.count(peak.flops_per_s, 'FLOP/s')} in {peak.dtype} published for {peak.device}: {peak.source}"
        )
    if measured := run.measured_peak:
        rate = units.count(measured.flops_per_s, "FLOP/s")
        said.append(
            f"{rate} in {measured.dtype} measured with a product of two {measured.size} x {measured.size} matrices"
        )
    return said
