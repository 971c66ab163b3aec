"""Changes how the program runs, without an edit: what the settings of `ProgramSettings` set.

Most changes must be made before the program makes its loaders and optimizers, so that they are installed with the
probe. A treatment has priority over what the program asks for. One that finds nothing to change, or that the program
cannot run with, leaves the program as it is, and `missed` gives the reason.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from types import CodeType, FunctionType
from typing import Any, Callable, Dict, Iterable

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from .cost import cost
from .modules import parameters_of

OPTIMIZERS = {
    "fused": {"fused": True, "foreach": None},
    "foreach": {"fused": None, "foreach": True},
    "loop": {"fused": None, "foreach": False},
}
"""The arguments of an optimizer for each value of training.optimizer_impl."""
KERNELS = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn"}
"""The fused kernels of attention by the values of performance.sdpa, with their names in torch.backends.cuda."""
ARGUMENTS_OF_DDP = {
    "distributed.bucket_mb": "bucket_cap_mb",
    "distributed.gradient_as_bucket_view": "gradient_as_bucket_view",
}
ON_GPU = ("performance.cudnn_benchmark", "performance.expandable_segments")
ALWAYS = ("performance.cpu_threads", "performance.matmul_precision", "seed")
"""Treatments that apply to any program: the number of threads, and settings of PyTorch as a whole."""
CACHED = "data.cached"
NO_GPU = "the program uses no GPU"
NOTHING = {
    CACHED: "no DataLoader of the program trains, or too few batches were drawn from it",
    "data": "the program makes no DataLoader of a map-style dataset",
    "distributed": "the program makes no DistributedDataParallel",
    "precision=bf16": "no outermost module was called in training",
    "precision=fp32": "the program uses no torch.autocast",
    "performance.channels_last": "no outermost module was given a 4-D floating-point tensor",
    "performance.compile=True": "the outermost modules are compiled already, or none was called in training",
    "performance.compile=False": "the program does not call torch.compile",
    "performance.compile_mode": "nothing is compiled",
    "performance.sdpa": "the program does not call scaled_dot_product_attention",
    "training.optimizer_impl": "the program makes no optimizer of torch.optim that has this implementation",
}
"""Why a treatment was not applied, by its dot-key, its section, or its dot-key and value."""

Arguments = Dict[str, Any]  # of a call, by name


def _set_seed(seed: int) -> None:
    """Sets the seeds of the generators that the programs of PyTorch draw random numbers from."""
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


class Treatments:
    """The changes of one process of the program."""

    def __init__(self, values: dict[str, Any]) -> None:
        """`values` are by dot-key."""
        self._values = values
        self._applied: set[str] = set()
        self._obstacles: dict[str, str] = {}
        """Why something could not be changed, by dot-key."""
        self._refusals = 0
        self._loaders: dict[int, list[str]] = {}
        """The treatments of the DataLoaders that the program has made, by the identities of their samplers."""
        self._format: torch.memory_format | None = None
        self._device = ""
        """The type of the device of the outermost modules."""
        self._compiled = False
        self.changes_calls = False
        """Whether `call` does anything of its own."""
        self.trains = True
        """Whether the program trains on what its DataLoaders give, and they are not just drawn from."""
        self._widens = True
        """Whether the outermost modules have no bf16 parameters, so that bf16 outputs come from the treatment."""

    def install(self) -> None:
        """Installs what must be in place before the program makes its loaders, modules and optimizers."""
        values = self._values
        self._change_arguments()
        if values.get("performance.compile") is False or "performance.compile_mode" in values:
            stand_in(torch, "compile", self._compile)
        if (channels_last := values.get("performance.channels_last")) is not None:
            self._format = torch.channels_last if channels_last else torch.contiguous_format
            stand_in(torch.optim.Optimizer, "add_param_group", self._add_parameters)
            stand_in(DistributedDataParallel, "__init__", self._wrap_module)
        if kernels := values.get("performance.sdpa"):
            self._choose_kernels(kernels)
        self.changes_calls = self._format is not None or values.get("precision") == "bf16"
        self._set_up()
        self.apply_again()

    def _change_arguments(self) -> None:
        """Changes the arguments with which the program makes its objects."""
        values = self._values
        if any(key.startswith("data.") for key in values.keys() - {CACHED}):
            self._change(DataLoader, self._loader)
        if "training.optimizer_impl" in values:
            for cls in vars(torch.optim).values():
                if inspect.isclass(cls) and {"fused", "foreach"} <= set(inspect.signature(cls).parameters):
                    self._change(cls, self._optimizer)
        if ARGUMENTS_OF_DDP.keys() & values.keys():
            self._change(DistributedDataParallel, self._ddp)
        if "precision" in values:
            self._change(torch.autocast, self._autocast)
            self._change(getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler, self._scaler)

    def _set_up(self) -> None:
        """Sets PyTorch's own settings, and keeps the program from changing them. A seed it may set again."""
        values = self._values
        if (seed := values.get("seed")) is not None:
            _set_seed(seed)
        if threads := values.get("performance.cpu_threads"):
            _fix_setting(torch, "set_num_threads", threads)
        if precision := values.get("performance.matmul_precision"):
            _fix_setting(torch, "set_float32_matmul_precision", precision)

    def apply_again(self) -> None:
        """Applies again what the program may have changed since."""
        if (benchmark := self._values.get("performance.cudnn_benchmark")) is not None:
            torch.backends.cudnn.benchmark = benchmark

    def apply_to(self, roots: list[torch.nn.Module], *, updated: bool = True) -> None:
        """Applies what concerns the outermost modules, once they are known.

        `updated`: an optimizer has their parameters that need gradients, and they are laid out already.
        """
        for root in roots:
            self._device = next((each.device.type for each in parameters_of(root)), self._device)
            self._widens = self._widens and all(each.dtype is not torch.bfloat16 for each in parameters_of(root))
            self._lay_out(each for each in parameters_of(root) if not (updated and each.requires_grad))
            if self._values.get("performance.compile") and not is_compiled(root) and hasattr(root, "compile"):
                root.compile()
                self._applied.add("performance.compile")
            self._compiled = self._compiled or is_compiled(root)

    def call(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls an outermost module. What the treatments change about that is not the time of the probe."""
        if not self.changes_calls:
            return call(module, *args, **kwargs)
        return cost.outside(self._call_changed)(call, module, args, kwargs)

    def _call_changed(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self._format:
            args, kwargs = self._laid_out(args), self._laid_out(kwargs)
        if self._values.get("precision") != "bf16" or self._device not in ("cpu", "cuda"):
            return call(module, *args, **kwargs)
        self._applied.add("precision")
        with torch.autocast(self._device, dtype=torch.bfloat16):
            found = call(module, *args, **kwargs)
        return _widened(found) if self._widens else found

    @property
    def keeps_batches(self) -> bool:
        """Whether the first batches of training are kept and given again."""
        return bool(self._values.get(CACHED))

    def note(self, key: str) -> None:
        """Notes that a treatment was applied elsewhere."""
        self._applied.add(key)

    def draw(self, sampler: int) -> None:
        """Notes that training draws from the DataLoader whose sampler has this identity."""
        self._applied.update(self._loaders.pop(sampler, ()))

    def missed(self) -> dict[str, str]:
        """Returns the treatments that were not applied, by dot-key, each with the reason."""
        if torch.cuda.is_initialized():
            self._applied.update(ON_GPU)
        if self._compiled:  # what a compiled function calls is not seen
            self._applied.add("performance.sdpa")
        if self._device == "cpu" and (kernels := self._values.get("performance.sdpa")) in ("efficient", "cudnn"):
            self._obstacles["performance.sdpa"] = f"PyTorch has no {kernels} attention for a CPU"
            self._applied.discard("performance.sdpa")
        return {
            key: self._obstacles.get(key) or self._reason(key, value)
            for key, value in self._values.items()
            if key not in self._applied and key not in ALWAYS
        }

    def _reason(self, key: str, value: Any) -> str:
        if key in ON_GPU:
            return NO_GPU
        found = NOTHING.get(f"{key}={value}") or NOTHING.get(key) or NOTHING.get(key.partition(".")[0])
        return found or "the program has nothing that it applies to"

    # What changes the arguments of a call. Each returns the treatments that it applies; none leaves the call as it is.

    def _loader(self, given: Arguments) -> list[str]:
        """Changes the arguments of a DataLoader. The samples of an IterableDataset depend on its workers, which only
        matters if something is trained on them."""
        own = self._values.keys() - {CACHED}
        values = {key.partition(".")[2]: self._values[key] for key in own if key.startswith("data.")}
        if isinstance(given.get("dataset"), IterableDataset) and self.trains:
            reason = "the samples of an IterableDataset depend on its workers"
            self._obstruct(reason, *(f"data.{each}" for each in values))
            return []
        if "workers" in values:
            given["num_workers"] = values["workers"]
            if not values["workers"]:
                given.update(prefetch_factor=None, persistent_workers=False, timeout=0, multiprocessing_context=None)
        if values.get("pin_memory") and not torch.cuda.is_available():
            self._obstruct("there is no GPU to copy batches to", "data.pin_memory")
            del values["pin_memory"]
        given.update({"pin_memory": values["pin_memory"]} if "pin_memory" in values else {})
        for key, argument in (("prefetch", "prefetch_factor"), ("persistent_workers", "persistent_workers")):
            if key in values and given.get("num_workers"):
                given[argument] = values[key]
            elif key in values:
                self._obstruct("the DataLoaders of the program have no workers", f"data.{key}")
                del values[key]
        return [f"data.{each}" for each in values]

    def _optimizer(self, given: Arguments) -> list[str]:
        if iter(parameters := given["params"]) is parameters:
            given["params"] = list(parameters)  # so that they can be read twice
        given.update(OPTIMIZERS[self._values["training.optimizer_impl"]])
        return ["training.optimizer_impl"]

    def _ddp(self, given: Arguments) -> list[str]:
        keys = [key for key in ARGUMENTS_OF_DDP if key in self._values]
        given.update({ARGUMENTS_OF_DDP[key]: self._values[key] for key in keys})
        return keys

    def _autocast(self, given: Arguments) -> list[str]:
        """Makes the program's own contexts compute in the type of the treatment, also those inside of its modules."""
        if not given.get("enabled", True):
            return []
        given.update({"enabled": False} if self._values["precision"] == "fp32" else {"dtype": torch.bfloat16})
        return ["precision"]

    def _scaler(self, given: Arguments) -> list[str]:
        """Switches a gradient scaler off, which only fp16 needs."""
        given["enabled"] = False
        return ["precision"]

    def _change(self, cls: Any, change: Callable[[Arguments], list[str]]) -> None:
        """Makes `change` change the arguments with which objects of `cls` are made.

        If the class refuses the changed arguments, the object is made as the program asks for.
        """
        original = cls.__init__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def changed(own: Any, *args: Any, **kwargs: Any) -> None:
            try:
                given = signature.bind(own, *args, **kwargs).arguments
                given.pop(next(iter(signature.parameters)))
                given.update(given.pop("kwargs", {}))
                asked = dict(given)
                keys = change(given)
            except TypeError:  # the program calls it wrongly, and the class says so
                keys = []
            if not keys:
                original(own, *args, **kwargs)
                return
            refusals = self._refusals
            try:
                original(own, **given)
            except (RuntimeError, TypeError, ValueError) as error:
                self._refusals += 1
                self._obstruct(f"{cls.__name__} refuses it: {error}", *keys)
                if "params" in given:  # which may have been an iterator
                    asked["params"] = given["params"]
                original(own, **asked)
            if self._refusals == refusals:  # also of the class that it is derived from
                self._keep(own, keys)

        cls.__init__ = changed

    def _keep(self, made: Any, keys: list[str]) -> None:
        """Records which treatments an object was made with. Those of a DataLoader apply when it is drawn from."""
        if isinstance(made, torch.optim.Optimizer):
            cls = type(made)
            if steps_by_itself(cls):
                self._obstruct(f"{cls.__name__} has a step of its own", *keys)
                return
        sampler = getattr(made, "_index_sampler", None)
        if sampler is None:
            self._applied.update(keys)
        else:
            self._loaders[id(sampler)] = keys

    def _obstruct(self, reason: str, *keys: str) -> None:
        for key in keys:
            self._obstacles.setdefault(key, reason)

    # What stands in for functions of torch; `call` is the original.

    def _compile(self, call: Callable[..., Any], model: Any = None, **kwargs: Any) -> Any:
        if self._values.get("performance.compile") is False:
            self._applied.add("performance.compile")
            return model if model is not None else lambda function: function
        if kwargs.get("backend", "inductor") == "inductor":
            kwargs.pop("options", None)  # torch.compile takes only one of the two
            kwargs["mode"] = self._values["performance.compile_mode"]
            self._applied.add("performance.compile_mode")
        return call(model, **kwargs)

    def _add_parameters(self, call: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Lays out the parameters before the optimizer makes a state for them, which gets the same layout."""
        call(optimizer, *args, **kwargs)
        self._lay_out(optimizer.param_groups[-1]["params"])

    def _wrap_module(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Lays out the parameters before DDP makes its buckets, in which the gradients get the same layout."""
        module = kwargs.get("module", args[1] if len(args) > 1 else None)
        if isinstance(module, torch.nn.Module):
            self._lay_out(parameters_of(module))
        call(*args, **kwargs)

    def _choose_kernels(self, kernels: str) -> None:
        for value, name in KERNELS.items():
            _fix_setting(torch.backends.cuda, f"enable_{name}_sdp", kernels in (value, "fused"))
        _fix_setting(torch.backends.cuda, "enable_math_sdp", True)
        for module in (getattr(torch.nn, "attention", None), torch.backends.cuda):
            for name in ("sdpa_kernel", "sdp_kernel"):
                if hasattr(module, name):
                    setattr(module, name, _without_choice(getattr(module, name)))
        stand_in(torch.nn.functional, "scaled_dot_product_attention", self._attend)

    def _attend(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            self._applied.add("performance.sdpa")
        return call(*args, **kwargs)

    # The memory format.

    def _lay_out(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._format:
            for each in tensors:
                if type(each) in (torch.Tensor, torch.nn.Parameter) and each.dim() == 4:
                    each.data = each.data.contiguous(memory_format=self._format)

    def _laid_out(self, found: Any) -> Any:
        """Returns the inputs of a module with the 4-D tensors in them in the memory format."""
        if type(found) is torch.Tensor and found.dim() == 4 and found.is_floating_point():
            self._applied.add("performance.channels_last")
            return found.contiguous(memory_format=self._format or torch.contiguous_format)
        if type(found) in (tuple, list):
            return type(found)(self._laid_out(each) for each in found)
        return {key: self._laid_out(each) for key, each in found.items()} if type(found) is dict else found


is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", None) or torch._dynamo.is_compiling

is_dynamo_compiling: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", is_compiling)
"""The same in less time, where a hook would otherwise read what changes: torch.compile compiles again when it does."""


def is_traced() -> bool:
    """Tells whether torch.compile runs code of the program to compile it."""
    guards = sys.modules.get("torch._guards")  # which torch.compile imports
    return guards is not None and guards.TracingContext.try_get() is not None


def is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def steps_by_itself(cls: type) -> bool:
    """Tells whether a class of optimizers updates by code of its own, which has no other implementation."""
    return not inspect.unwrap(cls.step).__module__.startswith("torch.optim")  # type: ignore[attr-defined]


def compiled_graphs() -> int:
    """Returns the number of graphs that torch.compile has compiled in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


def keep_from_compilation() -> None:
    """Keeps torch.compile from compiling the functions of the probe when a compiled function calls them.

    Between two graphs of a function, torch.compile compiles every Python function that is called.
    """
    if "torch._dynamo" not in sys.modules:  # every optimizer imports it
        return
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:  # another release of PyTorch
        return

    package = __package__ or ""
    found = [
        value for name in list(sys.modules) if name.startswith(package) for value in vars(sys.modules[name]).values()
    ]
    while found:
        each = found.pop()
        if isinstance(each, CodeType):
            skip_code(each)
            found += each.co_consts
        elif isinstance(each, (staticmethod, property)):
            found.append(each.fget if isinstance(each, property) else each.__func__)
        elif isinstance(each, (FunctionType, functools._lru_cache_wrapper, type)) and each.__module__.startswith(
            package
        ):
            found += vars(each).values() if isinstance(each, type) else [inspect.unwrap(each).__code__]


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside of DistributedDataParallel, torch.compile and the like, or the module itself."""
    wrapped = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
    return unwrapped(wrapped) if isinstance(wrapped, torch.nn.Module) else module


def stand_in(owner: Any, name: str, around: Callable[..., Any], original: Callable[..., Any] | None = None) -> None:
    """Replaces a function of a module or a class with `around`, which gets the original as its first argument: what has
    the name now, if no other one is given."""
    call = getattr(owner, name) if original is None else original

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and cost.is_timed:
            return cost.time(around, call, args, kwargs)
        return around(call, *args, **kwargs)

    setattr(owner, name, wrapper)


def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook for torch to call, whose time can be measured."""

    def wrapper(*args: Any) -> Any:
        if not is_dynamo_compiling() and cost.is_timed:
            return cost.time(lambda _, *args: hook(*args), hook, args, {})
        return hook(*args)

    return wrapper


def _widened(found: Any) -> Any:
    """Returns the outputs of a module with bf16 tensors in fp32, as without autocast, for a loss in fp32."""
    if isinstance(found, torch.Tensor):
        return found.float() if found.dtype is torch.bfloat16 else found
    if isinstance(found, tuple) and hasattr(found, "_fields"):
        return type(found)(*map(_widened, found))
    if type(found) in (tuple, list):
        return type(found)(map(_widened, found))
    if isinstance(found, dict):  # also that of a library, such as the ModelOutput of transformers
        for key, each in list(found.items()):
            if (wide := _widened(each)) is not each:
                found[key] = wide
    return found


def _fix_setting(owner: Any, name: str, value: Any) -> None:
    """Sets a setting of torch by the function `name`, if there is one, and keeps the program from changing it."""
    if hasattr(owner, name):
        getattr(owner, name)(value)
        setattr(owner, name, _ignore)


def _ignore(*_: Any, **__: Any) -> None:
    """Stands in for what the program must not change."""


def _without_choice(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement, with the same attributes, for a function whose context chooses kernels."""

    def no_choice(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    no_choice.__dict__.update(vars(choose))  # torch.compile reads __wrapped__
    return no_choice
