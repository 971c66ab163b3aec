"""Rules about what makes the batches of a program slow, wrong or large, by its loader alone."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

from gpubench import units
from gpubench.data_cost import DataCost, SampleStage, WithWorkers
from gpubench.diagnosis import code, data_needs
from gpubench.diagnosis.case import HIGH, NOTABLE, Answers, Case, at_most, severity
from gpubench.findings import OUTCOMES, Finding, Saving, Trial
from gpubench.loader_record import LoaderRecord, SameNumbers
from gpubench.sampled import SampledCode, SampledFunction

LARGE = 2**30
"""The bytes from which on batches that wait are much."""
GROWTH = 16 * 2**20
"""The bytes by which a worker has to grow. One that copies nothing of its dataset grows by about 4 MiB."""
COPIED = 2 * GROWTH
"""The bytes of objects that are worth a finding if each worker copies them."""
NOT_SHARED = 0.5
"""The share of its growth by which the shared memory of a worker has to shrink, if objects were copied on write."""
SLOW_START = 1.0
"""The seconds from which on the start of workers is long."""
SPARE_CORES = 1.2
"""The cores that the processes of a loader keep busy beyond one each, from which on these compute with threads."""
UNPROVED = 0.1
"""The share of training, of medium severity, as which counts at most what is not known to matter."""
MUCH_CPU = 2.0
"""The factor of the CPU time of a sample from which on threads do harm."""
SMALL_READS = 2**20
"""The bytes of a sample below which files are small."""
BYTES_OF_BATCH = 0.5
"""The share of the bytes of a batch that have the values of bytes from which on it is one of pictures."""
SLOW_DECODERS = ("PIL",)
MAKING = ("__getitem__", "__getitems__", "__iter__")
"""The methods of a dataset whose own code is the rest of making a sample."""


@dataclass(frozen=True, kw_only=True)
class DataCase(Case):
    """What the data of a program costs."""

    cost: DataCost
    code: SampledCode | None = None

    @property
    def whole(self) -> int:
        return 1

    @property
    def record(self) -> LoaderRecord:
        return self.cost.record

    @property
    def saving(self) -> float | None:
        """The share of training that waits for data; None if that is unknown."""
        ceiling = self.cost.ceiling
        if ceiling is None or ceiling.ratio is None or ceiling.verdict == "inconclusive":
            return None
        return max(0.0, 1 - 1 / ceiling.ratio)

    def worth(self, share: float) -> float:
        """Returns the share of training that less of a part of the samples' time can save; that of the samples
        themselves if training was not run."""
        if self.cost.ceiling and self.saving is None:  # it is not known whether training waits
            return min(share, UNPROVED)
        return share if self.saving is None else min(share, self.saving)

    def expected(self, share: float) -> Saving | None:
        """Returns the largest saving of training that less of a part of the samples' time can bring."""
        return None if self.saving is None else at_most(min(share, self.saving))

    def stages(self, *kinds: str) -> list[SampleStage]:
        return [one for one in self.cost.stages if one.kind in kinds]

    @property
    def alone(self) -> WithWorkers | None:
        """The loader alone as the program has it."""
        return next((one for one in self.cost.scaling if one.workers == self.record.workers), None)


def same_numbers(case: DataCase) -> Answers:
    """Yields that workers, or passes, draw from the same state of a generator."""
    copied = [one for one in case.record.same_numbers if one.where != "batches"]
    if copied:
        yield Finding(
            id="same-random-numbers",
            title="the same random numbers are drawn again in "
            + units.listed(dict.fromkeys("all workers" if one.where == "workers" else "each pass" for one in copied)),
            severity="high",
            evidence=[_same(one) for one in copied],
            cause="each worker starts with a copy of the dataset, and with it of the state of a generator that the "
            "dataset holds or that worker_init_fn seeds; augmentation then makes fewer different samples than it seems "
            "to",
            advice="make the generator in the worker, with torch.utils.data.get_worker_info().seed, or use the "
            "generators of torch, random and numpy.random, which PyTorch seeds in each worker",
            place="loader",
            threshold="any generator from which two workers, or two passes of a worker, draw from the same state on",
        )


def same_seeds(case: DataCase) -> Answers:
    """Yields that each batch is made from the same state of a generator."""
    if seeded := sorted({one.generator for one in case.record.same_numbers if one.where == "batches"}):
        yield Finding(
            id="same-seed-in-batches",
            title=f"each sample, or each batch, gives the same seed to {units.listed(seeded)}",
            severity="high",
            evidence=[
                f"{name} was in the same state after each of the first three batches, although numbers were drawn from "
                "it between two of them as well"
                for name in seeded
            ],
            cause="the code that makes a sample or a batch seeds the generator with a constant, so that what is random "
            "in it is the same each time",
            advice="seed it once in each worker, or for each sample with a number that depends on its index and on the "
            "epoch",
            place="loader",
            threshold="any generator that is drawn from and in the same state after each batch",
        )


