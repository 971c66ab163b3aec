"""A pipeline as a section of a run's page: who did what and when, whether splitting was worth it, and every sample."""

from collections.abc import Sequence
from typing import Any

from gpubench import units
from gpubench.comparison.evidence import RunEvidence
from gpubench.diffusion.stages import Pipeline, Stage
from gpubench.diffusion.timeline import PARTS
from gpubench.report import gantt, lanes, pipe_phrases, rows, wording
from gpubench.report.figures import Figure
from gpubench.report.sheets import Sheet, sheet


def section(pipeline: Pipeline, run: RunEvidence) -> dict[str, Any]:
    """What templates/pipeline.html shows."""
    first = min((span.repeat for span in run.spans), default=0)
    found = gantt.bars(span for span in run.spans if span.repeat == first)
    chart = gantt.chart(found, len(pipeline.stages))
    sizes = pipe_phrases.handover_parts(pipeline.handover) if pipeline.handover else {}
    bars = rows.bars("size of a hand-over", "B", [(name, size, "fill solid a") for name, size in sizes.items()])
    note = "Boxes: at work on the sample of that number. Lines: waiting for it. Blank: idle."
    if len(found) > gantt.MOST_BARS:
        note += f" Only the first {gantt.MOST_BARS:,} of {len(found):,} are drawn."
    return {
        "pipeline": pipeline,
        "chart": Figure(f"What each rank did in repeat {first}", chart, note) if chart else None,
        "shares": gantt.shares(pipeline.stages),
        "legend": [(lanes.hue(part), wording.name(part)) for part in PARTS],
        "ranks": _ranks(pipeline.stages),
        "baselines": pipe_phrases.baselines(run.metrics, len(pipeline.stages)),
        "handover": pipe_phrases.handover(pipeline),
        "sizes": Figure("Size of a hand-over", bars) if bars else None,
        "verification": pipe_phrases.verification(pipeline.verification, pipeline.threads),
    }


def _ranks(stages: Sequence[Stage]) -> Sheet:
    return sheet(
        "",
        [
            {
                "rank": str(stage.rank),
                "evaluations": pipe_phrases.evaluations(stage),
                **{
                    wording.name(part): units.seconds(getattr(stage.times, part)) if stage.times else ""
                    for part in PARTS
                },
                "evaluation time": "" if stage.evaluation_time is None else units.seconds(stage.evaluation_time),
                "sent, received in all": f"{stage.sent}, {stage.received}",
                "peak memory": "" if stage.peak_memory is None else units.size(stage.peak_memory),
            }
            for stage in stages
        ],
    )
