"""A training program with ranks on several machines: DistributedDataParallel on CPUs, until somebody ends it.

    torchrun ... distributed_program.py [RANK STEP END]

The rank RANK ends itself after STEP steps: END is "raise" or the number of a signal.
"""

import os
import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
who, last, end = (int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]) if len(sys.argv) > 1 else (-1, 0, "")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while True:
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if rank == who and step == last:
        if end == "raise":
            raise RuntimeError("this rank has had enough")
        os.kill(os.getpid(), int(end))
