"""What a worker of `gpubench pipe-infer` does: agrees with the others, passes samples through, and checks them."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

import gpubench
from gpubench import distributed, events
from gpubench.assignment import Assignment
from gpubench.calendar import calendar
from gpubench.channel import EVERYONE, Activity
from gpubench.diffusion import faults
from gpubench.diffusion.prompts import read_prompts
from gpubench.diffusion.settings import Arithmetic, PipeSettings
from gpubench.diffusion.split import assign, refuse_short
from gpubench.environment import capture_env_metadata
from gpubench.errors import SettingsError
from gpubench.peaks import peaks
from gpubench.pipeline import baselines
from gpubench.pipeline.denoiser import Denoiser, load
from gpubench.pipeline.edges import Edge, open_edges
from gpubench.pipeline.handshake import agree, broadcast_conditioning, draw_run_id
from gpubench.pipeline.proof import prove
from gpubench.pipeline.recording import RecordedSpans, record
from gpubench.pipeline.schedulers import Sampler, build
from gpubench.pipeline.session import Passage, Session
from gpubench.pipeline.spans import SpanTimer
from gpubench.pipeline.stage import Stage
from gpubench.pipeline.verification import verify
from gpubench.precision import set_float32_matmul
from gpubench.ranks import Ranks
from gpubench.settings import Device, Precision
from gpubench.timing import clock_of
from gpubench.yardstick import time_yardstick

DTYPES = {Arithmetic.fp32: torch.float32, Arithmetic.fp16: torch.float16, Arithmetic.bf16: torch.bfloat16}
WARM_UP = 2  # evaluations: the first allocates and tunes, the second is like all others


def work(given: Assignment) -> Iterator[events.Message]:
    """Every repeat of the job, as events."""
    job, ranks, store, activity, tell = given
    settings = PipeSettings.model_validate(job.settings)
    if settings.performance.cpu_threads:
        torch.set_num_threads(settings.performance.cpu_threads)
    set_float32_matmul(Precision.fp32, None)  # what is asked for in fp32 is computed in it; the rest is half
    if settings.performance.deterministic:
        make_deterministic()
    device = pick_device(settings, ranks)
    distributed.setup_control(ranks, store)
    if ranks.is_rank_zero:
        yield events.EnvironmentCaptured(rank=0, environment=capture_env_metadata())
    activity.enter("opening the links to its neighbours")
    assert settings.distributed.backend
    edges = open_edges(ranks.rank, ranks.world_size, settings.distributed.backend, device)
    for repeat in job.repeats:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        yield from run_repeat(settings, job, ranks, repeat, device, edges, activity, tell)
    activity.enter("leaving")
    distributed.cleanup_ddp()


def make_deterministic() -> None:
    """Settings under which a GPU repeats itself bit by bit, as pytorch.org's notes on randomness have them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # What this fills is never read; it costs a kernel for every tensor. (torch's stubs do not know it.)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False


def pick_device(settings: PipeSettings, ranks: Ranks) -> torch.device:
    """Over gloo, ranks may share a GPU. Raises DeviceError where there is none."""
    assert settings.device
    if settings.device is Device.cpu or settings.distributed.backend == "nccl":
        return distributed.pick_device(settings.device, ranks)
    distributed.refuse_without_gpu()
    device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def run_repeat(
    settings: PipeSettings,
    job: events.Job,
    ranks: Ranks,
    repeat: int,
    device: torch.device,
    edges: tuple[Edge | None, Edge | None],
    activity: Activity,
    tell: Callable[[events.Message], None],
) -> Iterator[events.Message]:
    """Builds everything anew and takes the job's samples through once; then what they are compared with."""
    activity.enter("building the model")
    began = time.perf_counter()
    denoiser = load_part(settings, ranks, device)
    seconds = time.perf_counter() - began
    activity.enter("trying the hand-over")
    sampler, ranges = plan(settings, denoiser, ranks.world_size)
    start, end = ranges[ranks.rank]
    distributed.introduce(
        ranks, device, repeat=repeat, first_evaluation=start, last_evaluation=end - 1, evaluations=sampler.total
    )
    encode_seconds = share_prompts(settings, denoiser, ranks, activity)
    refuse_short(settings.profiling, ranges, len(due(settings, job.samples)))
    activity.enter("digesting the weights")
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
        beat=lambda: tell(activity.heartbeat(ranks.rank)),
        fault=faults.parse(settings.inject, ranks.world_size, settings.work.total) if settings.inject else None,
    )
    session = Session(
        settings=settings,
        ranks=ranks,
        repeat=repeat,
        stage=stage,
        ranges=ranges,
        batches=due(settings, job.samples),
        every_batch=due(settings, None),
        prompts=read_prompts(settings.work.prompts),
        before=edges[0],
        after=edges[1],
        tell=tell,
        now=now,
        timer=(RecordedSpans if records else SpanTimer)(clock_of(device), now, repeat, ranks.rank),
    )
    session = warm_up(session)
    yield from record(session) if records else passes(session)


