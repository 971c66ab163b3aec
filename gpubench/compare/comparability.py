"""Decides whether two sides did the same work, in what else they differ, and which figures are comparable."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec

from gpubench import units
from gpubench.compare.evidence import RunEvidence, Side
from gpubench.compare.result import Comparability, Difference, Kind, SideSummary
from gpubench.metrics import DEFINITIONS
from gpubench.settings.roles import ROLES

FEW = 3  # number of keys that a sentence lists
PER_DEVICE = "_per_device"  # suffix of the name of a figure that is divided by the ranks
THROUGHPUT, OF_TOKENS = "throughput", "token_throughput"
PER_SAMPLE = (THROUGHPUT, "energy_per_sample")
"""The metrics with a better direction that are of a sample, so that they are not of the same work if samples differ."""
OF_LENGTH = ("sample_shape", "tokens_per_sample")
"""The facts of the built model that the length of its sequences decides."""
ORDER: tuple[Kind, ...] = ("workload", "scale", "treatment", "code", "protocol")

_OF_MEMORY = "memory."  # settings that only one command has
# Keys that are not conditions of the run: names, momentary readings, and duplicates of other keys.
_PASSING = ("packages.torch", "variables.SLURM_JOB_ID")
PASSING_OF_GPU = ("index", "sm_clock_mhz", "memory_clock_mhz")


def consequences() -> Mapping[str, Sequence[str]]:
    """Returns the facts that gpubench derives, each with the settings that it follows from, the closest first.

    A setting among them counts as derived only if the user gave it on neither side.
    """
    return {
        **{key: one.depends_on for key, one in ROLES.items()},
        **{fact: (key, *one.depends_on) for key, one in ROLES.items() for fact in one.environment},
    }


@dataclass(frozen=True)
class Normalisation:
    """How to make one metric comparable: each side's value is divided by the side's number."""

    metric: str
    """The name of the divided metric."""
    unit: str
    baseline: float
    candidate: float
    withheld: str | None
    """Why the metric gets no verdict; None if it gets one."""


def judge(baseline: Side, candidate: Side, *, force: bool = False) -> Comparability:
    """Decides whether verdicts may be given. `force` gives them in any case, and the reasons mention it."""
    ours, theirs = baseline.runs[0], candidate.runs[0]
    found = differences(ours, theirs)
    against = _obstacles(baseline, candidate, found)
    verdict = "verdicts are given because of --force" if force else "verdicts are withheld; --force gives them anyway"
    return Comparability(
        comparable=not against,
        forced=force and bool(against),
        reasons=[f"{reason}: {verdict}" for reason in against] + _remarks(baseline, candidate, found),
        differences=found,
    )


def misfit(side: Side) -> str | None:
    """Returns why the runs of a side do not measure one configuration; None if they do."""
    return next(iter(_obstacles(side, side, ())), None)


def differences(baseline: RunEvidence, candidate: RunEvidence) -> list[Difference]:
    """Returns all facts in which the sides differ, those of the work first. Facts unknown on one side do not count."""
    found = [*_work(baseline, candidate), *_environment(baseline, candidate), *_code(baseline, candidate)]
    causes = _causes({difference.key for difference in found}, baseline, candidate)
    found = [msgspec.structs.replace(difference, follows=causes.get(difference.key)) for difference in found]
    return sorted(found, key=lambda difference: ORDER.index(difference.kind))


def _causes(keys: set[str], baseline: RunEvidence, candidate: RunEvidence) -> dict[str, str]:
    """Maps each difference that follows from another one to the setting that the user chose."""
    if not keys:
        return {}
    derived, chosen = consequences(), baseline.chosen & candidate.chosen
    direct = {
        key: cause
        for key in keys & derived.keys()
        if key not in ROLES or key in chosen
        if (cause := next((cause for cause in derived[key] if cause in keys), None))
    }
    found = {}
    for key, cause in direct.items():
        while cause in direct:
            cause = direct[cause]
        found[key] = cause
    return found


def same_step(baseline: Side, candidate: Side) -> bool:
    """Tells whether a step is the same work on both sides: equal samples, of equal length, per rank and equal ranks."""
    return _step(baseline) == _step(candidate) and not lengths(baseline, candidate)


def samples_per_step(side: Side) -> int | None:
    """Returns the samples of one rank in one optimizer step; None if the settings are unknown."""
    settings, built = side.runs[0].settings, side.runs[0].workload
    if isinstance(samples := built.get("samples_per_step"), int):
        return samples
    batch, accumulation = settings.get("training.batch_size"), settings.get("training.grad_accumulation")
    return batch * accumulation if isinstance(batch, int) and isinstance(accumulation, int) else None


def lengths(baseline: Side, candidate: Side) -> tuple[float, float] | None:
    """Returns the tokens of a sample on both sides if the user has asked for sequences of another length."""
    return _lengths(baseline.runs[0], candidate.runs[0])


def _lengths(baseline: RunEvidence, candidate: RunEvidence) -> tuple[float, float] | None:
    ours, theirs = (run.settings.get("program.command") for run in (baseline, candidate))
    if ours and (ours == theirs or _script(str(ours)) != _script(str(theirs))):
        return None  # the same arguments, so that the code is what differs; or another program
    tokens = _tokens(baseline), _tokens(candidate)
    return None if None in tokens or tokens[0] == tokens[1] else (tokens[0] or 0.0, tokens[1] or 0.0)


def _tokens(run: RunEvidence) -> float | None:
    """Returns the tokens of a sample; None if it has none.

    Those of a program are the integers that its model is given, if it is given nothing else.
    """
    if isinstance(declared := run.workload.get("tokens_per_sample"), int):
        return float(declared)
    counted = next(filter(None, run.summary.work), None)
    if counted is None or not counted.elements or not counted.forwarded:
        return None
    shapes = [shape.rpartition(" ") for shape in counted.shapes]  # that of a number has no sizes
    if not shapes or any(size.count("x") != 1 or not kind.startswith("int") for size, _, kind in shapes):
        return None
    return counted.elements / (counted.forwarded * run.ranks)


def normalise(metric: str, unit: str, baseline: Side, candidate: Side) -> Normalisation:
    """Returns how a metric is made comparable.

    It is withheld if the steps differ in size, per token if the samples differ in length, and per device if the ranks
    differ.
    """
    as_it_is = Normalisation(metric, unit, 1.0, 1.0, None)
    per, ranks = _per(metric), (_ranks(baseline), _ranks(candidate))
    if any(side.runs[0].record is None for side in (baseline, candidate)):
        return as_it_is
    if per == "step" and not same_step(baseline, candidate):
        sizes = f"{_describe_step(baseline)} against {_describe_step(candidate)}"
        return Normalisation(metric, unit, 1.0, 1.0, f"a step is not the same work: {sizes}")
    if metric in PER_SAMPLE and (tokens := lengths(baseline, candidate)):
        if metric != THROUGHPUT or any(OF_TOKENS in run.metrics for side in (baseline, candidate) for run in side.runs):
            sizes = " against ".join(f"{units.digits(each)} tokens" for each in tokens)
            return Normalisation(metric, unit, 1.0, 1.0, f"a sample is not the same work: {sizes}")
        whole = normalise(OF_TOKENS, DEFINITIONS[OF_TOKENS].unit, baseline, candidate)
        return replace(whole, baseline=whole.baseline / tokens[0], candidate=whole.candidate / tokens[1])
    if per == "job" and ranks[0] != ranks[1]:
        return Normalisation(metric + PER_DEVICE, unit, float(ranks[0]), float(ranks[1]), None)
    return as_it_is


def headline(run: RunEvidence) -> str:
    """Returns the workload in one line: "resnet18, fp32, batch 16 x 2 ranks on cuda", or what a log has."""
    if run.record is None:
        return f"{next(iter(run.metrics), '?')} of {run.kind_of_log}"
    settings = run.settings
    if not settings:
        return f"{run.record.command}, settings unknown"
    return run.kind.describe(settings, run.workload, ranks=run.record.world_size, samples=run.summary.samples)


def summarise_side(side: Side) -> SideSummary:
    first = side.runs[0]
    return SideSummary(
        label=side.label,
        paths=[str(run.path) for run in side.runs],
        command=first.record.command if first.record else None,
        headline=headline(first),
        started=first.record.started if first.record else None,
        runs=len(side.runs),
        repeats=sum(run.repeats for run in side.runs),
    )


def _per(metric: str) -> str | None:
    if metric in DEFINITIONS:
        return DEFINITIONS[metric].per
    return "step" if metric.startswith("phase_") else None


def _ranks(side: Side) -> int:
    record = side.runs[0].record
    return record.world_size if record else 1


def _step(side: Side) -> tuple[int | None, int]:
    return samples_per_step(side), _ranks(side)


def _describe_step(side: Side) -> str:
    samples, ranks = samples_per_step(side), _ranks(side)
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    length = f" of {units.digits(tokens)} tokens" if (tokens := _tokens(side.runs[0])) else ""
    return f"{'an unknown number of samples' if samples is None else units.counted(samples, 'sample')}{length}{each}"


def _work(baseline: RunEvidence, candidate: RunEvidence) -> Iterator[Difference]:
    """Yields the differences in settings, and in the facts of the built model."""
    if baseline.record and candidate.record and baseline.kind.work != candidate.kind.work:
        yield Difference("command", "workload", baseline.record.command, candidate.record.command)
    built = baseline.workload.keys() & candidate.workload.keys()
    if baseline.settings and candidate.settings:
        for key, ours, theirs in _changes(baseline.settings, candidate.settings):
            declared = ROLES.get(key) or ROLES.get(key.rpartition(".")[0])
            role = declared.role if declared else "treatment"  # a setting of another version of gpubench
            if role == "uncompared" or (declared and declared.superseded_by in built):
                continue
            if None in (ours, theirs) and baseline.given.get(key) == candidate.given.get(key):
                continue  # what one program decided itself, and of the other is not known or makes no sense
            needed = role in ("workload", "scale") or key.startswith(_OF_MEMORY)
            of_mapping = key not in ROLES  # such an entry may be absent where the callable has a default
            if needed and not of_mapping and not (key in baseline.settings and key in candidate.settings):
                continue
            yield Difference(key, role, ours, theirs)
    other_bits = any(baseline.settings.get(key) != candidate.settings.get(key) for key in ("precision", "seed"))
    for key, ours, theirs in _changes(baseline.workload, candidate.workload):
        if key == "weights" and other_bits:  # the same model, with weights that differ in their last bits
            continue
        if key in built:
            is_scale = key == "samples_per_step" or (key in OF_LENGTH and _lengths(baseline, candidate) is not None)
            yield Difference(key, "scale" if is_scale else "workload", ours, theirs)


def _environment(baseline: RunEvidence, candidate: RunEvidence) -> Iterator[Difference]:
    if not (baseline.environment and candidate.environment):
        return
    compared = min(len(_gpus(baseline)), len(_gpus(candidate)))
    ours, theirs = _conditions(baseline, compared), _conditions(candidate, compared)
    elsewhere = ours.get("host.name") != theirs.get("host.name")
    for key, old, new in _changes(ours, theirs):
        if not (elsewhere and key.endswith(".uuid")):  # another machine has other GPUs
            yield Difference(key, "code" if key == "packages.gpubench" else "treatment", old, new)


def _conditions(run: RunEvidence, gpus: int) -> dict[str, Any]:
    """Returns the environment without momentary readings, with the first `gpus` GPUs key by key."""
    facts = {key: fact for key, fact in run.environment.items() if key not in _PASSING and key != "gpus"}
    facts["gpus.count"] = len(_gpus(run))
    for index, gpu in enumerate(_gpus(run)[:gpus]):
        facts |= {f"gpus.{index}.{name}": fact for name, fact in gpu.items() if name not in PASSING_OF_GPU}
    return facts


def _gpus(run: RunEvidence) -> list[dict[str, Any]]:
    listed = run.environment.get("gpus")
    return [gpu for gpu in listed if isinstance(gpu, dict)] if isinstance(listed, list) else []


def _code(baseline: RunEvidence, candidate: RunEvidence) -> Iterator[Difference]:
    ours, theirs = (run.record.git if run.record else None for run in (baseline, candidate))
    if ours and theirs:
        both = ours.keys() & theirs.keys()
        for key, old, new in _changes(*({key: git[key] for key in git if key in both} for git in (ours, theirs))):
            yield Difference(f"git.{key}", "code", old, new)
        if since := (ours.keys() ^ theirs.keys()) & {"changes"} and (ours.get("changes") or theirs.get("changes")):
            yield Difference("git.changes", "code", None, since)


def _changes(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    if ours is theirs or ours == theirs:
        return
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) != theirs.get(key):
            yield key, ours.get(key), theirs.get(key)


def _obstacles(baseline: Side, candidate: Side, found: Iterable[Difference]) -> list[str]:
    """Returns why no verdict can be given: the work differs, or is unknown."""
    disunity = [reason for side in (baseline, candidate) if (reason := _disunity(side))]
    return [*dict.fromkeys([*_unknown_work(baseline, candidate), *_unlike_work(found), *disunity])]


def _unknown_work(baseline: Side, candidate: Side) -> Iterator[str]:
    """Yields reasons why it is unknown whether the work is the same."""
    foreign = [side.label for side in (baseline, candidate) if side.runs[0].record is None]
    if len(foreign) == 1:
        yield f"{foreign[0]} is a log of another tool and the other side a run: the work may not be the same"
    for side in (baseline, candidate):
        lost = [run for run in side.runs if run.record and not run.settings]
        if lost:
            yield f"the settings of {lost[0].label} could not be read, so its work is unknown"


def _unlike_work(found: Iterable[Difference]) -> Iterator[str]:
    work = [difference for difference in found if difference.kind == "workload"]
    if work:
        yield f"not the same work, {_sentence(work)}"


def _disunity(side: Side) -> str | None:
    """Returns why the runs of a group are not repeats of each other, or None. Seed and protocol may differ."""
    first = side.runs[0]
    for run in side.runs[1:]:
        found = [
            difference for difference in _work(first, run) if difference.kind != "protocol" and difference.key != "seed"
        ]
        if found:
            return f"the runs of {side.label} do not repeat one configuration, {_sentence(found)} in {run.label}"
    return None


def _remarks(baseline: Side, candidate: Side, found: Iterable[Difference]) -> list[str]:
    """Returns remarks that do not withhold the verdicts."""
    sides = (baseline, candidate)
    if all(side.runs[0].record is None for side in sides):
        return ["logs of another tool: only their numbers are compared"]
    said = [
        f"the environment of {side.runs[0].label} could not be read: machine and libraries could not be compared"
        for side in sides
        if side.runs[0].record and not side.runs[0].environment
    ]
    said += [remark for side in sides if (remark := _variety(side))]
    said += [remark] if (remark := _other_program(baseline, candidate)) else []
    said += _counted(baseline, candidate)
    scale = [difference for difference in found if difference.kind == "scale"]
    if scale:
        said.append(f"{_sentence(scale)}: {_consequence(baseline, candidate)}")
    return said


def _other_program(baseline: Side, candidate: Side) -> str | None:
    """Returns a remark if the sides are different programs, whose work is not known to be the same."""
    ours, theirs = (_script(str(side.runs[0].settings.get("program.command") or "")) for side in (baseline, candidate))
    if not (ours and theirs) or ours == theirs:
        return None
    return f"{ours} and {theirs} are different programs, which need not do the same work"


def _script(command: str) -> str:
    """Returns the script or the module that a command line runs, or else its first word."""
    words = command.split()
    scripts = [word for word in words if word.endswith(".py")]
    modules = [module for option, module in pairwise(words) if option == "-m"]
    return next(iter(scripts or modules[-1:] or words), "")


def _variety(side: Side) -> str | None:
    """Returns a remark on the facts of environment and code in which the runs of a group differ, or None."""
    first = side.runs[0]
    keys = dict.fromkeys(
        difference.key for run in side.runs[1:] for difference in (*_environment(first, run), *_code(first, run))
    )
    if not keys:
        return None
    named = ", ".join(list(keys)[:FEW]) + (f" and {len(keys) - FEW} more" if len(keys) > FEW else "")
    return f"the runs of {side.label} differ in {named}: this adds to their variation"


def _counted(baseline: Side, candidate: Side) -> Iterator[str]:
    """Yields remarks if the memory of one side was followed or predicted and that of the other was not."""
    for side, other in ((baseline, candidate), (candidate, baseline)):
        ours, theirs = side.runs[0], other.runs[0]
        if ours.untimed and not theirs.untimed:
            yield f"{side.label} counted memory and timed nothing: only peaks of memory are comparable"
        if _predicted(ours) and not _predicted(theirs):
            yield (
                f"the memory of {side.label} was predicted, and that of {other.label} was measured: "
                "the difference includes the error of the prediction"
            )


def _predicted(run: RunEvidence) -> bool:
    return run.untimed and run.settings.get("memory.predict") is True


def _consequence(baseline: Side, candidate: Side) -> str:
    if baseline.runs[0].untimed or candidate.runs[0].untimed:
        return "the peaks of a device are compared without division"
    if _ranks(baseline) != _ranks(candidate):
        return "per-step figures are withheld, those of the whole job judged per device"
    if lengths(baseline, candidate):
        return "per-step and per-sample figures are withheld, those per token and per device judged"
    if same_step(baseline, candidate):
        samples = samples_per_step(baseline)
        return f"a step is {samples} samples per rank on both sides, so all figures are compared without division"
    return "per-step figures are withheld, per-sample and per-device ones judged"


def _sentence(found: Iterable[Difference]) -> str:
    return ", ".join(f"{each.key} {_value(each.baseline)} against {_value(each.candidate)}" for each in found)


def _value(value: Any) -> str:
    return "unset" if value is None else str(value)
