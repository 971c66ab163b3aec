"""Builds the fake CUDA libraries that this environment's torch, a CUDA build, asks for.

    python build.py CUDA_INCLUDE_FOLDER... OUT_FOLDER

NVIDIA's packages for CUDA 13 share one folder of headers; those for CUDA 12 have one each.

What torch's libraries leave undefined says which functions, libraries and symbol versions are needed. Functions that
the C files here do not define become stubs that return 0; those whose name says that they create something make it.

The arithmetic is an extension of torch in the same folder; a .pth file in this environment loads it into every process
that imports torch.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = {  # of each library, by the beginning of its soname
    "libcudart.so": ["cudart.c"],
    "libcuda.so": ["driver.c"],
    "libnvidia-ml.so": ["nvml.c"],
    "libcublas.so": ["cublas.c"],
    "libcublasLt.so": ["cublaslt.c"],
    "libcudnn.so": ["cudnn.c"],
    "libnccl.so": ["nccl.c"],
    "libcupti.so": ["cupti.c"],
}
UNVERSIONED = {  # functions without a symbol version, by how their name begins
    "nccl": "libnccl.so",
    "cuFile": "libcufile.so",
    "cusparseLt": "libcusparseLt.so",
    "curand": "libcurand.so",
    "cu": "libcuda.so",
}
SYSTEM = re.compile(r"lib(c|m|dl|rt|z|pthread|gcc_s|stdc\+\+|gomp|quadmath)\.so|ld-linux")


def output(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(done.args)}\n{done.stderr}")
    return done.stdout


def needed(torch_lib: Path) -> tuple[set[str], dict[str, dict[str, str]]]:
    """The sonames that torch asks for, and for each its functions with their versions."""
    sonames: set[str] = {"libnvidia-ml.so.1", "libcuda.so.1"}
    undefined: set[str] = set()
    versions: dict[str, str] = {}  # the soname that gives a version
    own = {path.name for path in torch_lib.glob("*.so*")}
    for path in torch_lib.glob("*.so*"):
        wanted, given = dynamic_section(path)
        sonames |= {name for name in wanted if name not in own and not SYSTEM.match(name)}
        versions |= given
        symbols = output("nm", "-D", "--undefined-only", path).splitlines()
        undefined |= {line.split()[-1] for line in symbols if " U " in line}
    functions: dict[str, dict[str, str]] = defaultdict(dict)
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        soname = versions.get(version.strip("@")) if version else unversioned(name, sonames)
        if soname in sonames:
            functions[soname][name] = version.strip("@")
    words = set(re.findall(rb"\0(cu[A-Z]\w+|nvml[A-Z]\w+)(?=\0)", (torch_lib / "libc10_cuda.so").read_bytes()))
    for name in sorted(word.decode() for word in words):  # looked up by name while it runs
        functions["libnvidia-ml.so.1" if name.startswith("nvml") else "libcuda.so.1"][name] = ""
    return sonames, functions


def dynamic_section(library: Path) -> tuple[set[str], dict[str, str]]:
    """The sonames that a library needs, and the soname of each symbol version that it asks for."""
    wanted, versions, file = set(), {}, ""
    for line in output("readelf", "-dV", "-W", library).splitlines():
        if match := re.search(r"\(NEEDED\).*\[(.+)\]", line):
            wanted.add(match[1])
        elif match := re.search(r"File: (\S+)", line):
            file = match[1]
        elif match := re.search(r"Name: (\S+)  Flags", line):
            versions[match[1]] = file
    return wanted, versions


def unversioned(name: str, sonames: set[str]) -> str | None:
    """The library that a function without a symbol version is from, by how its name begins."""
    beginning = next((start for start in UNVERSIONED if re.match(rf"{start}[A-Z]", name)), None)
    return beginning and next((soname for soname in sonames if soname.startswith(UNVERSIONED[beginning])), None)


def stub(name: str) -> str:
    if name == "cufftCreate":
        body = "*(int *)made = 1;"
    elif name == "cudnnBackendCreateDescriptor":
        return (
            f'int {name}(int kind, void **made) {{ (void)kind; fc_note("{name}"); *made = calloc(1, 256); return 0; }}'
        )
    elif re.search(r"[cC]reate", name) and not name.startswith(("nvrtc", "nccl", "cuLink")):
        body = "*made = calloc(1, 256);"
    else:
        return f'int {name}(void) {{ fc_note("{name}"); return 0; }}'
    return f'int {name}(void **made) {{ fc_note("{name}"); {body} return 0; }}'


def build(torch_lib: Path, includes: list[Path], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    sonames, functions = needed(torch_lib)
    callbacks = next(path for folder in includes if (path := folder / "cupti_runtime_cbid.h").exists())
    names = re.findall(r"CUPTI_RUNTIME_TRACE_CBID_(\w+)\s*=\s*(\d+),", callbacks.read_text())
    (out / "callback_names.h").write_text(
        "".join(f'[{number}] = "{name}",\n' for name, number in names if name != "INVALID")
    )
    flags = [
        "-std=gnu11",
        "-O2",
        "-g",
        "-Wall",
        "-Wextra",
        "-fPIC",
        *(f"-I{folder}" for folder in [*includes, HERE, out]),
    ]
    runtime = next(soname for soname in sonames if soname.startswith("libcudart"))
    for soname in sorted(sonames, key=lambda soname: soname != runtime):  # the others link to it
        objects = []
        for source in next((files for start, files in SOURCES.items() if soname.startswith(start)), []):
            objects.append(out / f"{source}.o")
            output("gcc", *flags, "-c", HERE / source, "-o", objects[-1])
        written = set(re.findall(r" [TDBR] (\w+)", output("nm", "--defined-only", *objects))) if objects else set()
        generated = out / f"{soname}.stubs.c"
        stubs = sorted(functions[soname].keys() - written)
        generated.write_text("#include <stdlib.h>\nvoid fc_note(const char *);\n" + "\n".join(map(stub, stubs)) + "\n")
        script = out / f"{soname}.map"
        version = next(iter(sorted({v for v in functions[soname].values() if v})), "")
        script.write_text(f"{version} {{ global: *; }};\n" if version else "{ global: *; };\n")
        link = [] if soname == runtime else [out / runtime]
        output(
            "gcc",
            *flags,
            "-w",
            "-shared",
            *objects,
            generated,
            "-o",
            out / soname,
            f"-Wl,-soname,{soname}",
            f"-Wl,--version-script,{script}",
            "-Wl,-rpath,$ORIGIN",
            "-Wl,--no-as-needed",
            *link,
            "-lpthread",
            "-ldl",
        )
        print(f"{soname}: {len(written)} functions written, {len(stubs)} stubs")


def build_arithmetic(site: Path, includes: list[Path], out: Path) -> None:
    torch = site / "torch"
    includes = [torch / "include", torch / "include/torch/csrc/api/include", *includes]
    runtime = next(out.glob("libcudart.so.*[0-9]"))
    modern = "_ZN3c105Error11add_contextENSt7__cxx11" in output("nm", "-D", torch / "lib/libc10.so")  # not in torch 2.6
    output(
        "g++",
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(modern)}",
        "-O1",
        "-w",
        "-fPIC",
        "-shared",
        *(f"-I{folder}" for folder in includes),
        HERE / "arithmetic.cpp",
        "-o",
        out / "fake_cuda_arithmetic.so",
        f"-L{torch / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        runtime,
    )
    shutil.copy(HERE / "on_import.py", site / "fake_cuda_on_import.py")
    (site / "fake_cuda.pth").write_text("import fake_cuda_on_import\n")


if __name__ == "__main__":
    site = Path(sysconfig.get_paths()["purelib"])
    *includes, out = map(Path, sys.argv[1:])
    build(site / "torch/lib", includes, out)
    build_arithmetic(site, includes, out)
