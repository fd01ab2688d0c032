"""Where a run's memory goes: the sizes of what policy, optimizer and engine hold."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qerl_pl.engines.base import LentWeights
from qerl_pl.engines.capacity import GIB, held_gib


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory after an update, in GiB."""

    activations: float
    """Most that the update needed on top of what stays: activations and logits."""
    allocated: float
    """PyTorch's tensors, those that a sleeping engine has unmapped counted in."""
    reserved: float
    """What PyTorch's allocator has taken for tensors, counted alike."""
    driver: float
    """In use on the whole GPU, by the driver's count."""

    @property
    def spare(self) -> float:
        """Taken by PyTorch beyond all that: pools of CUDA graphs, and blocks kept for reuse."""
        return self.reserved - self.allocated - self.activations


@dataclass(frozen=True)
class MemoryReport:
    """Memory by what holds it, in GiB."""

    base_own: float
    """Frozen weights of the trainer's own."""
    base_lent: float
    """Weights that trainer and engine share."""
    base_engine: float
    """Weights that only the engine uses: a second copy of the base where it lends none."""
    adapter: float
    """Trained parameters, and the engine's copy of the adapter where the engine counts it apart."""
    gradients: float
    optimizer: float
    """The optimizer's state."""
    kv_cache: float
    """The engine's key/value cache while it samples."""
    released: float = 0.0
    """Part of `kv_cache` that a sleeping engine has given back."""
    device: DeviceMemory | None = None
    """Without a GPU nothing."""

    def metrics(self) -> dict[str, float]:
        """What is logged each step, by tag."""
        metrics = {
            "memory/base_gib": self.base_own + self.base_lent + self.base_engine,
            "memory/adapter_gib": self.adapter,
            "memory/optimizer_gib": self.optimizer,
            "memory/kv_cache_gib": self.kv_cache,
        }
        if self.device is None:
            return metrics
        return metrics | {
            "memory/activations_gib": self.device.activations,
            "memory/graphs_and_cached_gib": self.device.spare,
            "memory/driver_gib": self.device.driver,
        }

    def table(self) -> str:
        """One line an item; with a GPU the items add up to the total."""
        rows = {
            "base, the trainer's own": self.base_own,
            "base, lent by the engine": self.base_lent,
            "base, the engine's alone": self.base_engine,
            "adapter": self.adapter,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "key/value cache": self.kv_cache,
        }
        if self.device is not None:
            device, known = self.device, sum(rows.values())
            rows["other tensors"] = device.allocated - known
            rows["activations and logits"] = device.activations
            rows["CUDA graphs, cached blocks"] = device.spare
            rows["CUDA context, libraries"] = device.driver - device.reserved + self.released
            rows["total with the cache mapped"] = device.driver + self.released
        return "\n".join(f"  {name:<33}{size:9.3f} GiB" for name, size in rows.items())


def measure_memory(
    policy: nn.Module,
    lent: LentWeights | None,
    optimizers: Iterable[torch.optim.Optimizer],
    engine: Mapping[str, float],
    device: DeviceMemory | None = None,
) -> MemoryReport:
    """Sizes of everything that is held between two steps.

    Args:
        policy: Base and adapter.
        lent: What the policy has borrowed.
        optimizers: Of the adapter.
        engine: `RolloutEngine.memory_gib`.
        device: Where there is a GPU.
    """
    shared: list[Tensor] = []
    if lent is not None:
        shared += lent.tensors.values()
        for weight in lent.linears.values():
            shared += weight.tensors().values()
    addresses = {tensor.data_ptr() for tensor in shared}
    frozen = [p for p in policy.parameters() if not p.requires_grad] + list(policy.buffers())
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    base_lent = held_gib(shared)
    return MemoryReport(
        base_own=held_gib(tensor for tensor in frozen if tensor.data_ptr() not in addresses),
        base_lent=base_lent,
        base_engine=max(engine.get("weights", 0.0) - base_lent, 0.0),
        adapter=held_gib(p for p in policy.parameters() if p.requires_grad) + engine.get("adapter", 0.0),
        gradients=gradient_gib(policy),
        optimizer=held_gib(value for state in states for value in state.values() if isinstance(value, Tensor)),
        kv_cache=engine.get("kv_cache", 0.0),
        released=engine.get("released", 0.0),
        device=device,
    )


def gradient_gib(policy: nn.Module) -> float:
    """GiB of the gradients that are held now."""
    return held_gib(p.grad for p in policy.parameters() if p.grad is not None)


def device_memory(device: torch.device, held: float) -> DeviceMemory:
    """A GPU's memory now.

    Args:
        device: The GPU.
        held: GiB that PyTorch's tensors had during all of the update.
    """
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        activations=torch.cuda.max_memory_allocated(device) / GIB - held,
        allocated=torch.cuda.memory_allocated(device) / GIB,
        reserved=torch.cuda.memory_reserved(device) / GIB,
        driver=(total - free) / GIB,
    )
