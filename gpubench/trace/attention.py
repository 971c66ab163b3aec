"""Finds attention in a trace: fused, or in separate operators, with sizes and backend.

Attention in separate operators is a softmax between two batched matrix products, and its gradient. If shapes were
recorded they decide: the products have as many scores as the softmax. Otherwise the order decides: on one stream, or in
a trace without device work on one thread, there is only elementwise work between them.

For calls of scaled_dot_product_attention, `obstacles` names the conditions of the fused kernels that the inputs do not
meet.
Source: PyTorch's conditions in aten/src/ATen/native/transformers/sdp_utils_cpp.h and cuda/sdp_utils.cpp (2.13). Other
conditions, such as which backends are enabled, are not in a trace.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Literal

import msgspec
import numpy as np

from gpubench.hardware import AMPERE
from gpubench.trace.columns import (
    MISSING,
    DeviceProperties,
    Ids,
    Signature,
    Tensor,
    Trace,
    WorkKind,
    at,
    flag,
    tensor,
    tensors,
)
from gpubench.trace.families import MOVES_MEMORY, family
from gpubench.trace.names import transfer
from gpubench.trace.operators import only_moves_memory
from gpubench.trace.phases import Phases
from gpubench.trace.profile import Attention, Operator, RankProfile
from gpubench.trace.slices import ProgramSlices, UserFrames, nearest, reaching

QUERY, KEY, VALUE, MASK, DROPOUT, CAUSAL = range(6)
GQA = 8  # in the math backend's operator, which has a dropout_mask before scale

HALF = ("float16", "bfloat16")
LARGEST_HEAD = 256
FLASH, EFFICIENT, CPU = "flash attention", "memory-efficient attention", "the fused kernel for CPUs"


def obstacles(signature: Signature, device: DeviceProperties | None, *, on_cpu: bool) -> list[str]:
    """A sentence for each condition that a call's inputs do not meet; none if shapes were not recorded.

    `signature` is that of aten::_scaled_dot_product_attention_math; `device` is the GPU, None if it is not described.
    """
    query, key, value = (tensor(signature, place) for place in (QUERY, KEY, VALUE))
    if query is None or key is None or value is None:
        return []
    found = list(_of_any(signature, query, key, value))
    if any(len(one.shape) != 4 for one in (query, key, value)):
        return found
    mask = tensor(signature, MASK)
    if on_cpu:
        return [*found, *_on_cpu(signature, query, key, value, mask)]
    rocm = device is not None and device.name.startswith("AMD")
    capability = device.compute_capability if device is not None and not rocm else None
    found += _of_flash(signature, query, key, value, mask, capability)
    return [*found, *_of_efficient(query, key, value, mask, capability)]


def _of_any(signature: Signature, query: Tensor, key: Tensor, value: Tensor) -> Iterator[str]:
    shapes = " ".join(str(list(one.shape)) for one in (query, key, value))
    if any(len(one.shape) != 4 for one in (query, key, value)):
        yield f"every fused kernel takes inputs of 4 dimensions, [batch, heads, length, head size]; these are {shapes}"
        return
    if len({one.shape[0] for one in (query, key, value)}) > 1:
        yield f"every fused kernel takes one batch size for queries, keys and values; these are {shapes}"
    if len({one.shape[1] for one in (query, key, value)}) > 1 and flag(signature, GQA) is False:
        yield f"without enable_gqa every fused kernel takes as many heads of keys as of queries; these are {shapes}"
    if any(one.strides and one.strides[-1] != 1 and one.shape[-1] > 1 for one in (query, key, value)):
        yield "every fused kernel takes inputs whose last dimension is contiguous (stride 1)"


def _of_flash(
    signature: Signature,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    capability: tuple[int, int] | None,
) -> Iterator[str]:
    if mask is not None:
        yield f"{FLASH} takes no attn_mask, and one of {list(mask.shape)} ({mask.dtype}) was given"
    if query.dtype not in HALF:
        yield f"{FLASH} takes float16 and bfloat16, not {query.dtype}"
    heads = sorted({one.shape[-1] for one in (query, key, value)})
    if len(heads) > 1:
        yield f"{FLASH} takes one head size, not {' and '.join(map(str, heads))}"
    elif heads[0] > LARGEST_HEAD:
        yield f"{FLASH} takes head sizes up to {LARGEST_HEAD}, not {heads[0]}"
    if flag(signature, CAUSAL) and query.shape[-2] != key.shape[-2]:
        yield f"{FLASH} takes is_causal for as many queries as keys, not for {query.shape[-2]} and {key.shape[-2]}"
    if capability is not None and capability < AMPERE:
        yield f"{FLASH} needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"


def _of_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, capability: tuple[int, int] | None
) -> Iterator[str]:
    if query.dtype not in (*HALF, "float32"):
        yield f"{EFFICIENT} takes float16, bfloat16 and float32, not {query.dtype}"
        return
    old = capability is not None and capability < AMPERE
    if query.dtype == "bfloat16" and old:
        yield f"{EFFICIENT} takes bfloat16 from compute capability 8.0 on"
        return
    if query.shape[-1] != key.shape[-1]:
        yield f"{EFFICIENT} takes one head size for queries and keys, not {query.shape[-1]} and {key.shape[-1]}"
    multiple = 8 if query.dtype in HALF else 1 if old else 4
    odd = sorted({one.shape[-1] for one in (query, value) if one.shape[-1] % multiple})
    if odd:
        yield f"{EFFICIENT} takes head sizes that are multiples of {multiple} in {query.dtype}, not {odd[0]}"
    if mask is not None and mask.strides and mask.strides[-1] != 1:
        yield f"{EFFICIENT} takes masks whose last dimension is contiguous (stride 1)"


def _on_cpu(signature: Signature, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Iterator[str]:
    dropout = _number(signature, DROPOUT)
    if dropout is not None and dropout > 0:
        yield f"{CPU} takes no dropout, and dropout_p is {dropout:g}"
    if len({one.shape[-1] for one in (query, key, value)}) > 1:
        yield f"{CPU} takes one head size for queries, keys and values"
    if mask is not None and not _is_broadcast(mask, query, key):
        yield f"{CPU} takes masks of 2 or 4 dimensions that broadcast to the scores, not {list(mask.shape)}"


def _is_broadcast(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    scores = (*query.shape[:2], query.shape[-2], key.shape[-2])
    if len(mask.shape) not in (2, 4):
        return False
    return all(size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(scores), strict=False))


def _number(signature: Signature, argument: int) -> float | None:
    try:
        return float(str(signature.concrete[argument]))
    except (IndexError, ValueError):
        return None


Role = Literal["product", "other product", "softmax", "softmax backward", "elementwise", "other", "view"]
"""The role of a piece of work. A view has none, or leaves it to an operator within."""

REACH = 64
"""The most pieces of work between a softmax and one of its products. Masks and position biases need about 20."""
FARTHEST = 20 * REACH  # including views
MATH = "aten::_scaled_dot_product_attention_math"

_BATCHED = re.compile(r"aten::(bmm|baddbmm_?)$")
_PRODUCT = re.compile(r"aten::(mm|addmm_?|matmul|linear|.*convolution.*)$")
_SOFTMAX = re.compile(r"(?i)(?<!log)(?<!log_)soft_?max")
_LOG = re.compile(r"LogSoftMax|softmax_warp_\w+<[^<>]*\d, true")  # names of PyTorch's kernels for log_softmax
_BACKWARD = re.compile(r"(?i)backward|bwd|grad")


@dataclass
class _Piece:
    """A kernel, or in a trace without device work an operator."""

    role: Role
    time: int
    slice: int
    """The operator as a CPU slice; -1 if unknown."""
    sizes: Sequence[Tensor]
    """The inputs; empty if they were not recorded."""

    @property
    def largest(self) -> Tensor:
        """The shape of a softmax's scores, the largest input; a mask broadcasts to it. Sizes must be known."""
        return max(self.sizes, key=lambda one: one.elements)


