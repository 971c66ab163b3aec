"""MemTracker, which comes with torch, as documented: two steps on fake CPU tensors, and nothing of CUDA."""

import torch
from memory_subject import Subject, answer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from gpubench.worker.dataloader import tensors

CPU = torch.device("cpu")

subject = Subject.given()
with FakeTensorMode(allow_non_fake_inputs=True):
    workload = subject.build()
    optimizer = subject.optimizer(workload)
    assert workload.make_batch is not None
    batch = workload.make_batch(subject.batch_size)
    tracker = MemTracker()
    tracker.track_external(workload.module, optimizer, *tensors(batch))
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            with torch.autocast("cpu", torch.bfloat16, enabled=subject.precision == "bf16"):
                loss = workload.loss(workload.module, batch)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
found = {getattr(kind, "value", kind): size for kind, size in tracker.get_tracker_snapshot("peak")[CPU].items()}
answer(
    found["Total"],
    parameters=found["Parameter"],
    gradients=found["Gradient"],
    optimizer=found["Optstate"],
    activations=found["Activation"],
    rest=found["Buffer"] + found["Temp"] + found["Other"],
)
