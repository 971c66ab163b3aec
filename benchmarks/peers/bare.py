"""The reference: a training loop as anybody would write it, and nothing else."""

from itertools import cycle, islice

import torch
from subject import Subject, build, start_stopwatch

subject = Subject.from_environment()
work = build(subject)
start_stopwatch(subject)
for batch in islice(cycle(work.batches), subject.total):
    work.loss(work.module, batch).backward()
    work.optimizer.step()
    work.optimizer.zero_grad(set_to_none=True)
if subject.device == "cuda":
    torch.cuda.synchronize()
