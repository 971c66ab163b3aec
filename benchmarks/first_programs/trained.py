"""A program that trains on the device that it is told, without `set_device`, and times itself.

    python trained.py OUTPUT [--device cuda:1] [--by eager|graph|graphed|compiled] [--seconds 2]

`--by` says how a step is issued: by operators, as one CUDA graph of the whole step by the recipe of PyTorch's
documentation, by `torch.cuda.make_graphed_callables`, or by `torch.compile` in the mode "reduce-overhead".
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from own_time import OwnTime
from timed_step import by_operators
from torch import nn

WARMUP = 3  # steps on another stream before a capture, as the documentation of CUDA graphs has it


def main() -> None:
    options = parse()
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    device = torch.device(options.device)
    layers = [part for _ in range(options.layers) for part in (nn.Linear(options.width, options.width), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(options.width, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(options.width, options.width, device=device)
    own = OwnTime(device)
    if options.by == "graph":
        step = whole_step(model, optimizer, batch, own)
    else:
        if options.by == "graphed":
            torch.cuda.make_graphed_callables(model, (batch,))  # which replaces its forward pass
        elif options.by == "compiled":
            model = torch.compile(model, mode="reduce-overhead")  # type: ignore[assignment]
        step = by_operators(model, optimizer, batch, own)
    while own.goes_on(options.seconds, options.steps):
        own.begin()
        step()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] if options.by == "compiled" else None
    warmup = WARMUP if options.by == "graph" else 0
    facts = {"samples": len(batch), "compiled": compiled, "peak": torch.cuda.max_memory_allocated(device)}
    own.write(options.output, updates=own.steps + warmup, **facts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--by", choices=("eager", "graph", "graphed", "compiled"), default="eager")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048, help="of the layers, and of the batch")
    parser.add_argument("--seconds", type=float, default=2.0, help="to issue steps for")
    parser.add_argument("--steps", type=int, default=10_000, help="at most so many")
    parser.add_argument("--tf32", action="store_true")
    return parser.parse_args()


def whole_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, own: OwnTime
) -> Callable[[], None]:
    """The recipe of whole-network capture in https://docs.pytorch.org/docs/stable/notes/cuda.html."""
    held = batch.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            optimizer.zero_grad(set_to_none=True)
            model(held).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(held).square().mean().backward()
        optimizer.step()

    def step() -> None:
        held.copy_(batch)
        graph.replay()
        own.end("replay")

    return step


if __name__ == "__main__":
    main()
