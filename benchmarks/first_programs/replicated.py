"""A program with DistributedDataParallel over NCCL, whose ranks time themselves and do not call `set_device`.

    torchrun --nproc-per-node 2 replicated.py FOLDER

Each rank writes FOLDER/RANK.json.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed
from own_time import OwnTime
from timed_step import by_operators
from torch import nn


def main() -> None:
    options = parse()
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    layers = [part for _ in range(options.layers) for part in (nn.Linear(options.width, options.width), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(options.width, options.width, device=device)
    own = OwnTime(device)
    step = by_operators(model, optimizer, batch, own)
    for _ in range(options.steps):
        own.begin()
        step()
    own.write(options.folder / f"{rank}.json", updates=options.steps)
    torch.distributed.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048, help="of the layers, and of the batch of a rank")
    parser.add_argument("--steps", type=int, default=300)
    return parser.parse_args()


if __name__ == "__main__":
    main()
