"""Activation offload: layer inputs that checkpointing saves wait in pinned CPU memory for the backward pass.

`torch.autograd.graph.save_on_cpu` copies on the stream that computes, so that each layer waits for its copy (PyTorch
2.11), and takes a new pinned tensor for each copy, rounded up to a power of two. Here copies run on a stream of their
own, the backward pass fetches a layer's input while the layer above computes, and pinned blocks are used again.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from qerl_pl.models.memory import BLOCK_BYTES


class PinnedBlocks:
    """Blocks of CPU memory that copies from and to a device use in turn, on one stream; pinned if that is a GPU.

    A block is free for the next copy when the last one has been enqueued, for the stream runs them in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        self.count = 0
        self._free: list[Tensor] = []

    def allocate(self, count: int) -> list[Tensor]:
        """So many blocks, uint8 [BLOCK_BYTES] each."""
        new = max(count - len(self._free), 0)
        self.count += new
        self._free += [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self.on_gpu) for _ in range(new)]
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free(self, blocks: list[Tensor]) -> None:
        """Make blocks free again."""
        self._free += blocks


class OffloadedTensor:
    """A copy of a tensor, which must live until `wait` is called, in pinned blocks; free when nothing refers to it.

    `previous` was offloaded before it: its turn in the backward pass is the next.
    """

    def __init__(self, tensor: Tensor, blocks: PinnedBlocks, previous: "OffloadedTensor | None") -> None:
        self._fetched: Tensor | None = None
        self._blocks: list[Tensor] = []  # before what may fail: __del__ reads both
        self._like = tensor.new_empty(0)
        self._shape, self._pool, self._previous = tensor.shape, blocks, previous
        source = _bytes(tensor)
        self._blocks = blocks.allocate(-(-len(source) // BLOCK_BYTES))
        self._copy(source, to_cpu=True)

    def __del__(self) -> None:
        if self._fetched is not None:  # an error ended the backward pass
            self.wait()
        self._pool.free(self._blocks)

    def _copy(self, device_bytes: Tensor, to_cpu: bool) -> None:
        """Begin to copy between a tensor on the device and the blocks, after what the current stream has enqueued."""
        stream = self._pool.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for piece, block in zip(device_bytes.split(BLOCK_BYTES), self._blocks, strict=True):
                held = block[: len(piece)]
                target, source = (held, piece) if to_cpu else (piece, held)
                target.copy_(source, non_blocking=True)
        self._done = None if stream is None else stream.record_event()

    def wait(self) -> None:
        """Have the current stream wait for the copy: memory that it frees later may then be used again.

        `Tensor.record_stream` would keep it until the GPU has come that far, and the CPU is many layers ahead.
        """
        if self._done is not None:
            torch.cuda.current_stream(self._like.device).wait_event(self._done)

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._fetched is None:
            self._fetched = self._like.new_empty(self._shape)
            self._copy(_bytes(self._fetched), to_cpu=False)

    def restore(self) -> Tensor:
        """The tensor on its device; begins to fetch the previous one."""
        self.fetch()
        self.wait()
        restored, self._fetched = self._fetched, None
        assert restored is not None
        if self._previous is not None:
            self._previous.fetch()
            self._previous = None
        return restored


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class ActivationOffload(saved_tensors_hooks):
    """Inside the block, a forward pass of a decoder whose layers are checkpointed, their inputs are saved on the CPU.

    Args:
        hidden_size: Width of the decoder; tensors [1, tokens, hidden_size] are inputs of layers or of the last norm.
        dtype: Data type of activations.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self.hidden_size, self.dtype = hidden_size, dtype
        self.blocks: PinnedBlocks | None = None
        """Pinned memory, allocated with the first tensor that is offloaded."""
        self._last: OffloadedTensor | None = None
        self._copying: Tensor | None = None
        super().__init__(self.pack, self.unpack)

    def __exit__(self, *error: object) -> None:
        self._finish_copy()
        self._last = None
        super().__exit__(*error)

    def _finish_copy(self) -> None:
        if self._last is not None:
            self._last.wait()
        self._copying = None

    def pack(self, tensor: Tensor) -> Tensor | OffloadedTensor | None:
        """What autograd saves instead of a tensor. Its memory is free when the next one is saved, a layer later."""
        if tensor.dim() != 3 or len(tensor) != 1 or tensor.shape[-1] != self.hidden_size or tensor.dtype != self.dtype:
            return tensor
        if self.blocks is None:
            self.blocks = PinnedBlocks(tensor.device)
        if self._copying is not None and self._copying.data_ptr() == tensor.data_ptr():
            return self._last  # two operations save it
        self._finish_copy()
        self._copying = tensor.detach().contiguous()
        self._last = OffloadedTensor(self._copying, self.blocks, self._last)
        return self._last

    def unpack(self, saved: Any) -> Tensor:
        """The tensor that was saved."""
        if isinstance(saved, OffloadedTensor):
            return saved.restore()
        assert isinstance(saved, Tensor)
        return saved
