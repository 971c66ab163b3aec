"""Stand-ins for the CUDA driver and the pynvml module: made-up GPUs that answer some queries and refuse the rest."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


GPUS = (
    {
        "UUID": "GPU-aaaa1111-0000-0000-0000-000000000000",
        "Name": "NVIDIA H200",
        "MemoryInfo": SimpleNamespace(total=150_754_820_096, used=1_000_000_000),
        "CudaComputeCapability": (9, 0),
    },
    {
        "UUID": "GPU-aaaa2222-0000-0000-0000-000000000000",
        "Name": "NVIDIA H200",
        "MemoryInfo": SimpleNamespace(total=150_754_820_096, used=2_000_000_000),
        "CudaComputeCapability": (9, 0),
    },
    {
        "UUID": "GPU-bbbb3333-0000-0000-0000-000000000000",
        "Name": "NVIDIA GB10",
        "CudaComputeCapability": (12, 1),
    },
)
MIG = {
    "UUID": "MIG-cccc4444-0000-0000-0000-000000000000",
    "Name": "NVIDIA H200 MIG 1g.18gb",
    "MemoryInfo": SimpleNamespace(total=18_000_000_000),
}


class FakeDriver:
    """The driver's functions, by the C names that ctypes calls, for GPUs in the order in which CUDA numbers them."""

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = gpus

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, room: int, device: Any) -> int:  # noqa: N802
        name.value = self.gpus[device.value]["Name"].encode()[: room - 1]
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:  # noqa: N802
        known = self.gpus[device.value].get("MemoryInfo")
        memory._obj.value = known.total if known else 0
        return 0

    def cuDeviceGetUuid(self, uuid: Any, device: Any) -> int:  # noqa: N802
        uuid[:] = list(bytes.fromhex(self.gpus[device.value]["UUID"].partition("-")[2].replace("-", "")))
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, device: Any) -> int:  # noqa: N802
        major, minor = self.gpus[device.value].get("CudaComputeCapability", (9, 0))
        value._obj.value = {75: major, 76: minor}[which]
        return 0


class FakeNvml(ModuleType):
    """`nvmlDeviceGetX(handle, *arguments)` answers entry X of the GPU, called with the arguments if it is a function.

    A GPU without that entry raises NVMLError, as NVML does for what a device does not support. Without `driver`,
    nvmlInit raises. `users` counts inits not yet shut down.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *gpus: dict[str, Any], driver: bool = True) -> None:
        super().__init__("pynvml")
        self.gpus = [gpu | {"Index": index} for index, gpu in enumerate(gpus)]
        self.driver = driver
        self.users = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise NVMLError("NVML Shared Library Not Found")
        self.users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        if index >= len(self.gpus):
            raise NVMLError("Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:  # noqa: N802
        for handle in (*self.gpus, MIG):
            if handle["UUID"] == uuid:
                return handle
        raise NVMLError("Not Found")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return self.gpus[1]

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.86.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 12080

    def __getattr__(self, query: str) -> Callable[..., Any]:
        if not query.startswith("nvmlDeviceGet"):
            raise AttributeError(query)

        def answer(handle: dict[str, Any], *arguments: Any) -> Any:
            found = handle.get(query.removeprefix("nvmlDeviceGet"))
            if found is None:
                raise NVMLError("Not Supported")
            return found(*arguments) if callable(found) else found

        return answer
