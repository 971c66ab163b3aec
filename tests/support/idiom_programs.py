"""Small programs with an idiom that costs time, and the edit that a finding about it leads to, or the sentence.

Each keeps what it computes in `losses`. "-" and "+" stand before the lines of the diff.
"""

from dataclasses import dataclass

from patched_programs import HEAD, LOADER, MODEL, PLAIN, SGD

ZEROED, SUMMED, MOVED, BLOCKING, EVALUATING, ATTENTION = (
    *("zeroed-gradients", "synchronisation", "host-tensors", "blocking-copies", "unused-gradients"),
    "unfused-attention",
)
KEPT = PLAIN.replace("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)")
STEP = "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
LOSS = "    loss = nn.functional.cross_entropy(model(x), y)\n"
START = HEAD + MODEL + LOADER + SGD
EPOCHS = "for epoch in range(2):\n"


def indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


def summing(line: str, start: str = "total = 0.0\n", after: str = "losses.append(total / 2)\n", more: str = "") -> str:
    """A program that adds something up in each step."""
    return START + start + "for x, y in loader:\n" + LOSS + STEP + indented(line) + more + after


def evaluating(body: str, name: str = "evaluate", mark: str = "") -> str:
    """A program with a function that evaluates, and that is called after training."""
    function = f"\n\n{mark}def {name}(model, loader):\n{indented(body)}\n\n"
    training = "for x, y in loader:\n" + LOSS + STEP
    return HEAD + function + MODEL + LOADER + SGD + training + f"losses.append({name}(model, loader))\n"


def attending(body: str, imports: str = "import math\nimport torch\nfrom torch.nn import functional as F\n") -> str:
    """A program that computes attention, whose sum is its loss."""
    made = "torch.manual_seed(0)\nq, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))\n"
    function = f"\n\ndef attention(q, k, v):\n{indented(body)}\n\n"
    return imports + function + made + "losses = [attention(q, k, v).sum().item()]\n"


COUNTING = """hits = 0
for x, y in loader:
    hits += model(x).argmax(1).eq(y).sum().item()
losses = [hits, len(data) - hits]
print(f"{hits}/{len(data)}")
"""
MEAN = (
    "total = 0.0\nfor x, y in loader:\n    total += nn.functional.cross_entropy(model(x), y).item()\nreturn total / 2\n"
)
WRITTEN = "w = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))\nw = F.softmax(w, dim=-1)\nreturn w @ v\n"
LINES = """scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(k.shape[-1])
weights = torch.softmax(scores, dim=-1)
mixed = torch.matmul(weights, v)
return mixed
"""
CALL = "scaled_dot_product_attention(q, k, v"
PINNED = LOADER.replace("batch_size=4", "batch_size=4, pin_memory=True")
MOVING = 'device = "cpu"\n' + HEAD + MODEL + LOADER + SGD


def moving(line: str, loader: str = LOADER) -> str:
    start = ("device = torch.device('cpu')\n") + MODEL + loader + SGD
    return HEAD + start + "for x, y in loader:\n" + indented(line) + LOSS + STEP + "    losses.append(loss.item())\n"


@dataclass(frozen=True)
class IdiomCase:
    name: str
    finding: str
    source: str
    diff: str = ""
    """The removed and added lines; empty if there is no edit."""
    left: str = ""
    """A part of the sentence where there is none."""
    line: str = ""
    """What stands in the line that the finding names; empty if it names none."""