def load_part(settings: PipeSettings, ranks: Ranks, device: torch.device) -> Denoiser:
    """The denoiser, and of what surrounds it what this rank has a use for."""
    assert settings.precision
    finishes = ranks.rank == ranks.world_size - 1 or settings.measurement.baseline == "replicas"
    dtype = DTYPES[settings.precision]
    return load(settings, device, dtype, first=ranks.is_rank_zero, last=finishes, images=settings.output.images)


def plan(settings: PipeSettings, denoiser: Denoiser, world_size: int) -> tuple[Sampler, list[tuple[int, int]]]:
    """The schedule and each rank's evaluations, after a proof that hand-overs lose nothing."""
    sampling = settings.sampling
    assert sampling.steps
    more = denoiser.set_timesteps_kwargs(sampling.steps)
    sampler = build(denoiser.scheduler(), sampling.steps, denoiser.device, eta=sampling.eta, **more)
    ranges = assign(sampler.total, world_size, settings.pipeline.split)
    prove(sampler, ranges, settings.work.micro_batch, denoiser.dtype)
    return sampler, ranges


def share_prompts(settings: PipeSettings, denoiser: Denoiser, ranks: Ranks, activity: Activity) -> float | None:
    """Encodes the prompts on rank 0, for all ranks. Returns the seconds it took there; None where there are none."""
    began = time.perf_counter()
    encoded = None
    if ranks.is_rank_zero:
        prompts = read_prompts(settings.work.prompts) or [""]
        encoded = denoiser.encode(
            prompts, lambda index: activity.enter(f"encoding prompt {index + 1} of {len(prompts)}")
        )
    activity.enter("waiting for rank 0 to encode the prompts", waits_for=EVERYONE if ranks.is_rank_zero else 0)
    conditioning = broadcast_conditioning(encoded, ranks)
    denoiser.admit(conditioning)
    return time.perf_counter() - began if ranks.is_rank_zero and conditioning else None


def passes(session: Session) -> Iterator[events.Message]:
    """The timed pass, then the baselines and the references."""
    stage = session.stage
    passage = Passage(session, session.batches, draw_run_id(session.ranks), announce=True)
    measures = session.ranks.is_rank_zero and stage.denoiser.device.type != "cuda"  # a GPU's clocks are on record
    session.wait_for("all ranks")  # or the yardstick would have the others' warm-up beside it
    before = time_yardstick() if measures else 0.0
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
        yield events.YardstickRead(rank=0, repeat=session.repeat, seconds=(before + time_yardstick()) / 2)
    yield from baselines.measure(session)
    if session.settings.verify:
        yield from verify(session, passage.latents)


def warm_up(session: Session) -> Session:
    """Runs a few evaluations, and a decoding where this rank decodes, whose results are discarded.

    Returns the session with the seconds that an evaluation takes here, which tell a slow evaluation from a hang.
    """
    stage, evaluations, took = session.stage, min(WARM_UP, session.stage.sampler.total), 0.0
    batch = session.prepare(session.batches[0])
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
    """Raises SettingsError where the scheduler expects another number of channels than the model predicts."""
    wanted = latents.shape[1] * (2 if stage.sampler.learns_variance else 1)
    if output.shape[1] != wanted:
        raise SettingsError(
            f"{stage.sampler.name} so configured takes {wanted} channels, and {stage.denoiser.name} predicts "
            f"{output.shape[1]}",
            "choose another --scheduler, or its variance_type in --sampling.options",
        )


def due(settings: PipeSettings, samples: list[int] | None) -> list[list[int]]:
    """Micro-batches with a sample that is still to be made. They stay whole: a sample's bits depend on the others."""
    size, total = settings.work.micro_batch, settings.work.total
    every = [list(range(first, min(first + size, total))) for first in range(0, total, size)]
    return [batch for batch in every if samples is None or any(sample in samples for sample in batch)]


def facts(
    settings: PipeSettings, ranges: list[tuple[int, int]], sampler: Sampler, denoiser: Denoiser, weights: str
) -> dict[str, str | int | float | list[str] | list[int] | list[float]]:
    """What all ranks have to have in common before the first evaluation."""
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
        "samples": settings.work.total,
        "micro-batch": settings.work.micro_batch,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(denoiser.device) if denoiser.device.type == "cuda" else "cpu",
    }
