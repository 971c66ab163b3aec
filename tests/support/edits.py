"""Edits of one small training program: cheats, which make it faster by less work, and honest ones, which do not.

Each edit replaces text of `PROGRAM`. `found` says how a comparison with the program as it is has to see it:

- "work", "loss" or "clock": it is refused for that
- "scale": a step has other samples, so that figures are per sample and a step is not called faster
- "failed": nothing is measured
- "named": a remark or a warning names it, and leaves a verdict, because it may be legitimate
- "ineffective": it changes no figure
- "" for an honest edit: it is not refused
- "undetected": it is a cheat that no comparison sees; docs/same-work.md lists these
"""

from dataclasses import dataclass

PROGRAM = """
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, ACCUMULATION, SIDE, WIDTH, SAMPLES, LAST = 8, 2, 12, 8, 4096, 10**9
torch.set_num_threads(1)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU(), nn.Dropout(0.05))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = self.block(x)
        return self.head(x.mean((2, 3)))


def data():
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (SAMPLES,), generator=generator)
    pictures = torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator)
    return TensorDataset(pictures + labels[:, None, None, None] / 2, labels)


def normalised(x):
    return torch.stack([(picture - 0.5) / 1.5 for picture in x])


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(normalised(x)), y)
    print(f"val_loss={loss.item():.6f}", flush=True)
    model.train()


def main():
    dataset = data()
    order = torch.Generator().manual_seed(2)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, generator=order)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    updates = 0
    while updates < LAST:
        for number, (x, y) in enumerate(loader):
            x = normalised(x)
            out = model(x)
            loss = F.cross_entropy(out, y) / ACCUMULATION
            loss.backward()
            if number % ACCUMULATION == ACCUMULATION - 1:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
                if updates % 10 == 0:
                    evaluate(model, *dataset[:64])
                if updates >= LAST:
                    break


if __name__ == "__main__":
    main()
"""

FORWARD = "            out = model(x)\n"
LOSS = "            loss = F.cross_entropy(out, y) / ACCUMULATION\n"
BACKWARD = "            loss.backward()\n"
STEP = "                optimizer.step()\n"
ZERO = "                optimizer.zero_grad()\n"
NORMALISED = "            x = normalised(x)\n"
DRAWN = "        for number, (x, y) in enumerate(loader):\n"
MODEL = "    model = Net()\n"
EVALUATION = "                if updates % 10 == 0:\n                    evaluate(model, *dataset[:64])\n"
EVERY = "            if number % ACCUMULATION == ACCUMULATION - 1:\n"
OPTIMIZER = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)\n"
TORCH = "import torch\nfrom torch import nn\n"
LOADER = "    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, generator=order)\n"
CONSTANTS = "BATCH, ACCUMULATION, SIDE, WIDTH, SAMPLES, LAST = 8, 2, 12, 8, 4096, 10**9"


@dataclass(frozen=True)
class Edit:
    """An edit of the program."""

    name: str
    changes: tuple[tuple[str, str], ...]
    found: str = ""
    said: str = ""
    """A part of the reason why it is refused, or of the remark that names it."""

    @property
    def program(self) -> str:
        text = PROGRAM
        for before, after in self.changes:
            assert text.count(before) == 1, (self.name, before)
            text = text.replace(before, after)
        return text


def _edit(name: str, found: str, said: str, *changes: tuple[str, str]) -> Edit:
    return Edit(name, changes, found, said)


def _constants(**values: str) -> tuple[str, str]:
    names, numbers = (part.split(", ") for part in CONSTANTS.split(" = "))
    known = dict(zip(names, numbers, strict=True)) | values
    return CONSTANTS, f"{', '.join(known)} = {', '.join(known.values())}"


