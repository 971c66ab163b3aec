"""accelerate's `estimate-memory`, for a model that is at hand instead of on the Hub.

"Training using Adam" is the largest of its figures: four times the weights in float32, twice in mixed precision. No
batch is asked for: activations are not in it. The model is made on the meta device, where weights that are shared stay
so: under its own init_empty_weights, GPT-2's embedding would count twice.
"""

import torch
from accelerate.commands.estimate import estimate_training_usage  # type: ignore[import-not-found]
from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-not-found]
from memory_subject import Subject, answer

subject = Subject.given()
with torch.device("meta"):
    module = subject.build().module
weights, _ = calculate_maximum_sizes(module)
usage = estimate_training_usage(weights, {"fp32": "float32", "bf16": "bfloat16"}[subject.precision])
answer(max(usage.values()), parameters=usage["model"], gradients=usage["gradients"], optimizer=usage["optimizer"])
