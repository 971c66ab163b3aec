"""torch-preflight's VRAMGuard, which is given the model itself: what autograd keeps of one sample on the meta device,
or nothing where that cannot be run, as it says in a note; then a share for the allocator and 135 MiB of context.
"""

import warnings

from memory_subject import Subject, answer
from torch_preflight import VRAMGuard  # type: ignore[import-not-found]

subject = Subject.given()
workload = subject.build()
guard = VRAMGuard(
    workload.module,
    optimizer=subject.optimizer(workload),
    max_vram=f"{subject.capacity / 2**30:.1f}GiB",
    batch_size=subject.batch_size,
    seq_len=subject.sequence_length,
    image_size=subject.image_size,
    precision={"fp32": "fp32", "bf16": "amp"}[subject.precision],
    verify=False,
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with guard:
        found = guard.report.breakdown
answer(
    found.total,
    parameters=found.weights,
    gradients=found.gradients,
    optimizer=found.optimizer_state,
    activations=found.activations if guard.activation_source != "unknown" else None,
    rest=found.master_weights + found.autocast_cache + found.cuda_context + found.fragmentation,
)