def _same(one: SameNumbers) -> str:
    what = units.counted(one.number, "worker" if one.where == "workers" else "pass")
    return f"{what.replace('passs', 'passes')} began to draw from {one.generator} in the same state"


def workers(case: DataCase) -> Answers:
    """Yields that there are too few workers, or more than help."""
    cost, alone, own = case.cost, case.alone, case.record.workers
    best, least, needed = data_needs.fastest(cost), data_needs.as_fast(cost), data_needs.needed(cost)
    if not (best and least and needed and needed.throughput and alone and alone.throughput):
        return
    rates = [
        f"{units.rate(one.throughput.value, 'samples/s')} with {_number(one.workers)}"
        for one in dict.fromkeys((alone, needed, least, best))
        if one.throughput
    ]
    evidence = [f"the loader alone makes {units.listed(rates)}"]
    waits = case.saving
    if own < needed.workers and (waits is None or waits >= NOTABLE):
        share = 1 - alone.throughput.value / needed.throughput.value
        yield Finding(
            id="too-few-workers",
            title=f"with {_number(own)} batches come more slowly than with {needed.workers}",
            severity=severity(case.worth(share)),
            evidence=evidence,
            cause="the process that trains makes every batch itself, between two steps"
            if not own
            else "the workers cannot make batches as fast as training takes them",
            advice=f"load batches in {units.counted(needed.workers, 'worker')}",
            fix=case.fix(data__workers=needed.workers),
            place="loader",
            expected=case.expected(share),
            threshold=f"at least {units.percent(data_needs.CLOSE)} more samples a second, where training waits for "
            f"data for at least {units.percent(NOTABLE)} of its time",
        )
    elif own > least.workers and own > 1:
        memory = f", each with {units.size(alone.memory)} of memory" if alone.memory else ""
        yield Finding(
            id="too-many-workers",
            title=f"with {_number(least.workers)} batches come as fast as with {own}",
            severity="low",
            evidence=[*evidence, f"the program has {units.counted(own, 'worker')}{memory}"],
            cause=data_needs.limit(alone, case.cost) or "further workers wait for something that all of them share",
            advice=f"start {units.counted(least.workers, 'worker')}" if least.workers else "start no workers",
            fix=case.fix(data__workers=least.workers),
            place="loader",
            threshold=f"a smaller number of workers makes {units.percent(1 - data_needs.CLOSE)} of the samples or more",
        )


def _number(workers: int) -> str:
    return units.counted(workers, "worker") if workers else "no workers"


def threads(case: DataCase) -> Answers:
    """Yields that workers compute with several threads each, which compete for the cores."""
    alone, own = case.alone, case.record.workers
    if alone and not own:
        yield from _threads_without_workers(case, alone)
    if alone is None or alone.cores is None or not own or alone.cores < own + 1 + SPARE_CORES:
        return
    share = 1 - (own + 1) / alone.cores
    yield Finding(
        id="threads-in-workers",
        title="the workers compute with more threads than there are workers",
        severity=severity(case.worth(share)),
        evidence=[f"{units.counted(own, 'worker')} and the process that draws keep {alone.cores:.1f} cores busy"],
        cause="PyTorch uses one thread in a worker, but other libraries, such as OpenCV and OpenBLAS, use as many as "
        "there are cores, in each worker",
        advice="set the threads of those libraries to one in worker_init_fn, as by cv2.setNumThreads(0), or "
        "OMP_NUM_THREADS=1 in the environment",
        place="loader",
        threshold=f"at least {SPARE_CORES:g} cores busy beyond one for each process",
    )


def _threads_without_workers(case: DataCase, alone: WithWorkers) -> Answers:
    """Yields that samples cost much more CPU in the process that trains than in a worker, which has one thread."""
    other = next((one for one in case.cost.scaling if one.workers == 1 and one.cpu), None)
    if other is None or not other.cpu or not alone.cpu or case.record.threads < 2 or alone.cpu < MUCH_CPU * other.cpu:
        return
    share = 1 - other.cpu / alone.cpu
    yield Finding(
        id="threads-for-samples",
        title=f"samples are made with {case.record.threads} threads, which cost more than they help",
        severity=severity(case.worth(share)),
        evidence=[
            f"a sample costs {units.seconds(alone.cpu)} of CPU in the process that trains, where PyTorch has "
            f"{case.record.threads} threads, and {units.seconds(other.cpu)} in a worker, where it has one"
        ],
        cause="the operations on a single sample are so small that handing parts of them to threads takes longer",
        advice="load batches in a worker, or compute with one thread while they are made",
        fix=case.fix(data__workers=1),
        place="loader",
        expected=case.expected(share),
        threshold=f"{MUCH_CPU:g} times the CPU time of a worker",
    )


