"""The worker of `gpubench pipe-infer`: agrees with the other ranks, runs its stage, and verifies the samples."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import record_function

import gpubench
from gpubench import events
from gpubench.channel import EVERYONE, Activity, calendar
from gpubench.errors import SettingsError
from gpubench.events import SpanKind
from gpubench.kinds.pipeline.faults import parse_fault
from gpubench.kinds.pipeline.folders import read_prompts
from gpubench.kinds.pipeline.requests import Requests
from gpubench.kinds.pipeline.settings import CompletedPipeSettings, PipePrecision
from gpubench.kinds.pipeline.split import assign, refuse_short
from gpubench.kinds.pipeline.worker.collectives import agree, broadcast_conditioning, draw_run_id
from gpubench.kinds.pipeline.worker.denoiser import Denoiser
from gpubench.kinds.pipeline.worker.link import Transport, connect
from gpubench.kinds.pipeline.worker.models import load
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler, build
from gpubench.kinds.pipeline.worker.stage import Passage, Session, SpanTimer, Stage
from gpubench.kinds.pipeline.worker.verification import measure, prove, verify
from gpubench.ranks import Ranks
from gpubench.settings.schema import Precision
from gpubench.temporary import folder_of_worker
from gpubench.worker import distributed
from gpubench.worker.compute_rates import time_reference_workload
from gpubench.worker.environment import capture_env_metadata
from gpubench.worker.memory_peaks import peaks
from gpubench.worker.precision import set_float32_matmul
from gpubench.worker.process import Assignment
from gpubench.worker.profiler import Recording, annotate_modules, recorded
from gpubench.worker.timing import Mark, clock_of


class RecordedSpans(SpanTimer[Mark]):
    """A SpanTimer that also annotates its waits in the trace."""

    @contextmanager
    def waiting(self, kind: SpanKind, sample: int) -> Iterator[None]:
        with record_function(kind), super().waiting(kind, sample):
            yield


def record(session: Session) -> Iterator[events.Message]:
    """Runs the samples once more on every rank, and yields the traces of the profiled ranks."""
    profiling, rank = session.settings.profiling, session.stage.rank
    records = profiling.all_ranks or session.ranks.is_rank_zero
    with folder_of_worker() as folder:
        recording = Recording(profiling, session.stage.denoiser.device, rank, Path(folder)) if records else None
        if recording:
            if profiling.modules:
                annotate_modules(session.stage.denoiser.model)
            session = replace(session, stage=replace(session.stage, annotate=record_function))
        passage = Passage(session, session.batches, draw_run_id(session.ranks), reports=False)
        session.wait_for("all ranks")
        session.timer.start()
        done = 0

        def evaluated(batch: Batch, step: int) -> None:
            nonlocal done
            done += 1
            if recording:
                session.stage.activity.enter("recording")  # a cycle that ends is written, which may take long
                recording.step(done)

        with recording or nullcontext():
            for _ in passage.run(evaluated):  # discards the spans, because recording slows the pass
                pass
        session.timer.synchronize()
        if recording:
            session.stage.activity.enter("sending the trace to the host")
            yield from recorded(recording.files(), rank, session.repeat)


DTYPES = {PipePrecision.fp32: torch.float32, PipePrecision.fp16: torch.float16, PipePrecision.bf16: torch.bfloat16}
WARM_UP = 2  # evaluations: the first allocates and tunes, and the second is like all others


def work(given: Assignment) -> Iterator[events.Message]:
    """Runs every repeat of the job."""
    job, ranks, store, activity, report = given
    settings = CompletedPipeSettings.model_validate(job.settings)
    if settings.performance.cpu_threads:
        torch.set_num_threads(settings.performance.cpu_threads)
    set_float32_matmul(Precision.fp32, None)  # fp32 is computed in full fp32; the other precisions have 16 bits
    if settings.performance.deterministic:
        make_deterministic()
    device = distributed.pick_device(settings.device, ranks, may_share=settings.distributed.backend == "gloo")
    activity.enter("connecting to the other ranks", waits_for=EVERYONE)
    backend = distributed.choose_backend(settings.distributed.backend, ranks, store, device) if store else "gloo"
    distributed.setup_control(ranks, store)
    if ranks.is_rank_zero:
        decided = {} if settings.distributed.backend else {"distributed.backend": backend}
        yield events.EnvironmentCaptured(rank=0, environment=capture_env_metadata(), settings=decided)
    activity.enter("connecting to the neighbouring ranks", waits_for=EVERYONE)
    neighbours = connect(ranks.rank, ranks.world_size, backend, device)
    for repeat in job.repeats:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        yield from run_repeat(settings, job, ranks, repeat, device, neighbours, activity, report)
    activity.enter("leaving")
    distributed.cleanup_ddp()


def make_deterministic() -> None:
    """Applies the settings for bit-identical GPU results, according to PyTorch's notes on randomness."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # What this fills is never read; it costs a kernel for every tensor. (torch's stubs do not know it.)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False


