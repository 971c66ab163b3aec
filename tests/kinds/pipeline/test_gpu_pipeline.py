"""What of a pipeline can only be seen on a GPU: that ranks may share it, and that nothing waits for it."""

import functools
from pathlib import Path

import pytest
import torch
from cases_made import completed_pipeline
from running import Finished, gpubench
from waiting import nothing_waits

from gpubench.kinds.pipeline.settings import CompletedPipeSettings
from gpubench.kinds.pipeline.worker.models import load
from gpubench.kinds.pipeline.worker.sampler import build
from gpubench.kinds.pipeline.worker.stage import Finiteness, SpanTimer
from gpubench.worker.timing import CudaClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.simulated,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TINY = ("--device=cuda", "--unet=tiny", "--steps=8", "--samples=3", "--repeats=1", "--verify", "-q")
DEVICE = torch.device("cuda", 0)


def settings(**given: str) -> CompletedPipeSettings:
    known = {"model.unet": "tiny", "sampling.steps": "8", "sampling.guidance_scale": "7.5", "precision": "fp32"}
    return completed_pipeline(known | given)


def identical(done: Finished) -> None:
    assert done.code == 0, done.stderr
    verified = done.document("summary.json")["pipeline"]["verification"]
    assert verified["identical"] == verified["samples"] == 3


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "scheduler", ["PNDMScheduler", "DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler"]
)
def test_two_ranks_on_one_gpu_make_what_diffusers_makes(tmp_path: Path, scheduler: str, precision: str) -> None:
    options = ("--world-size=2", f"--scheduler={scheduler}", f"--precision={precision}")
    done = gpubench("pipe-infer", *TINY, *options, results=tmp_path)
    identical(done)
    assert done.document("environment.json")["gpus"]


def test_four_ranks_may_share_a_gpu_with_much_in_flight(tmp_path: Path) -> None:
    identical(gpubench("pipe-infer", *TINY, "--world-size=4", "--in-flight=4", results=tmp_path))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one")
def test_handoffs_go_over_nccl_from_gpu_to_gpu(tmp_path: Path) -> None:
    done = gpubench("pipe-infer", *TINY, "--world-size=2", results=tmp_path)
    identical(done)
    assert "backend: nccl" in (done.run / "config.yaml").read_text()


def test_the_dummy_takes_its_latency_on_the_gpu() -> None:
    dummy = load(settings(**{"model.unet": "dummy", "model.step_ms": "5"}), DEVICE, torch.float32, **EVERYTHING)
    sampler = build(dummy.scheduler(), 8, DEVICE)
    batch = dummy.prepare(sampler, [0], [0])
    sampler.step(batch, dummy.predict(batch, sampler))  # the first use of a kernel loads it
    torch.cuda.synchronize()
    batch = dummy.prepare(sampler, [0], [0])
    timer = SpanTimer(CudaClock(DEVICE), functools.partial(float, 0), 0, 0)
    timer.start()
    for step in range(8):
        timer.begin()
        sampler.step(batch, dummy.predict(batch, sampler))
        timer.worked("evaluate", 0, step)
    timer.synchronize()
    spans = timer.collect()
    assert [span.step for span in spans] == list(range(8))
    wrong = {span.step: span.total for span in spans if not 0.004 < span.total < 0.02}
    assert not wrong  # of the device's own clock, which the dummy counts by


def test_an_evaluation_and_its_check_wait_for_nothing() -> None:
    tiny = load(settings(), DEVICE, torch.float32, **EVERYTHING)
    tiny.set_conditioning(tiny.encode([""]))
    sampler = build(tiny.scheduler(), 8, DEVICE)
    batch = tiny.prepare(sampler, [0], [0])
    finiteness = Finiteness(0)
    sampler.step(batch, tiny.predict(batch, sampler))
    finiteness.note(batch, 0)
    with nothing_waits():
        output = tiny.predict(batch, sampler)
        finiteness.note(batch, 1)
    sampler.step(batch, output)
    finiteness.check(batch)


EVERYTHING = {"first": True, "last": True, "images": False}