def restarts(case: DataCase) -> Answers:
    """Yields that workers start again for each pass, or that their start takes long."""
    record = case.record
    if not record.workers or not record.restarts or record.wall <= 0 or record.persistent:
        return
    each = fmean(record.restarts)
    share = min(1.0, sum(record.restarts) / record.wall)
    if share < NOTABLE:
        return
    yield Finding(
        id="restarted-workers",
        title="the workers start again for each pass over the data",
        severity=severity(case.worth(share)),
        evidence=[
            f"a pass begins with {units.seconds(each)} until its first batch, {units.percent(share)} of a pass",
            f"the workers start by {record.start_method}" if record.start_method else "",
        ],
        cause="the workers end with a pass, and the next one waits until new ones have started and made a batch",
        advice="keep the workers from one pass to the next",
        fix=case.fix(data__persistent_workers=True),
        place="loader",
        expected=case.expected(share),
        threshold=f"at least {units.percent(NOTABLE)} of a pass while nothing else goes on",
    )


def spawn(case: DataCase) -> Answers:
    record = case.record
    if record.start_method not in ("spawn", "forkserver") or record.first_batch < SLOW_START:
        return
    yield Finding(
        id="slow-worker-start",
        title=f"the workers take {units.seconds(record.first_batch)} to start",
        severity="low",
        evidence=[f"the workers start by {record.start_method}, and the first batch came after as long"],
        cause="each worker imports the program and its libraries again, and gets the dataset by pickle",
        advice="start workers once, by persistent_workers=True; import what only training needs below "
        'if __name__ == "__main__"',
        fix=case.fix(data__persistent_workers=True) if not record.persistent else {},
        place="loader",
        threshold=f"at least {units.seconds(SLOW_START)} until the first batch",
    )


def copied_on_write(case: DataCase) -> Answers:
    """Yields that workers copy the objects of the dataset as they count references to them."""
    record = case.record
    grown = [(one.private - one.private_first, one.shared_first - one.shared) for one in record.memory]
    if record.start_method != "fork" or not grown or record.object_bytes < COPIED:
        return
    growth = fmean(private for private, _ in grown)
    if growth < GROWTH or fmean(shared for _, shared in grown) < NOT_SHARED * growth:
        return
    yield Finding(
        id="copy-on-write",
        title="each worker copies the dataset's Python objects into memory of its own as it reads them",
        severity="medium",
        evidence=[
            f"the dataset holds {record.objects:,} Python objects in one collection, which take about "
            f"{units.size(record.object_bytes)}",
            f"a worker grew by {units.size(growth)} while it shared as much less with the others, in "
            f"{record.memory[0].samples:,} samples of all workers",
        ],
        cause="a fork shares memory until it is written to, and reading a Python object writes its reference count",
        advice="hold the objects in one array: of NumPy, torch or Arrow, with strings as one buffer and offsets",
        place="loader",
        threshold=f"at least {units.size(COPIED)} of objects, and {units.size(GROWTH)} of growth for which shared "
        "memory shrinks by half as much or more",
    )


def batch_types(case: DataCase) -> Answers:
    """Yields that batches have wider numbers than they need."""
    batch = case.record.batch
    moved = sum(one.share for one in case.stages("transfer", "collate", "pin"))
    if batch is None or not batch.size:
        return
    if batch.wide >= HIGH * batch.size:
        yield Finding(
            id="float64-batches",
            title="batches have numbers of float64",
            severity=severity(case.worth(moved / 2)),
            evidence=[f"{units.size(batch.wide)} of the {units.size(batch.size)} of a batch are float64"],
            cause="NumPy computes in float64 unless it is told otherwise, and torch.from_numpy keeps that",
            advice="make the samples float32, which halves what is collated and sent between processes",
            place="loader",
            expected=case.expected(moved / 2),
            threshold=f"at least {units.percent(HIGH)} of the bytes of a batch",
        )
    if batch.from_bytes >= BYTES_OF_BATCH * batch.size and moved >= NOTABLE:
        yield Finding(
            id="bytes-as-floats",
            title="batches send bytes as floating-point numbers, which are four times as large",
            severity=severity(case.worth(0.75 * moved)),
            evidence=[
                f"{units.size(batch.from_bytes)} of the {units.size(batch.size)} of a batch have the values of bytes",
                f"collating and sending take {units.percent(moved)} of the time of a sample",
            ],
            cause="the samples become floating-point numbers in the dataset, before they are collated and sent",
            advice="keep uint8 in the dataset, and convert whole batches on the device",
            place="loader",
            expected=case.expected(0.75 * moved),
            threshold=f"half of the bytes of a batch, and collating and sending take {units.percent(NOTABLE)} or more",
        )