@dataclass
class _Found:
    """One softmax with its products."""

    softmax: _Piece
    products: list[_Piece] = field(default_factory=list)
    between: list[_Piece] = field(default_factory=list)


def attention(program: ProgramSlices, phases: Phases) -> list[Attention]:
    """Finds the window's attention, one entry for each set of sizes, most time first."""
    if not any(map(_SOFTMAX.search, program.trace.names)):
        return []
    found = [one for line in _lines(program) for one in _in_order(line)]
    if not found:
        return []
    math = _math(program, phases)
    frames, inside = UserFrames.of(program), nearest(program.nest, phases.calls.mask)
    total: dict[tuple[object, ...], Attention] = {}
    for one in found:
        call = int(math[one.softmax.slice]) if one.softmax.slice >= 0 else MISSING
        entry = _entry(program, one, call)
        if one.softmax.slice >= 0 and one.softmax.role == "softmax":
            called = int(inside[one.softmax.slice])
            module = phases.calls.names[phases.calls.of[called]] if called >= 0 else ""
            entry = msgspec.structs.replace(entry, where=frames.at(one.softmax.slice), module=module)
        key = (entry.groups, entry.queries, entry.keys, entry.head_size, entry.dtype, entry.fallback)
        total[key] = _sum(total[key], entry) if key in total else entry
    return sorted(total.values(), key=lambda entry: -entry.total)


