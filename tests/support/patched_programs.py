"""Small training programs with the edits that settings lead to: the changed lines, or the sentence that says why none.

Each trains a linear model for two steps, and keeps its losses. "-" and "+" stand before the lines of the diff.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HEAD = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(8, 4), torch.randint(3, (8,)))
losses = []
"""
MODEL = "model = nn.Linear(4, 3)\n"
LOADER = "loader = DataLoader(data, batch_size=4)\n"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
STEP = """    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
LOOP = ("for x, y in loader:\n    loss = nn.functional.cross_entropy(model(x), y)\n") + STEP
PLAIN = HEAD + MODEL + LOADER + SGD + LOOP
ADAM = PLAIN.replace("SGD", "AdamW")
TWO = PLAIN.replace(MODEL, MODEL + "other = nn.Linear(3, 3)\n").replace("(model(x), y)", "(other(model(x)), y)")
NAMED = {"model model": "model(x)", "model other": "other("}
OF_ITSELF = (
    HEAD
    + """

class Net(nn.Linear):
    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x), y)


"""
    + MODEL.replace("nn.Linear(4, 3)", 'Net(4, 3).to("cpu")')
    + LOADER
    + SGD
    + LOOP.replace("nn.functional.cross_entropy(model(x), y)", "model.loss(x, y)")
)
FUNCTIONS = (
    HEAD
    + (
        "\n"
        "\n"
        "def train(net, loader, optimizer):\n"
        "    for x, y in loader:\n"
        "        loss = nn.functional.cross_entropy(net(x), y)\n"
    )
    + "".join(f"    {line}\n" for line in STEP.splitlines())
    + (
        "\n"
        "\n"
        "def main():\n"
        "    first = nn.Linear(4, 3)\n"
        "    train(first, DataLoader(data, 4), torch.optim.SGD(first.parameters(), 0.1))\n"
    )
    + "\n\nif __name__ == '__main__':\n    main()\n"
)
CLASS = (
    HEAD
    + """

class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self):
        for x, y in DataLoader(data, batch_size=4):
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())


Trainer(nn.Linear(4, 3)).run()
"""
)
OPTIONS = (
    "import argparse\n"
    + HEAD
    + "parser = argparse.ArgumentParser()\n"
    + "parser.add_argument('--workers', '-w', type=int, default=0, help='of the loader')\n"
    + "parser.add_argument('--lr', type=float, default=0.1)\n"
    + "args = parser.parse_args([])\n"
    + MODEL
    + "loader = DataLoader(data, batch_size=4, num_workers=args.workers)\n"
    + SGD
    + LOOP
)
WORKERS: Mapping[str, Any] = {"data.workers": 1}
FUSED: Mapping[str, Any] = {"training.optimizer_impl": "fused"}
THREADS: Mapping[str, Any] = {"performance.cpu_threads": 1}
COMPILE: Mapping[str, Any] = {"performance.compile": True}
BF16: Mapping[str, Any] = {"precision": "bf16"}
SPREAD = PLAIN.replace(LOADER, ("loader = DataLoader(\n    data,\n    batch_size=4,  # of {n}\n)\n"))
LAMBDA = PLAIN.replace(LOADER, ("make = lambda d: DataLoader(d, batch_size=4)\nloader = make(data)\n"))
GUARD = FUNCTIONS


@dataclass(frozen=True)
class Case:
    name: str
    source: str
    settings: Mapping[str, Any]
    diff: str = ""
    """The removed and added lines; empty if there is no patch."""
    left: str = ""
    """A part of the sentence where there is no edit."""
    loader: str = "DataLoader("
    """What stands in the line that makes the loader."""
    model: str = "model(x)"
    """What stands in the line that calls the model."""
    words: tuple[str, ...] = ("python", "train.py")
    encoding: str = "utf-8"
    runs: bool = True
    """Whether the program is run before and after."""
    same: bool = True
    """Whether the losses are to be equal, up to rounding."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Other places by their names."""


def replaced(old: str, new: str) -> str:
    assert old in PLAIN
    return PLAIN.replace(old, new)


