"""A fake GPU that computes nothing, for machines without one: torch's CUDA calls succeed without an effect."""

import os
import shutil
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent / "card"
TORCH = Path(torch.__file__).parent / "lib"
CALLERS = [f"lib{name}.so" for name in "c10_cuda torch_cuda torch_python torch_cuda_linalg torch_nvshmem".split()]
PREFIXES = ("cuda", "__cuda", "cublas", "nccl")
EMPTY = "host device device_builtin device_builtin_texture_type device_builtin_surface_type cudart_builtin".split()
HOST = [f"#define __{attribute}__" for attribute in EMPTY] + ["#define CUDARTAPI", "#define CUDARTAPI_CDECL"]
HOST += [f"#define __{attribute}__(n) __attribute__((aligned(n)))" for attribute in ("align", "builtin_align")]


def missing() -> str:
    """What this machine lacks to build the fake GPU; "" if nothing."""
    if torch.cuda.device_count():
        return "there is a real GPU"
    if not torch.version.cuda or not _headers().is_dir():
        return "needs a torch for CUDA with its headers, as PyPI has for Linux"
    return "" if shutil.which("gcc") and shutil.which("nm") else "needs gcc and nm"


def build(folder: Path) -> dict[str, str]:
    """The environment in which a program finds one fake GPU, or CARDS of them; their libraries are in `folder`."""
    (folder / "crt").mkdir()
    (folder / "crt" / "host_defines.h").write_text("\n".join([*HOST, ""]))  # nvcc has it, torch's wheels do not
    _compile("-c", f"-I{folder}", f"-I{_headers()}", HERE / "card.c", "-o", folder / "card.o")
    needed = {name for file in CALLERS for name in _names(TORCH / file, "U") if name.startswith(PREFIXES)}
    rest = _stubs(folder / "rest.c", needed - _names(folder / "card.o", "T"))
    _compile("-shared", folder / "card.o", rest, "-o", folder / "libcard.so")
    driver = {name for name in _names(TORCH / "libcaffe2_nvrtc.so", "U") if name.startswith("cu")}
    _compile("-shared", _stubs(folder / "driver.c", driver), "-o", folder / "libcuda.so.1")
    (folder / "libnvidia-ml.so.1").symlink_to("libcard.so")
    variables = {"LD_PRELOAD": folder / "libcard.so", "LD_LIBRARY_PATH": folder, "CARD_FOLDER": folder}
    variables["PYTHONPATH"] = HERE
    return {**os.environ, **{name: str(path) for name, path in variables.items()}}


def _headers():
    return TORCH.parents[1] / "nvidia" / f"cu{torch.version.cuda.split('.')[0]}" / "include"


def _compile(*args):
    subprocess.run(["gcc", "-w", "-O1", "-fPIC", *args], check=True)


def _stubs(file, names):
    file.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names)))
    return file


def _names(file, kind):
    command = ["nm", *(["-D"] if file.suffix == ".so" else []), file]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {row[-1].partition("@")[0] for row in [line.split() for line in listed.splitlines()] if row[-2] == kind}
