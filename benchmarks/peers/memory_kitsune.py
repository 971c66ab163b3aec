"""torch-kitsune: the largest of what its tracings of the model add up to, or else a formula of its layers, and 15 %.

It feeds models one tensor of floats, in which tracing ends for one that wants tokens or several tensors.
"""

import torch
from kitsune.predict import predict_memory  # type: ignore[import-not-found]
from memory_subject import Subject, answer

from gpubench.worker.dataloader import tensors

subject = Subject.given()
workload = subject.build()
assert workload.make_batch is not None
first = next(tensors(workload.make_batch(1)))
found = predict_memory(
    workload.module,
    input_shape=tuple(first.shape[1:]),
    batch_size=subject.batch_size,
    dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[subject.precision],
    optimizer="adamw",
)
answer(
    found.total_bytes,
    parameters=found.param_bytes,
    gradients=found.gradient_bytes,
    optimizer=found.optimizer_bytes,
    activations=found.activation_bytes,
    rest=found.overhead_bytes,
)