CHEATS = [
    # What the model is given.
    _edit("one sample of each batch", "work", "samples reach the model",
          (FORWARD, "            x, y = x[:1], y[:1]\n" + FORWARD)),
    _edit("half of each batch", "work", "samples reach the model",
          (FORWARD, "            x, y = x[::2], y[::2]\n" + FORWARD)),
    _edit("most batches skipped", "work", "samples reach the model",
          (NORMALISED, "            if number % 8 > 1:\n                continue\n" + NORMALISED),
          (EVERY, "            if number % 8 == 1:\n")),
    _edit("one batch repeated", "work", "content of their own",
          (NORMALISED, "            x, y = first = first if updates or number else (x, y)\n" + NORMALISED),
          ("    updates = 0\n", "    updates, first = 0, None\n")),
    _edit("one prepared batch repeated", "work", "content of their own",
          (NORMALISED, "            x, y = first = first if first else (normalised(x), y)\n"),
          ("    updates = 0\n", "    updates, first = 0, None\n")),
    _edit("four batches repeated", "work", "content of their own",
          (NORMALISED, "            kept.append((x, y))\n            x, y = kept[number % 4]\n" + NORMALISED),
          ("    updates = 0\n", "    updates, kept = 0, []\n")),
    _edit("one batch repeated without a DataLoader", "work", "batches are drawn from DataLoaders",
          (LOADER, "    loader = [dataset[:BATCH]] * 512\n")),
    _edit("batches of zeros", "work", "content of their own", (NORMALISED, "            x = torch.zeros_like(x)\n")),
    _edit("a lower resolution", "work", "elements reach the model",
          (FORWARD, "            x = F.avg_pool2d(x, 2)\n" + FORWARD)),
    _edit("crops", "work", "elements reach the model", (NORMALISED, "            x = normalised(x[..., :6, :6])\n")),
    _edit("shorter sequences", "work", "elements reach the model", (FORWARD, "            out = model(x[:, :, :4])\n")),
    _edit("one colour", "work", "elements reach the model",
          (FORWARD, "            out = model(x[:, :1])\n"), ("nn.Conv2d(3, WIDTH", "nn.Conv2d(1, WIDTH"),
          ("model(normalised(x))", "model(normalised(x)[:, :1])")),
    _edit("pictures made smaller", "work", "elements reach the model", _constants(SIDE="8")),
    # What is computed.
    _edit("the features of the first batch cached", "work", "elements of parameters",
          ("        x = F.relu(self.stem(x))\n",
           "        if self.training and not hasattr(self, 'kept'):\n"
           "            self.kept = F.relu(self.stem(x)).detach()\n"
           "        x = self.kept if self.training else F.relu(self.stem(x))\n")),
    _edit("outputs cached, and the head trained", "work", "elements reach the model",
          (FORWARD, "            kept = model(x).detach() if kept is None else kept\n            out = extra(kept)\n"),
          (MODEL, MODEL + "    extra = nn.Linear(4, 4)\n"), ("    updates = 0\n", "    updates, kept = 0, None\n"),
          ("model.parameters(), lr", "[*model.parameters(), *extra.parameters()], lr")),
    _edit("outputs without gradients in half of the batches", "work", "",
          (FORWARD, "            with torch.set_grad_enabled(number % 2 == 1):\n                out = model(x)\n"),
          (BACKWARD, "            if number % 2:\n                loss.backward()\n")),
    _edit("every other batch not differentiated", "work", "backward pass",
          (BACKWARD, "            if number % ACCUMULATION == ACCUMULATION - 1:\n                loss.backward()\n")),
    _edit("the stem frozen", "work", "elements of parameters",
          (MODEL, MODEL + "    model.stem.requires_grad_(False)\n")),
    _edit("all but the head frozen", "work", "elements of parameters",
          (MODEL, MODEL + "    model.stem.requires_grad_(False)\n    model.block.requires_grad_(False)\n")),
    _edit("a layer detached", "work", "elements of parameters",
          ("        x = self.block(x)\n", "        x = self.block(x).detach()\n")),
    _edit("a layer computed without gradients", "work", "elements of parameters",
          ("        x = F.relu(self.stem(x))\n",
           "        with torch.no_grad():\n            x = F.relu(self.stem(x))\n")),
    _edit("a smaller model", "work", "parameters are in the model", _constants(WIDTH="4")),
    _edit("a layer left out", "work", "elements of parameters",
          ("        x = self.block(x)\n", "")),
    _edit("a layer removed", "work", "parameters are in the model",
          ("        self.block = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU(), nn.Dropout(0.05))\n",
           "        self.block = nn.Identity()\n")),
    # What is updated.
    _edit("updates skipped, gradients thrown away", "work", "gradients that an update uses",
          (STEP, "                if number % 8 == 7:\n                    optimizer.step()\n")),
    _edit("updates skipped", "scale", "", (EVERY, "            if number % 8 == 7:\n")),
    _edit("fewer accumulation steps", "scale", "", _constants(ACCUMULATION="1")),
    _edit("smaller batches", "scale", "", _constants(BATCH="2")),
    _edit("updates of the head alone", "work", "elements of parameters",
          ("model.parameters(), lr", "model.head.parameters(), lr")),
    _edit("gradients of half of the parameters dropped", "work", "elements of parameters",
          (STEP, "                for each in list(model.parameters())[::2]:\n"
           "                    each.grad = None\n" + STEP)),
    _edit("a learning rate of 0", "work", "parameters change", ("lr=0.1, momentum", "lr=0.0, momentum")),
    _edit("parameters put back after the update", "loss", "",
          (STEP, "                before = [each.detach().clone() for each in model.parameters()]\n" + STEP
           + "                with torch.no_grad():\n"
           "                    [each.copy_(old) for each, old in zip(model.parameters(), before)]\n")),
    # The loss.
    _edit("a constant loss", "loss", "", (LOSS, "            loss = out.sum() * 0 + 0.7\n")),
    _edit("a scaled loss", "loss", "", (LOSS, LOSS.replace("ACCUMULATION", "(3 * ACCUMULATION)"))),
    _edit("the loss of another problem", "loss", "", (LOSS, "            loss = out.square().mean() / ACCUMULATION\n")),
    _edit("labels given to the model", "loss", "",
          (FORWARD, "            out = model(x) + 9 * F.one_hot(y, 4)\n")),
    _edit("weights of a former run", "loss", "",
          (MODEL, MODEL + "    fit_before(model, *dataset[:1024])\n"),
          ("def main():\n",
           "def fit_before(model, x, y):\n"
           "    model.eval()\n"
           "    with torch.no_grad():\n"
           "        x = model.block(F.relu(model.stem(normalised(x)))).mean((2, 3))\n"
           "        x = torch.cat([x, torch.ones(len(x), 1)], 1)\n"
           "        found = torch.linalg.lstsq(x, 6.0 * F.one_hot(y, 4)).solution\n"
           "        model.head.weight.copy_(found[:-1].T)\n"
           "        model.head.bias.copy_(found[-1])\n"
           "    model.train()\n\n\n"
           "def main():\n")),
    # The clock.
    _edit("time.monotonic_ns slowed before torch is imported", "ineffective", "",
          (TORCH, "real = time.monotonic_ns\ntime.monotonic_ns = lambda: real() // 10\n" + TORCH)),
    _edit("all clocks of the module time slowed", "ineffective", "",
          (MODEL, "    for name in ('monotonic', 'monotonic_ns', 'perf_counter', 'perf_counter_ns', 'time'):\n"
           "        setattr(time, name, lambda real=getattr(time, name): real() / 10)\n" + MODEL)),
    _edit("the clock of the probe slowed", "clock", "clock of its own",
          (MODEL, "    for name, module in list(sys.modules.items()):\n"
           "        if name.endswith('.device') and hasattr(module, 'Timing'):\n"
           "            real = module.Timing.now\n"
           "            module.Timing.now = staticmethod(lambda: real() // 10)\n"
           "            for each in __import__('gc').get_objects():\n"
           "                if isinstance(each, module.Timing):\n"
           "                    each.mark = module.Timing.now\n" + MODEL)),
    # What surrounds the steps.
    _edit("the evaluation left out", "named", "does not evaluate", (EVALUATION, "")),
    _edit("an early end", "named", "a repeat of", _constants(LAST="12")),
    _edit("the optimizer's hooks removed", "failed", "",
          (MODEL, "    from torch.optim import optimizer as module\n"
           "    module._global_optimizer_post_hooks.clear()\n"
           "    module._global_optimizer_pre_hooks.clear()\n" + MODEL)),
    _edit("the calls of the model hidden", "work", "samples reach the model",
          (FORWARD, "            x, y = x[:1], y[:1]\n            out = model.forward(x)\n")),
    _edit("the environment searched for gpubench", "work", "samples reach the model",
          (FORWARD, "            import os\n            if any('GPUBENCH' in name for name in os.environ):\n"
           "                x, y = x[:1], y[:1]\n" + FORWARD)),
    _edit("the probe's hooks on modules removed", "work", "samples reach the model",
          (FORWARD, "            for each in (Net, nn.Conv2d, nn.Sequential, nn.Linear):\n"
           "                each.__call__ = nn.Module._call_impl\n"
           "            x, y = x[:1], y[:1]\n" + FORWARD)),
    # What is not seen.
    _edit("weight decay dropped", "undetected", "", (", weight_decay=1e-4", "")),
    _edit("dropout dropped", "undetected", "", (", nn.Dropout(0.05)", "")),
    _edit("few samples in the data", "undetected", "", _constants(SAMPLES="512")),
    _edit("a smaller evaluation", "undetected", "", ("*dataset[:64]", "*dataset[:8]")),
    _edit("work moved to set-up", "undetected", "",
          (NORMALISED, ""),
          ("    return TensorDataset(pictures + labels[:, None, None, None] / 2, labels)\n",
           "    pictures = normalised(pictures + labels[:, None, None, None] / 2)\n"
           "    return TensorDataset(pictures, labels)\n")),
    _edit("work left to a thread", "undetected", "",
          (EVALUATION, "                if updates % 10 == 0:\n"
           "                    __import__('threading').Thread(\n"
           "                        target=lambda: model(normalised(dataset[:64][0])),\n"
           "                        daemon=True,\n                    ).start()\n")),
]  # fmt: skip