def prefetched(case: DataCase) -> Answers:
    record = case.record
    if record.batch is None or not record.workers or not record.prefetch:
        return
    held = record.workers * record.prefetch * record.batch.size
    if held < LARGE:
        return
    yield Finding(
        id="large-prefetch",
        title=f"the batches that wait take up to {units.size(held)} of shared memory",
        severity="low",
        evidence=[
            f"batches loaded ahead: {record.prefetch} a worker, {units.size(record.batch.size)} each, with "
            f"{units.counted(record.workers, 'worker')}"
        ],
        cause="each worker loads batches ahead, whatever their size",
        advice="load fewer batches ahead",
        fix=case.fix(data__prefetch=1) if record.prefetch > 1 else {},
        place="loader",
        threshold=f"at least {units.size(LARGE)}",
    )


def useless_pinning(case: DataCase) -> Answers:
    record = case.record
    if not record.pin_memory or record.gpus is None or record.gpus:
        return
    yield Finding(
        id="pinned-without-gpu",
        title="pin_memory=True has no effect without a GPU",
        severity="low",
        evidence=["the DataLoader asks for page-locked memory, and PyTorch sees no GPU"],
        cause="page-locked memory only makes copies to a GPU faster",
        advice="leave it out where there is no GPU",
        place="loader",
        threshold="any",
    )


def slow_samples(case: DataCase) -> Answers:
    slow = data_needs.slow_samples(case.cost)
    times = case.cost.times
    if slow is None or times is None or not slow.again:
        return
    numbered = "sample takes" if len(slow.samples) == 1 else "samples take"
    lost = sum(one.seconds for one in slow.samples)
    share = lost / (fmean(times.quantiles) * times.number)
    yield Finding(
        id="slow-samples",
        title=f"{len(slow.samples)} {numbered} much longer than the others, each time",
        severity=severity(case.worth(share)),
        evidence=[
            f"sample {one.index} takes {units.seconds(one.seconds)}, and "
            f"{' and '.join(map(units.seconds, one.again))} when made again"
            + (f"; it opens {one.file}" if one.file else "")
            for one in slow.samples[:3]
        ]
        + [f"half of the samples take {units.seconds(times.quantiles[50])} or less"],
        cause="the samples themselves are slow, as larger files are, and a batch waits for its slowest sample",
        advice="store these samples smaller, or leave them out",
        place="loader",
        expected=case.expected(share),
        threshold=f"at least {data_needs.SLOW:g} times the median, again when made again",
    )


def slow_reads(case: DataCase) -> Answers:
    read = case.record.read
    share = sum(one.share for one in case.stages("read"))
    waits = sum(one.seconds - one.cpu for one in case.stages("read")) / case.cost.sample if case.cost.sample else 0.0
    if read is None or not read.samples or share < HIGH or waits < NOTABLE:
        return
    each = read.asked / read.samples
    small = each < SMALL_READS
    evidence = [
        f"reading takes {units.percent(share)} of the time of a sample, and waits for {units.percent(waits)} of it",
        f"{units.size(each)} are read for a sample, {units.percent(min(1.0, read.disk / max(1, read.asked)))} of them "
        "from a disk",
    ]
    yield Finding(
        id="slow-reads",
        title="samples wait for small files" if small else "samples wait for the disk",
        severity=severity(case.worth(share)),
        evidence=evidence,
        cause="each sample opens files of its own, and waits for each"
        if small
        else "the disk, or the network, is slow",
        advice="pack many samples into one file that is read in order, as WebDataset, Arrow or LMDB do"
        if small
        else "store the samples compressed or smaller, or copy them to a local disk first; more workers wait at once",
        place="loader",
        expected=case.expected(share),
        threshold=f"reading takes at least {units.percent(HIGH)} of a sample, and waits",
    )