def of_attention(operator: Operator, rank: RankProfile) -> bool:
    """Whether an operator processes the scores of such attention, by its shapes, or by its name if none were
    recorded."""
    if not operator.shapes:
        return bool(rank.attention and (_SOFTMAX.search(operator.name) or _BATCHED.match(operator.name)))
    ends = [f"{a}, {b}]" for one in rank.attention for a, b in ((one.queries, one.keys), (one.keys, one.queries))]
    handles_scores = any(f"{before}{end}" in operator.shapes for end in ends for before in (" ", "["))
    return handles_scores or is_attention_product(operator, rank)


def is_attention_product(operator: Operator, rank: RankProfile) -> bool:
    """Whether an operator is one of the products of such attention, by its shapes."""
    if not _BATCHED.match(operator.name):
        return False
    sizes = {int(size) for size in re.findall(r"\d+", operator.shapes)}
    known = [{one.groups, one.queries, one.keys, one.head_size} - {None} for one in rank.attention]
    return any(dimensions and dimensions <= sizes for dimensions in known)


def _lines(program: ProgramSlices) -> Iterator[list[_Piece]]:
    """Yields sequences of work: of each stream, or in a trace without device work of each thread."""
    trace = program.trace
    sizes = [[one for one in tensors(signature) if one.shape] for signature in trace.signatures]
    if trace.cpu_only:
        roles = _roles(program)
        for thread in range(len(trace.threads)):
            here = np.flatnonzero(program.operators & program.inside & (trace.cpu.thread == thread)).tolist()
            yield [_Piece(roles[one], int(program.own_time[one]), one, _sizes_of(program, one, sizes)) for one in here]
        return
    device = trace.device
    works = np.flatnonzero(program.started & (device.kind != WorkKind.SET))
    streams = device.device[works].astype(np.int64) << 32 | device.stream[works]
    for stream in np.unique(streams).tolist():
        yield list(_joined(_work(program, one, sizes) for one in works[streams == stream].tolist()))


