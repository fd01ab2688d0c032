"""What vLLM does to the process that it runs in, undone: at its start and after its end."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qerl_pl.engines.vllm_terminal import without_bars
from qerl_pl.run.random_state import random_state_kept


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Undo what vLLM's start does to the whole process: seeds, `torch.set_num_threads`, variables; without its bars."""
    set_num_threads = torch.set_num_threads
    kept = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")}
    try:
        with random_state_kept(), without_bars():
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