def run_repeat(
    settings: CompletedPipeSettings,
    job: events.Job,
    ranks: Ranks,
    repeat: int,
    device: torch.device,
    neighbours: tuple[Transport | None, Transport | None],
    activity: Activity,
    report: Callable[[events.Message], None],
) -> Iterator[events.Message]:
    """Builds the pipeline, runs the job's samples through it once, and then the baselines and the verification."""
    activity.enter("building the model")
    began = time.perf_counter()
    denoiser = load_part(settings, ranks, device)
    seconds = time.perf_counter() - began
    activity.enter("proving that the split loses nothing")
    sampler, ranges = plan(settings, denoiser, ranks.world_size)
    start, end = ranges[ranks.rank]
    distributed.introduce(
        ranks, device, repeat=repeat, first_evaluation=start, last_evaluation=end - 1, evaluations=sampler.total
    )
    encode_seconds = share_prompts(settings, denoiser, ranks, activity)
    refuse_short(settings.profiling, ranges, len(due(settings, job.samples)))
    activity.enter("hashing the weights")
    weights = denoiser.weights_digest()
    activity.enter("waiting for all ranks to agree", waits_for=EVERYONE)
    agree(facts(settings, ranges, sampler, denoiser, weights), ranks)
    yield events.PipelineBuilt(
        rank=ranks.rank,
        repeat=repeat,
        model=denoiser.name,
        parameters=denoiser.parameters,
        weights=weights,
        scheduler=sampler.name,
        timesteps=[float(timestep) for timestep in sampler.timesteps],
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        ranges=ranges,
        latent_shape=list(denoiser.latent_shape),
        carried=list(sampler.carried),
        seconds=seconds,
        encode_seconds=encode_seconds,
    )
    now, records = calendar(job), repeat == job.profiled
    stage = Stage(
        rank=ranks.rank,
        denoiser=denoiser,
        sampler=sampler,
        start=start,
        end=end,
        decodes=settings.output.images and end == sampler.total,
        activity=activity,
        deadline=settings.pipeline.deadline,
        send_heartbeat=lambda: report(activity.heartbeat(ranks.rank)),
        fault=parse_fault(settings.inject, ranks.world_size, settings.work.samples) if settings.inject else None,
    )
    session = Session(
        settings=settings,
        ranks=ranks,
        repeat=repeat,
        stage=stage,
        ranges=ranges,
        batches=due(settings, job.samples),
        every_batch=due(settings, None),
        requests=Requests.of(settings),
        before=neighbours[0],
        after=neighbours[1],
        report=report,
        now=now,
        timer=(RecordedSpans if records else SpanTimer)(clock_of(device), now, repeat, ranks.rank),
    )
    session = warm_up(session)
    yield from record(session) if records else passes(session)


def load_part(settings: CompletedPipeSettings, ranks: Ranks, device: torch.device) -> Denoiser:
    """Loads the denoiser, and the other components that this rank needs."""
    finishes = ranks.rank == ranks.world_size - 1 or settings.measurement.baseline == "replicas"
    dtype = DTYPES[settings.precision]
    return load(settings, device, dtype, first=ranks.is_rank_zero, last=finishes, images=settings.output.images)


def plan(settings: CompletedPipeSettings, denoiser: Denoiser, world_size: int) -> tuple[Sampler, list[tuple[int, int]]]:
    """Returns the sampler and each rank's evaluations [start, end), after the proof that hand-offs lose nothing."""
    sampling = settings.sampling
    more = denoiser.set_timesteps_kwargs(sampling.steps)
    sampler = build(denoiser.scheduler(), sampling.steps, denoiser.device, eta=sampling.eta, **more)
    ranges = assign(sampler.total, world_size, settings.pipeline.split)
    prove(sampler, ranges, settings.work.micro_batch, denoiser.dtype)
    return sampler, ranges