def _sizes_of(program: ProgramSlices, slice_: int, sizes: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    signature = int(program.trace.cpu.signature[slice_])
    return sizes[signature] if signature >= 0 else ()


def _roles(program: ProgramSlices) -> list[Role]:
    """The role of each slice; a slice has none if it leaves the work to a product or softmax within."""
    trace = program.trace
    roles = [_role_of_operator(trace.names[name]) for name in trace.cpu.name.tolist()]
    known = np.array([role not in ("other", "elementwise") for role in roles], np.bool_) & program.operators
    parents = program.nest.parent[known]
    around = reaching(program.nest, parents[parents >= 0])
    views = (np.array(roles) == "other") | around
    return ["view" if is_view else role for role, is_view in zip(roles, views.tolist(), strict=True)]


def _joined(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Joins consecutive kernels that one call of an operator launched."""
    for _, same in groupby(pieces, key=lambda piece: (piece.slice, piece.slice < 0 or piece.role)):
        first, *others = same
        if first.slice < 0:
            yield from (first, *others)
        else:
            yield replace(first, time=first.time + sum(one.time for one in others))


def _work(program: ProgramSlices, work: int, sizes: Sequence[Sequence[Tensor]]) -> _Piece:
    trace, owner = program.trace, int(program.owner[work])
    time = int(program.work_time[work])
    if owner < 0:
        return _Piece(_role_of_work(trace, work), time, owner, ())
    role = _role_of_operator(trace.names[trace.cpu.name[owner]])
    if role in ("other", "elementwise"):
        role = _role_of_work(trace, work)
        role = "other product" if role == "product" else role
    return _Piece(role, time, owner, _sizes_of(program, owner, sizes))


@cache
def _role_of_operator(name: str) -> Role:
    if _BATCHED.match(name):
        return "product"
    if _PRODUCT.match(name):
        return "other product"
    if _SOFTMAX.search(name) and name != "aten::softmax":
        return "softmax backward" if _BACKWARD.search(name) else "softmax"
    return "elementwise" if only_moves_memory(name) else "other"


def _role_of_work(trace: Trace, work: int) -> Role:
    name = trace.names[trace.device.name[work]]
    if trace.device.kind[work] == WorkKind.COPY:
        return "other" if transfer(name) else "elementwise"
    return _role_of_kernel(name)


@cache
def _role_of_kernel(name: str) -> Role:
    known = family(name)
    if known == "softmax" or (name.startswith("triton_") and _SOFTMAX.search(name)):
        if _LOG.search(name):
            return "other"
        return "softmax backward" if _BACKWARD.search(name) else "softmax"
    if known == "product":
        return "product"
    return "elementwise" if known in MOVES_MEMORY else "other"


def _in_order(line: Sequence[_Piece]) -> Iterator[_Found]:
    """Yields each softmax that has products on both sides; a product belongs to one softmax."""
    taken: set[int] = set()
    for place, piece in enumerate(line):
        if piece.role not in ("softmax", "softmax backward"):
            continue
        each = 2 if piece.role == "softmax backward" else 1
        before = _products(line, range(place - 1, max(-1, place - 1 - FARTHEST), -1), piece, each, taken)
        after = _products(line, range(place + 1, min(len(line), place + 1 + FARTHEST)), piece, each, taken)
        if not before or not after:
            continue
        taken.update(before, after)
        between = [
            line[one]
            for one in range(min(before), max(after))
            if one != place and one not in taken and _handles_scores(line[one], piece)
        ]
        yield _Found(piece, [line[one] for one in (*before, *after)], between)


def _products(line: Sequence[_Piece], places: range, softmax: _Piece, most: int, taken: set[int]) -> list[int]:
    """The nearest products of the softmax in one direction, at most `most`."""
    found: list[int] = []
    passed = 0
    for place in places:
        piece = line[place]
        passed += piece.role != "view"
        if passed > REACH or place in taken or piece.role in ("softmax", "softmax backward") or len(found) == most:
            break
        fits = _fits(piece, softmax)
        if piece.role == "product" and fits is not False:
            found.append(place)
        elif piece.role in ("product", "other product", "other") and (fits is None or found):
            break
    return found


def _fits(product: _Piece, softmax: _Piece) -> bool | None:
    """Whether a product makes or takes the softmax's scores; None if shapes were not recorded."""
    if not softmax.sizes or (not product.sizes and product.slice < 0):
        return None
    if len(product.sizes) < 2:
        return False
    scores = softmax.largest
    if len(scores.shape) < 2 or not scores.elements:
        return False
    return scores.elements in (*(factor.elements for factor in product.sizes[-2:]), _result(product))


def _result(product: _Piece) -> int | None:
    """The number of elements of [..., M, K] x [..., K, N]; None if these are not matrices."""
    a, b = product.sizes[-2:]
    if len(a.shape) < 2 or len(b.shape) < 2:
        return None
    return a.elements // max(a.shape[-1], 1) * b.shape[-1]


def _handles_scores(piece: _Piece, softmax: _Piece) -> bool:
    """Whether work between the products is attention's: of the scores' size, or if unknown, elementwise."""
    if piece.sizes and softmax.sizes:
        is_scores = any(one.elements == softmax.largest.elements for one in piece.sizes)
        return is_scores and piece.role in ("elementwise", "other", "view")
    return piece.role == "elementwise"


def _math(program: ProgramSlices, phases: Phases) -> Ids:
    """For each slice, the call of SDPA's math backend that contains it, or whose gradient it computes, or -1."""
    around = nearest(program.nest, program.named({MATH}))
    return np.where(around >= 0, around, at(around, phases.evaluated))


def _entry(program: ProgramSlices, found: _Found, call: int) -> Attention:
    products, softmax = sum(one.time for one in found.products), found.softmax.time
    elementwise = sum(one.time for one in found.between)
    is_backward = found.softmax.role == "softmax backward"
    groups, queries, keys, head_size = _dimensions(found)
    product = found.products[0].sizes
    return Attention(
        groups=groups,
        queries=queries,
        keys=keys,
        head_size=head_size,
        dtype=product[-1].dtype if product else "",
        calls=int(not is_backward),
        backward_calls=int(is_backward),
        products=products,
        softmax=softmax,
        elementwise=elementwise,
        backward=products + softmax + elementwise if is_backward else 0,
        fallback=call >= 0,
        obstacles=_obstacles(program, call),
    )


def _dimensions(found: _Found) -> tuple[int | None, int | None, int | None, int | None]:
    """Groups, queries, keys and the head size.

    The head size is the inner size of the product that makes the scores, and of the backward product that makes the
    gradient of the probabilities.
    """
    if not found.softmax.sizes or len(found.softmax.largest.shape) < 2:
        return None, None, None, None
    scores = found.softmax.largest
    queries, keys = scores.shape[-2:]
    makes_scores = (one for one in found.products if len(one.sizes) > 1 and _result(one) == scores.elements)
    head_sizes = [one.sizes[-2].shape[-1] for one in makes_scores]
    return scores.elements // max(queries * keys, 1), queries, keys, head_sizes[0] if head_sizes else None


def _obstacles(program: ProgramSlices, call: int) -> list[str]:
    trace = program.trace
    signature: Signature | None = None
    if call >= 0 and trace.cpu.signature[call] >= 0:
        signature = trace.signatures[trace.cpu.signature[call]]
    if signature is None:
        return []
    used = trace.devices[0] if trace.devices and not trace.cpu_only else None
    return obstacles(signature, used, on_cpu=trace.cpu_only)


def _sum(a: Attention, b: Attention) -> Attention:
    return Attention(
        groups=a.groups,
        queries=a.queries,
        keys=a.keys,
        head_size=a.head_size,
        dtype=a.dtype,
        calls=a.calls + b.calls,
        backward_calls=a.backward_calls + b.backward_calls,
        products=a.products + b.products,
        softmax=a.softmax + b.softmax,
        elementwise=a.elementwise + b.elementwise,
        backward=a.backward + b.backward,
        fallback=a.fallback,
        obstacles=list(dict.fromkeys([*a.obstacles, *b.obstacles])),
        where=a.where or b.where,
        module=a.module or b.module,
    )
