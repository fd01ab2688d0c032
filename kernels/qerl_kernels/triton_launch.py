"""Launching Triton kernels with little Python, with or without autotuning."""

import functools
import importlib
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from qerl_kernels.backend import interpreting

log = logging.getLogger(__name__)


def pin_tiles(modules: Iterable[str]) -> None:
    """Leave each autotuned kernel of some modules the middle one of its configurations.

    Those chosen by timing may differ between runs, and with them the last bits of results; and a start would compile
    and time all of them.
    """
    for module in modules:
        for kernel in vars(importlib.import_module(module)).values():
            while isinstance(kernel, KernelInterface):
                if isinstance(kernel, Autotuner):
                    kernel.configs = kernel.configs[len(kernel.configs) // 2 :][:1]
                kernel = getattr(kernel, "fn", None)


class Direct:
    """A kernel with a cache of its compiled forms, launched by the tensors' addresses.

    Triton's own path from a call to the launch inspects every argument again, which takes longer on the CPU than a
    small kernel on the GPU. The cache's key holds what Triton specializes on: data types, addresses divisible by 16,
    and of an integer whether it is 1, divisible by 16 or wider than 32 bits; not the grid.

    Args:
        kernel: A `triton.jit` function of tensors, then numbers, then constants.
        options: Of Triton's compilation.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, ctas: int, warps: int, tensors: tuple[Tensor, ...], *numbers: int | float, **constants: int | bool
    ) -> None:
        """Launch the kernel.

        Args:
            ctas: Grid size; 0 launches nothing.
            warps: Of each CTA.
            tensors: All on the current GPU, or all on the CPU for Triton's interpreter.
            numbers: The arguments after the tensors.
            constants: Those after the numbers, in the kernel's order.
        """
        if not ctas:
            return
        first = tensors[0]
        key: tuple[Any, ...] = ()
        if first.is_cuda:
            addresses = [tensor.data_ptr() for tensor in tensors]
            key = (
                first.get_device(),
                warps,
                *constants.values(),
                *[tensor.dtype for tensor in tensors],
                *[address % 16 == 0 for address in addresses],
                *[(n == 1, n % 16 == 0, abs(n) >> 31 > 0) for n in numbers if isinstance(n, int)],
            )
            compiled = self._compiled.get(key)
            if compiled is not None:
                compiled[(ctas, 1, 1)](*addresses, *numbers, *constants.values())
                return
        options = {**constants, **self._options, "num_warps": warps}
        compiled = self._kernel[(ctas,)](*tensors, *numbers, **options)
        if first.is_cuda:
            self._compiled[key] = compiled


Launch = Callable[..., None]
Grid = Callable[[dict[str, int]], tuple[int, int, int]]

TINY = 1 << 20
"""Elements below which a kernel is shorter than its launch, whatever the choice."""
RESOLUTION_MS = 5e-4
"""Resolution of a kernel's timing; of choices closer than that, the first is taken."""


def agreeing(launches: Sequence[Launch], arguments: tuple[Tensor | int, ...]) -> list[Launch]:
    """The launches that write the bits that most of them write, in their order; of as many, those of the first.

    A compiler may get a choice wrong, and a wrong kernel may well be the fastest.

    Args:
        launches: Of one kernel.
        arguments: Of each; the last tensor is its result.
    """
    out = [argument for argument in arguments if isinstance(argument, Tensor)][-1].view(torch.uint8)
    alike: list[tuple[Tensor, list[Launch]]] = []
    for launch in launches:
        out.fill_(0xFF)  # not a number: what a launch leaves out is not another's result
        launch(*arguments)
        for bits, held in alike:
            if torch.equal(bits, out):
                held.append(launch)
                break
        else:
            alike.append((out.clone(), [launch]))
    if len(alike) > 1:
        log.warning("of %d choices of a kernel's tiles some give other results: not taken", len(launches))
    return max((held for _, held in alike), key=len)


class Tuned:
    """A kernel that is autotuned once for every new key, among the choices that give the same bits.

    It caches the compiled kernel with its grid, for the reason of `Direct`. The interpreter and tiny tensors take the
    first choice.

    Args:
        kernel: A `triton.jit` function whose constants come last.
        choices: (meta-parameters, warps), the most promising first.
    """

    def __init__(self, kernel: Any, choices: Sequence[tuple[dict[str, int], int]]) -> None:
        self._kernel = kernel
        self._choices = choices
        self._launches: dict[Hashable, Launch] = {}

    def get(self, key: Hashable) -> Launch | None:
        """The tuned launch of a key; its arguments are those before the constants, pointers as integers."""
        return self._launches.get(key)

    def tune(self, key: Hashable, arguments: tuple[Tensor | int, ...], grid: Grid, **constants: bool) -> None:
        """Run the kernel with every choice, and cache the fastest of those whose results are alike.

        Args:
            key: Data types, sizes, strides, device, and addresses modulo 16.
            arguments: Those before the constants; the last tensor is the result.
            grid: From the meta-parameters.
            constants: Those before the meta-parameters.
        """
        if interpreting():
            meta, warps = self._choices[0]
            self._kernel[grid(meta)](*arguments, **constants, **meta, num_warps=warps)
            return
        tiny = max(a.numel() for a in arguments if isinstance(a, Tensor)) < TINY
        choices = self._choices[:1] if tiny else self._choices
        launches = [self._compiled(arguments, grid, constants, *choice) for choice in choices]
        if len(launches) > 1:
            launches = agreeing(launches, arguments)
            # Short runs: the kernels last tens of microseconds and a model has few shapes.
            bench = functools.partial(triton.testing.do_bench, warmup=5, rep=20, return_mode="median")
            times = [bench(functools.partial(launch, *arguments)) for launch in launches]
            near = min(times) + RESOLUTION_MS
            launches = [launch for launch, time in zip(launches, times, strict=True) if time <= near]
        self._launches[key] = launches[0]

    def _compiled(
        self,
        arguments: tuple[Tensor | int, ...],
        grid: Grid,
        constants: dict[str, bool],
        meta: dict[str, int],
        warps: int,
    ) -> Launch:
        compiled = self._kernel[grid(meta)](*arguments, **constants, **meta, num_warps=warps)
        run, last = compiled[grid(meta)], (*constants.values(), *meta.values())
        return lambda *arguments: run(*arguments, *last)