HONEST = [
    _edit("no edit", "", ""),
    _edit("workers of the DataLoader", "", "",
          (LOADER, LOADER.replace("shuffle=True", "shuffle=True, num_workers=1, persistent_workers=True"))),
    _edit("a fused optimizer", "", "", ("weight_decay=1e-4)", "weight_decay=1e-4, fused=True)")),
    _edit("an optimizer with foreach", "", "", ("weight_decay=1e-4)", "weight_decay=1e-4, foreach=True)")),
    _edit("torch.compile", "", "", (MODEL, "    model = torch.compile(Net())\n")),
    _edit("bf16", "", "",
          (FORWARD, "            with torch.autocast('cpu', torch.bfloat16):\n"
           "                out = model(x).float()\n")),
    _edit("channels_last", "", "",
          (MODEL, "    model = Net().to(memory_format=torch.channels_last)\n"),
          (FORWARD, "            out = model(x.contiguous(memory_format=torch.channels_last))\n")),
    _edit("a vectorised transform", "", "",
          ("    return torch.stack([(picture - 0.5) / 1.5 for picture in x])\n", "    return (x - 0.5) / 1.5\n")),
    _edit("a refactored module", "", "",
          ("        self.block = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU(), nn.Dropout(0.05))\n",
           "        self.inner = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)\n"),
          ("        x = self.block(x)\n", "        x = F.dropout(F.relu(self.inner(x)), 0.05, self.training)\n")),
    _edit("another formula of the loss", "", "",
          (LOSS, "            loss = F.nll_loss(F.log_softmax(out, 1), y) / ACCUMULATION\n")),
    _edit("a reordered loop", "", "",
          (ZERO, ""),
          (BACKWARD, "            if number % ACCUMULATION == 0:\n"
           "                optimizer.zero_grad()\n" + BACKWARD)),
    _edit("gradients cleared in place", "", "", (ZERO, "                optimizer.zero_grad(set_to_none=False)\n")),
    _edit("accumulation split otherwise", "", "", _constants(BATCH="16", ACCUMULATION="1")),
    _edit("accumulation in more parts", "", "", _constants(BATCH="4", ACCUMULATION="4")),
    _edit("the losses of an accumulation added", "", "",
          (BACKWARD, "            total = loss + (total if number % ACCUMULATION else 0)\n"),
          (STEP, "                total.backward()\n" + STEP)),
    _edit("larger batches with the same samples", "", "", _constants(BATCH="32", ACCUMULATION="1")),
    _edit("more threads", "", "", ("torch.set_num_threads(1)", "torch.set_num_threads(2)")),
    _edit("an activation in place", "", "", ("F.relu(self.stem(x))", "F.relu_(self.stem(x))")),
    _edit("inference mode in the evaluation", "", "", ("with torch.no_grad():", "with torch.inference_mode():")),
    _edit("the batch by its keyword", "", "", (FORWARD, "            out = model(x=x)\n")),
    _edit("outputs in a dictionary", "", "",
          ("        return self.head(x.mean((2, 3)))\n", "        return {'logits': self.head(x.mean((2, 3)))}\n"),
          (FORWARD, "            out = model(x)['logits']\n"),
          ("model(normalised(x))", "model(normalised(x))['logits']")),
    _edit("another order of the samples", "", "", ("manual_seed(2)", "manual_seed(3)")),
    _edit("another seed", "", "", ("torch.manual_seed(0)", "torch.manual_seed(7)")),
    _edit("the model in a wrapper", "", "",
          (MODEL, "    class Wrapper(nn.Module):\n"
           "        def __init__(self, inner):\n            super().__init__()\n            self.inner = inner\n\n"
           "        def forward(self, x):\n            return self.inner(x)\n\n    model = Wrapper(Net())\n")),
    _edit("batches made without a DataLoader", "", "",
          (LOADER, "    class loader:\n        def __iter__(self):\n"
           "            for part in torch.randperm(SAMPLES, generator=order).split(BATCH):\n"
           "                yield dataset[part]\n\n    loader = loader()\n")),
]  # fmt: skip
"""Edits that do the same work. None may be refused."""