def slow_stage(case: DataCase) -> Answers:
    """Yields the stage that takes most of a sample, with the lines of its code."""
    stages = [one for one in case.cost.stages if one.kind != "read"]
    if not stages or stages[0].share < HIGH or (case.saving is not None and case.saving < NOTABLE):
        return
    first = stages[0]
    evidence = [
        f"{first.called} takes {units.seconds(first.seconds)} of the {units.seconds(case.cost.sample)} of a sample, "
        f"{units.percent(first.share)}",
        *_lines(case, first),
    ]
    if first.waits >= 0.5:
        evidence.append(f"it waits for {units.percent(first.waits)} of its time, and computes for the rest")
    yield Finding(
        id=f"slow-{first.kind}",
        title=f"{first.called} takes {units.percent(first.share)} of the time of a sample",
        severity=severity(case.worth(first.share)),
        evidence=evidence,
        cause=_cause(first),
        advice=_advice(case, first),
        place="loader",
        expected=case.expected(first.share),
        threshold=f"the longest stage, if it takes at least {units.percent(HIGH)} of the time of a sample",
    )


def _cause(stage: SampleStage) -> str:
    where = f" ({stage.place})" if stage.place else ""
    return {
        "index": "drawing the indices of a batch is itself slow, one after the other in the process that draws",
        "collate": f"making a batch of the samples is itself slow{where}",
        "transfer": "a worker pickles each batch, and the process that trains unpickles it",
    }.get(stage.kind, f"it runs once or more for every sample{where}")


def _advice(case: DataCase, stage: SampleStage) -> str:
    if stage.kind == "transfer":
        return (
            "make batches of a few tensors in place of many small objects, each of which is pickled; or load without "
            "workers, if samples are cheap"
        )
    if stage.waits >= 0.5 and stage.kind in ("dataset", "decode", "transform"):
        return "let more samples wait at once, in more workers, or do what it waits for beforehand"
    if stage.kind == "decode":
        faster = [name for name in case.record.decoders if name not in SLOW_DECODERS]
        if stage.name in SLOW_DECODERS and faster:
            return f"decode with {units.listed(faster)}, which is installed; or store the samples decoded and resized"
        return "store the samples decoded and resized, or in a format that is faster to decode"
    if stage.kind == "transform":
        return "do it once, before training, if it is the same in each pass; or on whole batches, on the device"
    if stage.kind == "collate":
        return "operate on whole arrays: stack the samples once, and make no tensor for each of them"
    if stage.kind == "index":
        return "draw the indices of a pass at once, as arrays"
    return "operate on whole arrays, or store what it computes"


def _lines(case: DataCase, stage: SampleStage) -> Iterator[str]:
    """Yields the lines of the program on which a stage was sampled."""
    names = (stage.name.rpartition(".")[2],) if stage.name else MAKING if stage.kind == "dataset" else ()
    for one in _functions(case.code):
        if any(name in one.function for name in names) and one.samples >= code.LEAST_SAMPLES:
            share = units.whole_percent(one.on_line / one.samples)
            text = f": {one.source}" if one.source else ""
            yield f"{share} of the samples of {code.named(one)} are in line {one.line}{text}"
            return


def _functions(sampled: SampledCode | None) -> Iterable[SampledFunction]:
    if sampled is None:
        return []
    return sampled.workers.functions if sampled.workers.processes else sampled.main.functions


def headline(case: DataCase) -> str:
    """Returns the stage that takes most of the time, in one sentence."""
    if not case.cost.stages:
        return ""
    first = case.cost.stages[0]
    return f"{first.called} takes {units.percent(first.share)} of the time of a sample"


RULES = (
    *(
        same_numbers,
        same_seeds,
        workers,
        threads,
        restarts,
        spawn,
        copied_on_write,
        batch_types,
        prefetched,
        useless_pinning,
    ),
    *(slow_samples, slow_reads, slow_stage),
)
"""The rules about making batches."""


def tried(finding: Finding, cost: DataCost) -> Finding:
    """Adds to a finding what its number of workers has saved, if training was run with it."""
    proposed = cost.proposed
    if proposed is None or finding.fix != {"data.workers": proposed.workers}:
        return finding
    saving = Saving.of_throughput(proposed.ratio, proposed.interval) if proposed.ratio else None
    outcome = OUTCOMES.get(proposed.verdict, "inconclusive")
    before, after = proposed.runs
    return msgspec.structs.replace(finding, measured=Trial(outcome, saving, after, before))


def settings_of(record: LoaderRecord) -> Mapping[str, Any]:
    """Returns how the loader runs, by the dot-keys of the settings that change it."""
    found: dict[str, Any] = {"data.workers": record.workers, "data.pin_memory": record.pin_memory}
    if record.workers:
        found |= {"data.prefetch": record.prefetch, "data.persistent_workers": record.persistent}
    return found if record.style == "map" else {}
