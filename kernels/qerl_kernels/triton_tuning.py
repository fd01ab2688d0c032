"""How the Triton kernels choose their tile sizes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import triton

from qerl_kernels.backend import interpreting


def tuned(choices: Sequence[tuple[dict[str, int], int]], key: list[str]) -> Callable[[Any], Any]:
    """Decorate a kernel: time each choice of (meta-parameters, warps) once for every new `key`, keep the fastest.

    Every choice gives the same bits. The interpreter takes the first.
    """
    configs = [triton.Config(dict(meta), num_warps=warps) for meta, warps in choices]
    # Short runs: the kernels last tens of microseconds and a model has few shapes.
    bench = functools.partial(triton.testing.do_bench, warmup=5, rep=20)
    return triton.autotune(configs[:1] if interpreting() else configs, key=key, do_bench=bench)