CALLED_ALONE = replaced(
    "    loss = nn.functional.cross_entropy(model(x), y)\n",
    "    # forward\n    out = model(x)\n    loss = nn.functional.cross_entropy(out, y)\n",
)
AROUND_BOTH = (
    "-    out = model(x)\n"
    "-    loss = nn.functional.cross_entropy(out, y)\n"
    '+    with torch.autocast("cpu", torch.bfloat16):\n'
    "+        out = model(x)\n"
    "+        loss = nn.functional.cross_entropy(out, y)\n"
)
"""The diff that puts autocast around both statements of that program."""

CASES = [
    Case(
        "a keyword is added",
        PLAIN,
        WORKERS,
        ("-loader = DataLoader(data, batch_size=4)\n+loader = DataLoader(data, batch_size=4, num_workers=1)\n"),
    ),
    Case(
        "two settings of one call",
        PLAIN,
        {"data.workers": 1, "data.persistent_workers": True},
        (
            "-loader = DataLoader(data, batch_size=4)\n"
            "+loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)\n"
        ),
    ),
    Case(
        "a literal is replaced",
        replaced("batch_size=4)", "num_workers=0, batch_size=4)"),
        WORKERS,
        (
            "-loader = DataLoader(data, num_workers=0, batch_size=4)\n"
            "+loader = DataLoader(data, num_workers=1, batch_size=4)\n"
        ),
    ),
    Case(
        "a positional argument is replaced",
        replaced("(data, batch_size=4)", "(data, 4, False, None, None, 0)"),
        WORKERS,
        ("-loader = DataLoader(data, 4, False, None, None, 0)\n+loader = DataLoader(data, 4, False, None, None, 1)\n"),
    ),
    Case(
        "one argument a line",
        replaced(LOADER, ("loader = DataLoader(\n    data,\n    batch_size=4,\n)\n")),
        WORKERS,
        "+    num_workers=1,\n",
    ),
    Case(
        "one argument a line without a last comma",
        replaced(LOADER, ("loader = DataLoader(\n    data,\n    batch_size=4\n)\n")),
        WORKERS,
        ("-    batch_size=4\n+    batch_size=4,\n+    num_workers=1\n"),
    ),
    Case(
        "a comment stays with its argument",
        replaced(LOADER, ("loader = DataLoader(\n    data,\n    batch_size=4,  # small\n)\n")),
        WORKERS,
        "+    num_workers=1,\n",
    ),
    Case(
        "a comment without a last comma",
        replaced(LOADER, ("loader = DataLoader(\n    data,\n    batch_size=4  # small\n)\n")),
        WORKERS,
        ("-    batch_size=4  # small\n+    batch_size=4,  # small\n+    num_workers=1\n"),
    ),
    Case(
        "a hanging indent",
        replaced(LOADER, ("loader = DataLoader(data,\n                    batch_size=4)\n")),
        WORKERS,
        (
            "-                    batch_size=4)\n"
            "+                    batch_size=4,\n"
            "+                    num_workers=1)\n"
        ),
        loader="DataLoader(data",
    ),
    Case(
        "a constant is changed where it is set",
        "W = 0\n" + replaced("batch_size=4)", "batch_size=4, num_workers=W)"),
        WORKERS,
        "-W = 0\n+W = 1\n",
    ),
    Case(
        "a name that is computed is replaced",
        replaced("batch_size=4)", "batch_size=4, num_workers=w)").replace(MODEL, MODEL + "w = int('0')\n"),
        WORKERS,
        (
            "-loader = DataLoader(data, batch_size=4, num_workers=w)\n"
            "+loader = DataLoader(data, batch_size=4, num_workers=1)\n"
        ),
    ),
    Case(
        "a value that is computed is left",
        replaced("batch_size=4)", "batch_size=4, num_workers=0 if losses else int('0'))"),
        WORKERS,
        left="computes num_workers, as 0 if losses else int('0')",
    ),
    Case(
        "the default of an option is changed",
        OPTIONS,
        WORKERS,
        (
            "-parser.add_argument('--workers', '-w', type=int, default=0, help='of the loader')\n"
            "+parser.add_argument('--workers', '-w', type=int, default=1, help='of the loader')\n"
        ),
    ),
    Case(
        "an option without a default gets one",
        OPTIONS.replace(", default=0, help='of the loader'", ""),
        WORKERS,
        (
            "-parser.add_argument('--workers', '-w', type=int)\n"
            "+parser.add_argument('--workers', '-w', type=int, default=1)\n"
        ),
        runs=False,
    ),
    Case(
        "an option that the command gives is left to it",
        OPTIONS,
        WORKERS,
        left="give the command --workers 1",
        words=("python", "train.py", "--workers", "0"),
    ),
    Case(
        "an option that the command gives as one word",
        OPTIONS,
        WORKERS,
        left="give the command --workers 1",
        words=("python", "train.py", "--workers=0"),
    ),
    Case(
        "a short option that the command gives",
        OPTIONS,
        WORKERS,
        left="give the command --workers 1",
        words=("python", "train.py", "-w", "0"),
    ),
    Case(
        "arguments from an unknown mapping are left",
        replaced("batch_size=4)", "**dict(batch_size=4))"),
        WORKERS,
        left="takes arguments from **dict(batch_size=4): set num_workers=1 there",
    ),
    Case(
        "arguments from a mapping that grows are left",
        replaced(
            LOADER, ("given = {'batch_size': 4}\ngiven.update(num_workers=0)\nloader = DataLoader(data, **given)\n")
        ),
        WORKERS,
        left="takes arguments from **given",
    ),
    Case(
        "arguments from a literal mapping",
        replaced(LOADER, ("given = {'batch_size': 4}\nloader = DataLoader(data, **given)\n")),
        WORKERS,
        ("-loader = DataLoader(data, **given)\n+loader = DataLoader(data, **given, num_workers=1)\n"),
    ),
    Case(
        "arguments from a list are left",
        replaced("(data, batch_size=4)", "(*[data, 4])"),
        WORKERS,
        left="takes arguments from *[data, 4]",
    ),
    Case(
        "it is set already",
        replaced("batch_size=4)", "batch_size=4, num_workers=1)"),
        WORKERS,
        left="has num_workers=1 already",
    ),
    Case(
        "a class by another name",
        HEAD.replace("DataLoader, T", "DataLoader as DL, T") + MODEL + LOADER.replace("DataLoader", "DL") + SGD + LOOP,
        WORKERS,
        ("-loader = DL(data, batch_size=4)\n+loader = DL(data, batch_size=4, num_workers=1)\n"),
        loader="= DL(",
    ),
    Case(
        "a class by its module",
        HEAD
        + "from torch.utils import data as of\n"
        + MODEL
        + LOADER.replace("DataLoader", "of.DataLoader")
        + SGD
        + LOOP,
        WORKERS,
        ("-loader = of.DataLoader(data, batch_size=4)\n+loader = of.DataLoader(data, batch_size=4, num_workers=1)\n"),
        loader="of.DataLoader(",
    ),
    Case(
        "a class of the program's own is left",
        replaced(LOADER, ("class Mine(DataLoader): pass\nloader = Mine(data, batch_size=4)\n")),
        WORKERS,
        left="calls DataLoader by another name: give it num_workers=1",
        loader="= Mine(",
    ),
    Case(
        "two loaders in a line are left",
        replaced(LOADER, "loader, other = DataLoader(data, batch_size=4), DataLoader(data)\n"),
        WORKERS,
        left="several times",
    ),
    Case(
        "of two loaders the one that trains",
        replaced(LOADER, "other = DataLoader(data)\n" + LOADER),
        WORKERS,
        ("-loader = DataLoader(data, batch_size=4)\n+loader = DataLoader(data, batch_size=4, num_workers=1)\n"),
        loader="loader = DataLoader(",
    ),
    Case(
        "a loader in a lambda",
        LAMBDA,
        WORKERS,
        (
            "-make = lambda d: DataLoader(d, batch_size=4)\n"
            "+make = lambda d: DataLoader(d, batch_size=4, num_workers=1)\n"
        ),
    ),
    Case(
        "tabs",
        FUNCTIONS.replace("    ", "\t"),
        {**WORKERS, **THREADS},
        (
            "-\ttrain(first, DataLoader(data, 4), torch.optim.SGD(first.parameters(), 0.1))\n"
            "+\ttrain(first, DataLoader(data, 4, num_workers=1), torch.optim.SGD(first.parameters(), 0.1))\n"
            "+\ttorch.set_num_threads(1)\n"
        ),
        loader="train(first, DataLoader(",
    ),
    Case(
        "CRLF",
        PLAIN.replace("\n", "\r\n"),
        {**WORKERS, **THREADS},
        (
            "+\r\n"
            "+torch.set_num_threads(1)\r\n"
            "-loader = DataLoader(data, batch_size=4)\r\n"
            "+loader = DataLoader(data, batch_size=4, num_workers=1)\r\n"
        ),
    ),
    Case(
        "no newline at the end",
        PLAIN.removesuffix("\n") + "\nloader = DataLoader(data, batch_size=4)",
        WORKERS,
        (
            "-loader = DataLoader(data, batch_size=4)\n"
            "\\ No newline at end of file\n"
            "+loader = DataLoader(data, batch_size=4, num_workers=1)\n"
            "\\ No newline at end of file\n"
        ),
        loader="last",
    ),
    Case(
        "another encoding",
        "# -*- coding: latin-1 -*-\n# Gr\u00f6\u00dfe\n" + PLAIN,
        WORKERS,
        ("-loader = DataLoader(data, batch_size=4)\n+loader = DataLoader(data, batch_size=4, num_workers=1)\n"),
        encoding="latin-1",
    ),
    Case(
        "a byte order mark",
        "\ufeff" + PLAIN,
        WORKERS,
        ("-loader = DataLoader(data, batch_size=4)\n+loader = DataLoader(data, batch_size=4, num_workers=1)\n"),
    ),
    Case(
        "a fused optimizer",
        ADAM,
        FUSED,
        (
            "-optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n"
            "+optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)\n"
        ),
    ),
    Case(
        "a fused optimizer in place of foreach",
        ADAM.replace("lr=0.1)", "foreach=False, lr=0.1)"),
        FUSED,
        (
            "-optimizer = torch.optim.AdamW(model.parameters(), foreach=False, lr=0.1)\n"
            "+optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)\n"
        ),
    ),
    Case(
        "foreach",
        ADAM,
        {"training.optimizer_impl": "foreach"},
        (
            "-optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n"
            "+optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)\n"
        ),
    ),
    Case(
        "a loader and an optimizer",
        ADAM,
        {**WORKERS, **FUSED},
        (
            "-loader = DataLoader(data, batch_size=4)\n"
            "-optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n"
            "+loader = DataLoader(data, batch_size=4, num_workers=1)\n"
            "+optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)\n"
        ),
    ),
    Case("threads after the imports", PLAIN, THREADS, "+\n+torch.set_num_threads(1)\n"),
    Case("threads in guarded code", FUNCTIONS, THREADS, "+    torch.set_num_threads(1)\n"),
    Case(
        "threads that are set already",
        PLAIN + "torch.set_num_threads(2)\n",
        THREADS,
        ("-torch.set_num_threads(2)\n+torch.set_num_threads(1)\n"),
    ),
    Case(
        "torch by another name",
        "import torch as th\n"
        + PLAIN.replace("import torch\n", "")
        .replace("torch.manual", "th.manual")
        .replace("torch.r", "th.r")
        .replace("torch.o", "th.o"),
        THREADS,
        "+\n+th.set_num_threads(1)\n",
    ),
    Case(
        "torch that is not imported",
        "from torch import manual_seed, randn, randint, optim\n"
        + PLAIN.replace("import torch\n", "")
        .replace("torch.manual", "manual")
        .replace("torch.r", "r")
        .replace("torch.optim", "optim"),
        THREADS,
        "+import torch\n+\n+torch.set_num_threads(1)\n",
    ),
    Case(
        "imports after other code",
        "import os\nos.environ['X'] = '1'\n" + PLAIN,
        THREADS,
        "+\n+torch.set_num_threads(1)\n",
    ),
    Case(
        "precision of products",
        PLAIN,
        {"performance.matmul_precision": "high"},
        '+\n+torch.set_float32_matmul_precision("high")\n',
    ),
    Case(
        "algorithms of cuDNN",
        PLAIN,
        {"performance.cudnn_benchmark": True},
        "+\n+torch.backends.cudnn.benchmark = True\n",
    ),
    Case(
        "algorithms of cuDNN that are set",
        ("import torch.backends.cudnn as cudnn\ncudnn.benchmark = False\n") + PLAIN,
        {"performance.cudnn_benchmark": True},
        ("-cudnn.benchmark = False\n+cudnn.benchmark = True\n"),
    ),
    Case(
        "a shell script does not show its start",
        PLAIN,
        THREADS,
        left="sh does not show which file starts it",
        words=("sh", "run.sh"),
    ),
    Case(
        "a shell script that starts guarded code",
        FUNCTIONS,
        THREADS,
        "+    torch.set_num_threads(1)\n",
        words=("sh", "run.sh"),
        loader="train(first, DataLoader(",
    ),
    Case("a module", PLAIN, THREADS, "+\n+torch.set_num_threads(1)\n", words=("python", "-m", "train")),
    Case("a compiled model", PLAIN, COMPILE, "+model.compile()\n"),
    Case(
        "a compiled model with a mode",
        PLAIN,
        {**COMPILE, "performance.compile_mode": "reduce-overhead"},
        '+model.compile(mode="reduce-overhead")\n',
    ),
    Case(
        "an attribute of torch that has the value already",
        replaced(MODEL, f"torch.backends.cudnn.benchmark = True\n{MODEL}"),
        {"performance.cudnn_benchmark": True},
        left="train.py:8 does that already",
    ),
    Case(
        "two optimizers of which one is so already",
        replaced(SGD, f"other = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)\n{SGD}"),
        {"training.optimizer_impl": "fused"},
        "-optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "+optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)\n",
    ),
    Case(
        "workers that stay, where there are some already",
        replaced(LOADER, LOADER.replace("4)", "4, num_workers=2)")),
        {"data.workers": 2, "data.persistent_workers": True},
        "-loader = DataLoader(data, batch_size=4, num_workers=2)\n"
        "+loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)\n",
        left="train.py:9 has num_workers=2 already",
    ),
    Case(
        "two loaders that train",
        replaced(LOADER, f"{LOADER}more = DataLoader(data, 2)\n").replace("in loader", "in [*loader, *more][:2]"),
        WORKERS,
        "-loader = DataLoader(data, batch_size=4)\n"
        "-more = DataLoader(data, 2)\n"
        "+loader = DataLoader(data, batch_size=4, num_workers=1)\n"
        "+more = DataLoader(data, 2, num_workers=1)\n",
        more={"loader 2": "more ="},
    ),
    Case("a model that calls itself", OF_ITSELF, COMPILE, "+model.compile()\n", model="self(x)"),
    Case(
        "a model of a list that calls itself",
        OF_ITSELF.replace('model = Net(4, 3).to("cpu")\n', "models = [Net(4, 3)]\nmodel = models[0]\n"),
        COMPILE,
        left="train.py:12 calls the model in a method of its own: after it is made, write it.compile()",
        model="self(x)",
    ),
    Case(
        "one of two models that call themselves",
        OF_ITSELF.replace('model = Net(4, 3).to("cpu")\n', "model = Net(4, 3)\nother = Net(4, 3)\n"),
        COMPILE,
        left="train.py:12 calls the model in a method of its own: after it is made, write it.compile()",
        model="self(x)",
    ),
    Case("two models", TWO, COMPILE, "+model.compile()\n+other.compile()\n", more=NAMED),
    Case(
        "two models of which one has no name",
        TWO,
        {"performance.channels_last": True},
        left="train.py:13 calls one of several models by no name: after each of its models is made, write "
        "model.to(memory_format=torch.channels_last)",
        more={"model model": "model(x)", "model 3": "other("},
    ),
    Case(
        "two models with a backward pass each",
        TWO + "\n\ndef regularize(x):\n    other(x).mean().backward()\n",
        {"precision": "bf16"},
        left='train.py:13 calls the model: put `with torch.autocast("cpu", torch.bfloat16):` around it and the loss, '
        "and around the other forward passes",
        more=NAMED,
    ),
    Case("a model that a function is given", FUNCTIONS, COMPILE, "+    first.compile()\n", model="net(x)"),
    Case("a model of an object", CLASS, COMPILE, "+        self.model.compile()\n", model="self.model(x)"),
    Case(
        "a model of two branches",
        replaced(MODEL, ("if losses:\n    model = nn.Linear(4, 5)\nelse:\n    model = nn.Linear(4, 3)\n")),
        COMPILE,
        "+model.compile()\n",
    ),
    Case(
        "a model that functions are given differently",
        FUNCTIONS.replace(
            "def main():\n", ("def main():\n    second = nn.Linear(4, 3)\n    train(second, [], None)\n")
        ),
        COMPILE,
        left="calls net: after it is made, write net.compile()",
        model="net(x)",
    ),
    Case(
        "a model that is made in its loop",
        HEAD
        + ("for epoch in range(1):\n    for model in [nn.Linear(4, 3)]:\n")
        + "".join(f"        {line}\n" for line in (LOADER + SGD + LOOP).splitlines()),
        COMPILE,
        left="after model is made, write model.compile()",
    ),
    Case(
        "another memory format",
        PLAIN,
        {"performance.channels_last": True},
        "+model.to(memory_format=torch.channels_last)\n",
    ),
    Case(
        "autocast",
        PLAIN,
        BF16,
        (
            "-    loss = nn.functional.cross_entropy(model(x), y)\n"
            '+    with torch.autocast("cpu", torch.bfloat16):\n'
            "+        loss = nn.functional.cross_entropy(model(x), y)\n"
        ),
        same=False,
    ),
    Case(
        "autocast around two statements",
        CALLED_ALONE,
        BF16,
        AROUND_BOTH,
        same=False,
    ),
    Case(
        "autocast around the call of a model that is compiled too",
        CALLED_ALONE,
        {**BF16, **COMPILE},
        "+model.compile()\n" + AROUND_BOTH,
        same=False,
    ),
    Case(
        "a forward and a backward pass in one statement",
        replaced("    loss.backward()\n", "").replace("model(x), y)", "model(x), y); loss.backward()"),
        BF16,
        left="put `with torch.autocast",
        runs=False,
    ),
    Case(
        "a forward pass in a lambda",
        replaced(
            "loss = nn.functional.cross_entropy(model(x), y)",
            ("f = lambda: nn.functional.cross_entropy(model(x), y)\n    loss = f()"),
        ),
        BF16,
        left="put `with torch.autocast",
    ),
    Case(
        "an autocast of its own",
        replaced("model(x), y)", "model(x), y)\n    torch.autocast('cpu')"),
        BF16,
        left="uses autocast or a GradScaler already",
    ),
    Case("generated code", "# Generated by a tool. DO NOT EDIT.\n" + PLAIN, WORKERS, left="says that it is generated"),
    Case("a file that is not Python", PLAIN + "print 1\n", WORKERS, left="cannot be parsed", runs=False),
    Case(
        "a variable of the environment",
        PLAIN,
        {"performance.expandable_segments": True},
        left="PYTORCH_CUDA_ALLOC_CONF",
    ),
    Case("kernels of attention", PLAIN, {"performance.sdpa": "fused"}, left="remove what restricts the kernels"),
    Case(
        "two backward passes",
        replaced("    optimizer.step()\n", "    model(x).sum().mul(0).backward()\n    optimizer.step()\n"),
        BF16,
        left="around the other forward passes",
    ),
    *(
        Case(
            f"a number that is {used}",
            replaced(LOADER, f"{before}loader = DataLoader(data, batch_size=4, num_workers={name})\n"),
            WORKERS,
            f"-loader = DataLoader(data, batch_size=4, num_workers={name})\n"
            f"+loader = DataLoader(data, batch_size=4, num_workers=1)\n",
        )
        for used, before, name in (
            ("used elsewhere", "n = 0\nlosses += [0][:n]\n", "n"),
            ("given with another one", "seed = n = 0\n", "n"),
            ("changed on the way", "n = 0\nn += 0\n", "n"),
            ("of another function", "from torch import e as n\ndef f():\n    n = 0\n\nn = int(n * 0)\n", "n"),
            ("an attribute of no options", "class C:\n    workers = 0\n\nc = C()\n", "c.workers"),
        )
    ),
    Case(
        "options with other defaults",
        OPTIONS.replace("args = ", "parser.set_defaults(workers=0)\nargs = "),
        WORKERS,
        "-loader = DataLoader(data, batch_size=4, num_workers=args.workers)\n"
        "+loader = DataLoader(data, batch_size=4, num_workers=1)\n",
    ),
    *(
        Case(
            f"an option given as {word}",
            OPTIONS,
            WORKERS,
            left="--workers 1",
            words=("python", "train.py", *word.split()),
        )
        for word in ("-w0", "--work 0", "--workers=0", "-w 0")
    ),
    Case(
        "the statement after an import in its line",
        "import torch; torch.manual_seed(1)\n" + PLAIN,
        THREADS,
        "+\n+torch.set_num_threads(1)\n",
    ),
    *(
        Case(f"threads that are set {where}", PLAIN + code, THREADS, left="sets it where that may not run", runs=False)
        for where, code in (
            ("for workers", "def init(worker):\n    torch.set_num_threads(2)\n"),
            ("in a branch", "if losses is None:\n    torch.set_num_threads(2)\n"),
        )
    ),
    Case(
        "threads that are set in the main function",
        PLAIN + "def main():\n    torch.set_num_threads(2)\n\nif __name__ == '__main__':\n    main()\n",
        THREADS,
        "-    torch.set_num_threads(2)\n+    torch.set_num_threads(1)\n",
    ),
    Case(
        "a setting that is set with another name",
        PLAIN + "a = torch.backends.cudnn.benchmark = False\n",
        {"performance.cudnn_benchmark": True},
        left="together with something else",
    ),
    Case(
        "a model behind another call",
        replaced(LOADER, LOADER + "norm = lambda x: x / 2\n").replace("model(x)", "model(norm(x))"),
        COMPILE,
        "+model.compile()\n",
        model="model(norm",
        more={"model model": "model(norm"},
    ),
    Case(
        "a parameter that has only a name",
        "model = 'linear'\n"
        + FUNCTIONS.replace("(net, loader", "(loader")
        .replace("optimizer):", "optimizer, *, model):")
        .replace("net(x)", "model(x)")
        .replace("train(first, DataLoader(data, 4), ", "train(DataLoader(data, 4), ")
        .replace("0.1))", "0.1), model=first)"),
        COMPILE,
        "+    first.compile()\n",
    ),
    *(
        Case(
            f"a loss that is {what}",
            replaced("    loss = nn.functional.cross_entropy(model(x), y)\n", f"    out = model(x)\n{code}").replace(
                "    loss.backward()\n", f"    {loss}.backward()\n"
            ),
            BF16,
            left="around it and the loss",
            runs=False,
        )
        for what, code, loss in (
            ("computed for its backward pass", "", "nn.functional.cross_entropy(out, y)"),
            ("computed by operators", "", "(out - 1).pow(2).mean()"),
            ("computed of a result by another name", "    z = out.view(-1, 3)\n", "nn.functional.cross_entropy(z, y)"),
        )
    ),
    Case(
        "a loss that is appended",
        CALLED_ALONE.replace("    # forward\n", "    a = []\n")
        .replace("    loss = nn.functional.cross_entropy(out, y)\n", "    a.append(out.sum())\n")
        .replace("loss.backward()", "sum(a).backward()")
        .replace("losses.append(loss.item())", "losses.append(sum(a).item())"),
        BF16,
        "-    out = model(x)\n-    a.append(out.sum())\n"
        '+    with torch.autocast("cpu", torch.bfloat16):\n'
        "+        out = model(x)\n+        a.append(out.sum())\n",
        same=False,
    ),
    Case(
        "results that NumPy gets",
        CALLED_ALONE + "    print(out.detach().numpy().shape)\n",
        BF16,
        left="which has no bfloat16",
    ),
]
