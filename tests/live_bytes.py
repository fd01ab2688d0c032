"""Bytes of tensors alive on a CPU, and their peak."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PretrainedConfig

from qerl_pl.modules import LoraConfig, Policy, PolicyConfig


class LiveBytes(TorchDispatchMode):
    """Counts the memory of every tensor that an operation makes inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak: list[int] = []
        """Bytes of each tensor alive at the peak."""
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._held:
            return
        self._held[key] = storage.nbytes()
        weakref.finalize(storage, self._free, key)
        self.now += self._held[key]
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, list(self._held.values())

    def _free(self, key: int) -> None:
        self.now -= self._held.pop(key)


def untrained_policy(config: PretrainedConfig, folder: Path, **settings: Any) -> Policy:
    """A policy in float32 with an adapter of rank 2, whose base, with random weights, is written to a folder."""
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    given = PolicyConfig(str(folder), quantization="none", dtype="float32", lora=LoraConfig(rank=2), **settings)
    return Policy(folder, given, torch.device("cpu"), seed=1).train()


def live_bytes_of_update(policy: Any, sequences: int, length: int) -> LiveBytes:
    """What a forward and backward pass holds of so many sequences of so many tokens, all but the first selected."""
    ids = torch.arange(sequences * length).view(sequences, length) % 55 + 5
    mask = torch.arange(length).expand(sequences, length) > 0
    with LiveBytes() as live:
        policy.token_values(ids, torch.tensor([length] * sequences), mask, 1.0)[0].sum().backward()
    return live
