"""vram-check: activations are twice the weights for each sample; a precision is that of the weights."""

from memory_subject import Subject, answer
from vram_check import analyze  # type: ignore[import-not-found]

subject = Subject.given()
found = analyze(
    subject.build().module,
    batch_size=subject.batch_size,
    dtype=subject.precision,
    optimizer="adamw",
    seq_len=subject.sequence_length or 128,
)["estimate"]
answer(
    found.total_bytes,
    parameters=found.parameters_bytes,
    gradients=found.gradients_bytes,
    optimizer=found.optimizer_bytes,
    activations=found.activations_bytes,
)