def share_prompts(
    settings: CompletedPipeSettings, denoiser: Denoiser, ranks: Ranks, activity: Activity
) -> float | None:
    """Encodes the prompts on rank 0, for all ranks. Returns the seconds that this took; None without prompts."""
    began = time.perf_counter()
    encoded = None
    if ranks.is_rank_zero:
        prompts = read_prompts(settings.work.prompts) or [""]
        encoded = denoiser.encode(
            prompts, lambda index: activity.enter(f"encoding prompt {index + 1} of {len(prompts)}")
        )
    activity.enter("waiting for rank 0 to encode the prompts", waits_for=EVERYONE if ranks.is_rank_zero else 0)
    conditioning = broadcast_conditioning(encoded, ranks)
    denoiser.set_conditioning(conditioning)
    return time.perf_counter() - began if ranks.is_rank_zero and conditioning else None


def passes(session: Session) -> Iterator[events.Message]:
    """Runs the timed pass, then the baselines and the verification."""
    stage = session.stage
    passage = Passage(session, session.batches, draw_run_id(session.ranks), reports=True)
    # for a GPU, telemetry records the clocks
    measures = session.ranks.is_rank_zero and stage.denoiser.device.type != "cuda"
    session.wait_for("all ranks")  # otherwise the warm-up of other ranks would slow down the reference workload
    before = time_reference_workload() if measures else 0.0
    session.wait_for("all ranks")
    started = session.timer.start()
    yield from passage.run()
    ended = session.timer.synchronize()
    yield events.SpansMeasured(rank=stage.rank, spans=session.timer.collect())
    yield events.StageDone(
        rank=stage.rank,
        repeat=session.repeat,
        started=started,
        ended=ended,
        sent=passage.sent,
        received=passage.received,
        **peaks(stage.denoiser.device),
    )
    session.wait_for("all ranks")
    if measures:
        yield events.ReferenceWorkloadTimed(
            rank=0, repeat=session.repeat, seconds=(before + time_reference_workload()) / 2
        )
    yield from measure(session)
    if session.settings.verify:
        yield from verify(session, passage.latents)


def warm_up(session: Session) -> Session:
    """Runs a few evaluations, and a decoding where this rank decodes, whose results are discarded.

    Returns the session with the time of an evaluation, which determines the time limit of an evaluation.
    """
    stage, evaluations, took = session.stage, min(WARM_UP, session.stage.sampler.total), 0.0
    batch = session.prepare(session.every_batch[0])
    for number in range(evaluations):
        stage.activity.enter(f"evaluation {number + 1} of {evaluations} of the warm-up")
        began = session.timer.synchronize()
        output = stage.denoiser.predict(batch, stage.sampler)
        check_output(stage, output, batch.latents)
        stage.sampler.step(batch, output)
        took = session.timer.synchronize() - began
    if stage.decodes:
        stage.activity.enter("decoding in the warm-up")
        stage.denoiser.decode(batch)
    return replace(session, stage=replace(stage, evaluation=took))


def check_output(stage: Stage, output: Tensor, latents: Tensor) -> None:
    """Raises SettingsError if the scheduler expects another number of channels than the model predicts."""
    wanted = latents.shape[1] * (2 if stage.sampler.learns_variance else 1)
    if output.shape[1] != wanted:
        raise SettingsError(
            f"{stage.sampler.name} with these options takes {wanted} channels, and {stage.denoiser.name} predicts "
            f"{output.shape[1]}",
            "choose another --scheduler, or its variance_type in --sampling.options",
        )


def due(settings: CompletedPipeSettings, samples: list[int] | None) -> list[list[int]]:
    """The micro-batches with a missing sample. They stay whole: a sample's bits depend on its micro-batch."""
    size, total = settings.work.micro_batch, settings.work.samples
    every = [list(range(first, min(first + size, total))) for first in range(0, total, size)]
    return [batch for batch in every if samples is None or any(sample in samples for sample in batch)]


def facts(
    settings: CompletedPipeSettings, ranges: list[tuple[int, int]], sampler: Sampler, denoiser: Denoiser, weights: str
) -> dict[str, str | int | float | list[str] | list[int] | list[float]]:
    """What must be equal on all ranks before the first evaluation."""
    import diffusers

    return {
        "gpubench": gpubench.__version__,
        "torch": str(torch.__version__),
        "diffusers": diffusers.__version__,
        "world size": len(ranges),
        "ranges": [border for pair in ranges for border in pair],
        "timesteps": [float(timestep) for timestep in sampler.timesteps],
        "scheduler": sampler.fingerprint,
        "model": denoiser.name,
        "weights": weights,
        "latent shape": list(denoiser.latent_shape),
        "precision": str(denoiser.dtype),
        "seed": settings.seed,
        "seeds": settings.work.seed_list,
        "samples": settings.work.samples,
        "micro-batch": settings.work.micro_batch,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(denoiser.device) if denoiser.device.type == "cuda" else "cpu",
    }
