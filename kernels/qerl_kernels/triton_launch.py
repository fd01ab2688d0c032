"""Launching a Triton kernel with little Python, where there is nothing to tune."""

from typing import Any

from torch import Tensor


class Direct:
    """A kernel with the compiled forms of it that were used, launched by the tensors' addresses.

    Triton's own path from a call to the launch inspects every argument again, which takes longer on the CPU than a
    small kernel on the GPU. What it would look at is part of the key here: data types, addresses that are multiples of
    16 bytes, and of an integer whether it is 1, a multiple of 16 or wider than 32 bits; not how many programs there
    are, so that sizes which change with every batch add nothing.

    Args:
        kernel: What `triton.jit` made; its tensors come first, then numbers, then constants.
        options: Of Triton's compilation.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, programs: int, warps: int, tensors: tuple[Tensor, ...], *numbers: int | float, **constants: int | bool
    ) -> None:
        """Run it.

        Args:
            programs: How many; none are launched where it is 0.
            warps: Of each.
            tensors: All on the current GPU, or all on the CPU: then Triton's interpreter runs it.
            numbers: The arguments after the tensors.
            constants: Those after the numbers, in the kernel's order.
        """
        if not programs:
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
                compiled[(programs, 1, 1)](*addresses, *numbers, *constants.values())
                return
        options = {**constants, **self._options, "num_warps": warps}
        compiled = self._kernel[(programs,)](*tensors, *numbers, **options)
        if first.is_cuda:
            self._compiled[key] = compiled