CASES = [
    IdiomCase(
        "gradients are dropped",
        ZEROED,
        KEPT,
        "-    optimizer.zero_grad(set_to_none=False)\n+    optimizer.zero_grad()\n",
    ),
    IdiomCase(
        "gradients are dropped with a positional argument",
        ZEROED,
        PLAIN.replace("zero_grad()", "zero_grad(False)  # keep"),
        "-    optimizer.zero_grad(False)  # keep\n+    optimizer.zero_grad()  # keep\n",
    ),
    IdiomCase("gradients are dropped already", ZEROED, PLAIN),
    IdiomCase("the argument is computed", ZEROED, PLAIN.replace("zero_grad()", "zero_grad(set_to_none=bool(losses))")),
    IdiomCase(
        "gradients are read",
        ZEROED,
        KEPT + "print(model.weight.grad.norm())\n",
        left="train.py:13 fills gradients with zeros: remove its argument, after which they are None, "
        "unless train.py:17",
    ),
    IdiomCase(
        "gradients are of a graph",
        ZEROED,
        KEPT + "graph = torch.cuda.CUDAGraph if torch.cuda.is_available() else None\n",
        left="unless CUDAGraph needs them",
    ),
    IdiomCase(
        "a loss is summed",
        SUMMED,
        summing("total += loss.item()"),
        "-    total += loss.item()\n-losses.append(total / 2)\n"
        "+    total += loss.detach()\n+losses.append(float(total) / 2)\n",
        line="loss.item()",
    ),
    IdiomCase(
        "a loss is summed by the samples",
        SUMMED,
        summing("total += loss.item() * x.size(0)  # of the batch"),
        "-    total += loss.item() * x.size(0)  # of the batch\n-losses.append(total / 2)\n"
        "+    total += loss.detach() * x.size(0)  # of the batch\n+losses.append(float(total) / 2)\n",
    ),
    IdiomCase(
        "a loss is summed as float",
        SUMMED,
        summing("total += float(loss) / 2", "total: float = 0.0\n"),
        "-    total += float(loss) / 2\n-losses.append(total / 2)\n"
        "+    total += loss.detach() / 2\n+losses.append(float(total) / 2)\n",
    ),
    IdiomCase(
        "a detached loss is summed in each epoch",
        SUMMED,
        START
        + EPOCHS
        + indented("total, steps = 0.0, 0\nfor x, y in loader:\n" + LOSS + STEP + "    total += loss.detach().item()\n")
        + "    print(f'loss {total / 2:.3f}')\n    losses.append(total)\n",
        "-        total += loss.detach().item()\n-    print(f'loss {total / 2:.3f}')\n-    losses.append(total)\n"
        "+        total += loss.detach()\n+    print(f'loss {float(total) / 2:.3f}')\n"
        "+    losses.append(float(total))\n",
    ),
    IdiomCase(
        "a loss that is moved to the CPU is summed where it is",
        SUMMED,
        START
        + EPOCHS
        + indented(
            "total, steps = 0.0, 0\nfor x, y in loader:\n" + LOSS + STEP + "    total += loss.detach().cpu().item()\n"
        )
        + "    print(f'loss {total / 2:.3f}')\n    losses.append(total)\n",
        "-        total += loss.detach().cpu().item()\n-    print(f'loss {total / 2:.3f}')\n-    losses.append(total)\n"
        "+        total += loss.detach()\n+    print(f'loss {float(total) / 2:.3f}')\n"
        "+    losses.append(float(total))\n",
    ),
    IdiomCase(
        "a sum is shown every few steps",
        SUMMED,
        summing(
            "total += loss.item()\nif len(losses) % 2 == 0:\n    losses.append(total)\n    total = 0.0",
        ),
        "-    total += loss.item()\n+    total += loss.detach()\n-        losses.append(total)\n"
        "+        losses.append(float(total))\n-losses.append(total / 2)\n+losses.append(float(total) / 2)\n",
    ),
    IdiomCase(
        "hits are counted",
        SUMMED,
        START + COUNTING,
        "-    hits += model(x).argmax(1).eq(y).sum().item()\n-losses = [hits, len(data) - hits]\n"
        '-print(f"{hits}/{len(data)}")\n'
        "+    hits += model(x).argmax(1).eq(y).sum()\n+losses = [int(hits), len(data) - int(hits)]\n"
        '+print(f"{int(hits)}/{len(data)}")\n',
    ),
    IdiomCase(
        "a sum is divided after the loop",
        SUMMED,
        summing("total += loss.item()", "total = 0\n", "total /= 2\nlosses.append(total)\n"),
        "-    total += loss.item()\n+    total += loss.detach()\n-losses.append(total)\n+losses.append(float(total))\n",
    ),
    IdiomCase(
        "a count is divided after the loop",
        SUMMED,
        START + COUNTING + "hits /= 2\n",
        left="train.py:16 changes hits too",
    ),
    IdiomCase(
        "a sum is used in each step",
        SUMMED,
        summing("total += loss.item()\nprint(total)"),
        left="train.py:17 reads a value in each step: add up detached tensors in total, and read it after the loop; "
        "train.py:18 uses total in each step",
    ),
    IdiomCase(
        "a sum is used by a condition",
        SUMMED,
        summing("total += loss.item()\nif total > 100:\n    break"),
        left="train.py:18 uses total in each step",
    ),
    IdiomCase(
        "a sum is an attribute",
        SUMMED,
        summing("model.total += loss.item()", "model.total = 0.0\n", "losses.append(model.total)\n"),
        left="it is model.total += loss.item()",
    ),
    IdiomCase(
        "a sum has other summands",
        SUMMED,
        summing("total += loss.item() + 1"),
        left="it is total += loss.item() + 1",
    ),
    IdiomCase(
        "a sum of narrow numbers",
        SUMMED,
        summing("total += loss.item()", "total = 0.0\nkind = torch.bfloat16\n"),
        left="train.py uses bfloat16, in which a sum is inexact",
    ),
    IdiomCase(
        "a sum is changed otherwise",
        SUMMED,
        summing("total += loss.item()", after="total = round(total, 3)\nlosses.append(total)\n"),
        left="train.py:18 changes total too",
    ),
    IdiomCase(
        "a sum is used in a function",
        SUMMED,
        summing("total += loss.item()", after="show = lambda: total\nlosses.append(show())\n"),
        left="train.py:18 uses total in another function",
    ),
    IdiomCase(
        "a sum is a target of a comprehension",
        SUMMED,
        summing("total += loss.item()", after="losses.append(total)\nnames = [total for total in losses]\n"),
        left="changes total too",
    ),
    IdiomCase(
        "a sum is not known to be whole",
        SUMMED,
        summing("total += x.sum().item()", "total = 0\n"),
        left="it is not known whether total is a whole number",
    ),
    IdiomCase(
        "a sum of another line",
        SUMMED,
        summing("total += loss.item()"),
        line="torch.manual_seed",
    ),
    IdiomCase("no sum", SUMMED, PLAIN),
    IdiomCase(
        "zeros are made on the device",
        MOVED,
        moving("x = x + torch.zeros(4).to(device)"),
        "-    x = x + torch.zeros(4).to(device)\n+    x = x + torch.zeros(4, device=device)\n",
    ),
    IdiomCase(
        "ones are made on the device of another tensor",
        MOVED,
        moving("x = x * torch.ones(\n    1, 4,\n    dtype=torch.float32,\n).to(x.device, non_blocking=True)"),
        "-    ).to(x.device, non_blocking=True)\n+        device=x.device,\n+    )\n",
    ),
    IdiomCase(
        "a range is made on a named device",
        MOVED,
        moving("x = x + 0 * (torch.arange(4)).to('cpu')"),
        "-    x = x + 0 * (torch.arange(4)).to('cpu')\n+    x = x + 0 * torch.arange(4, device='cpu')\n",
    ),
    IdiomCase(
        "a random tensor is moved",
        MOVED,
        moving("x = x + torch.randn(4).to(device)"),
        left="train.py:13 makes a tensor on the CPU and moves it: give torch.randn the device, "
        "where it makes other random",
    ),
    IdiomCase(
        "a tensor is moved and converted",
        MOVED,
        moving("x = x + torch.zeros(4).to(device, torch.float32)"),
        left="train.py:13 makes a tensor on the CPU and moves it: give torch.zeros the device",
    ),
    IdiomCase("a tensor is converted", MOVED, moving("x = x + torch.zeros(4).to(x.dtype)")),
    IdiomCase("a tensor is moved once", MOVED, PLAIN.replace(MODEL, MODEL + "z = torch.zeros(4).to('cpu')\n")),
    IdiomCase(
        "a batch is moved from pinned memory",
        BLOCKING,
        moving("x, y = x.to(device), y.to(device)", PINNED),
        "-    x, y = x.to(device), y.to(device)\n"
        "+    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)\n",
    ),
    IdiomCase(
        "a batch is moved in the call of the model",
        BLOCKING,
        moving("y = y.to(device=device)", PINNED).replace("for x, y in loader", "for _, (x, y) in enumerate(loader)"),
        "-    y = y.to(device=device)\n+    y = y.to(device=device, non_blocking=True)\n",
    ),
    IdiomCase(
        "a batch is moved from other memory",
        BLOCKING,
        moving("x = x.to(device)"),
        left="train.py:13 waits for the copy of a batch: give it non_blocking=True, "
        "with a DataLoader that has pin_memory",
    ),
    IdiomCase(
        "a batch is changed before",
        BLOCKING,
        moving("x = x + 1\nx = x.to(device)", PINNED),
        left="train.py:14 waits for the copy of a batch: give it non_blocking=True, "
        "if x is still in page-locked memory",
    ),
    IdiomCase("a batch is converted", BLOCKING, moving("x = x.to(torch.float32)", PINNED)),
    IdiomCase("a batch is moved to the CPU", BLOCKING, moving("x = x.to('cpu')", PINNED)),
    IdiomCase(
        "an evaluation",
        EVALUATING,
        evaluating(MEAN),
        "+@torch.no_grad()\n",
    ),
    IdiomCase(
        "a validation with another decorator",
        EVALUATING,
        evaluating(MEAN, "validate_epoch", "@(lambda function: function)\n"),
        "+@torch.no_grad()\n",
    ),
    IdiomCase(
        "an accuracy",
        EVALUATING,
        evaluating(
            "hits, seen = 0, 0\nfor x, y in loader:\n    found = model(x).argmax(1)\n"
            "    hits += (found == y).sum().item()\n    seen += len(y)\nreturn hits / max(1, seen)\n",
            "test",
        ),
        "+@torch.no_grad()\n",
    ),
    IdiomCase("an evaluation without gradients", EVALUATING, evaluating(MEAN, mark="@torch.no_grad()\n")),
    IdiomCase("an evaluation within no_grad", EVALUATING, evaluating("with torch.no_grad():\n" + indented(MEAN))),
    IdiomCase("a function of another name", EVALUATING, evaluating(MEAN, "measure")),
    IdiomCase(
        "an evaluation that returns a tensor",
        EVALUATING,
        evaluating(MEAN.replace(".item()", ""))
        .replace("losses.append(", "losses.append(0 + float(")
        .replace("(model, loader))\n", "(model, loader)))\n"),
        left="train.py:10 evaluates and records gradients: write @torch.no_grad() above it, unless train.py:14 keeps",
    ),
    IdiomCase(
        "an evaluation that keeps tensors",
        EVALUATING,
        evaluating("for x, y in loader:\n    kept.append(model(x))\nreturn 1.0\n").replace(
            "losses = []", "losses = []\nkept = []"
        ),
        left="keeps a tensor for a backward pass",
    ),
    IdiomCase(
        "an evaluation that attacks",
        EVALUATING,
        evaluating("for x, y in loader:\n    model(x.requires_grad_())\nreturn 1.0\n"),
        left="unless its requires_grad_ needs gradients",
    ),
    IdiomCase(
        "attention in three lines",
        ATTENTION,
        attending(LINES),
        "-    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(k.shape[-1])\n"
        "-    weights = torch.softmax(scores, dim=-1)\n-    mixed = torch.matmul(weights, v)\n"
        f"+    mixed = F.{CALL})\n",
        line="torch.softmax",
    ),
    IdiomCase(
        "attention in one line",
        ATTENTION,
        attending("return torch.softmax(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5, -1) @ v\n"),
        f"-    return torch.softmax(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5, -1) @ v\n+    return F.{CALL})\n",
    ),
    IdiomCase(
        "attention without scale",
        ATTENTION,
        attending("return (q @ k.mT).softmax(dim=-1) @ v\n", "import torch\n"),
        f"-    return (q @ k.mT).softmax(dim=-1) @ v\n+    return torch.nn.functional.{CALL}, scale=1.0)\n",
    ),
    IdiomCase(
        "attention with another scale",
        ATTENTION,
        attending("w = 0.5 * (q @ k.transpose(-2, -1))\nw2 = F.softmax(w, -1)\nreturn (w2 @ v).flatten(1)\n"),
        "-    w = 0.5 * (q @ k.transpose(-2, -1))\n-    w2 = F.softmax(w, -1)\n-    return (w2 @ v).flatten(1)\n"
        f"+    return F.{CALL}, scale=0.5).flatten(1)\n",
    ),
    IdiomCase(
        "attention whose weights have one name",
        ATTENTION,
        attending(WRITTEN),
        "-    w = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))\n-    w = F.softmax(w, dim=-1)\n-    return w @ v\n"
        f"+    return F.{CALL})\n",
    ),
    IdiomCase(
        "attention with a mask under the same name",
        ATTENTION,
        attending("w = q @ k.mT\nw = w.masked_fill(w > 1, 0.0)\nw = F.softmax(w, -1)\nreturn w @ v\n"),
        left="w is used or changed elsewhere",
    ),
    IdiomCase(
        "attention with a mask on one branch",
        ATTENTION,
        attending("w = q @ k.mT\nif len(w) > 5:\n    w = w + 1\nw = F.softmax(w, -1)\nreturn w @ v\n"),
        left="w is used or changed elsewhere",
    ),
    IdiomCase(
        "attention with dropout",
        ATTENTION,
        attending(
            LINES.replace("mixed = torch.matmul(weights, v)", "mixed = torch.matmul(F.dropout(weights, 0.0), v)")
        ),
        left="train.py:8 may be attention written out",
    ),
    IdiomCase(
        "attention with a mask",
        ATTENTION,
        attending("w = q @ k.transpose(-2, -1) + torch.zeros(5, 5)\nreturn F.softmax(w, -1) @ v\n"),
        left="is not one product of two matrices",
    ),
    IdiomCase(
        "attention whose weights are returned",
        ATTENTION,
        attending("p = F.softmax(q @ k.transpose(-2, -1), -1)\nlist(p)\nreturn p @ v\n"),
        left="p is used or changed elsewhere",
    ),
    IdiomCase(
        "attention whose values change meanwhile",
        ATTENTION,
        attending("p = F.softmax(q @ k.transpose(-2, -1), -1)\nq = None\nreturn p @ v\n"),
        left="train.py:8 uses what it multiplies",
    ),
    IdiomCase(
        "attention by einsum",
        ATTENTION,
        attending("p = F.softmax(q @ k.mT, -1)\nreturn torch.einsum('bhij,bhjd->bhid', p, v)\n"),
        left="p, v) is not one product of two matrices",
    ),
    IdiomCase("a softmax of logits", ATTENTION, attending("w = q @ k.mT\nreturn F.softmax(w, -1)\n")),
    IdiomCase("a softmax of classes", ATTENTION, attending("return F.softmax(q, 1) @ k.mT @ v\n")),
    IdiomCase(
        "a sum of a value that is read already",
        SUMMED,
        summing("value = loss.item()\ntotal += float(value)"),
        left="value is a number already",
    ),
    IdiomCase(
        "an evaluation that differentiates",
        EVALUATING,
        evaluating(
            "from torch.autograd import grad\ntotal = 0.0\nfor x, y in loader:\n    x.requires_grad = True\n"
            "    total += grad(model(x).sum(), x)[0].sum().item()\nreturn total\n"
        ),
        left="needs gradients",
    ),
    IdiomCase(
        "an evaluation by a function that differentiates",
        EVALUATING,
        "from torch.autograd import grad as slope\n\n\ndef residual(model, x):\n"
        "    return slope(model(x).sum(), list(model.parameters()))[0]\n\n\n"
        + evaluating(
            "total = 0.0\nfor x, y in loader:\n    total += residual(model, x).sum().item()\n"
            "    model(x)\nreturn total\n"
        ),
        left="differentiates",
    ),
]
