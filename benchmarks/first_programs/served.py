"""A program that answers requests one after the other, and times the calls of its model: `python served.py OUTPUT`."""

import argparse
from pathlib import Path

import torch
from own_time import OwnTime
from torch import nn


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    device = torch.device(options.device)
    layers = [part for _ in range(options.layers) for part in (nn.Linear(options.width, options.width), nn.ReLU())]
    model = nn.Sequential(*layers).to(device).eval()
    requests = torch.randn(options.width, options.width)
    own = OwnTime(device)
    with torch.inference_mode():
        while own.goes_on(options.seconds, options.steps):
            request = requests.to(device)
            own.begin()
            answer = model(request)
            own.end("forward")
            answer[0, 0].item()
    own.write(options.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048, help="of the layers, and of the batch")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=10_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
