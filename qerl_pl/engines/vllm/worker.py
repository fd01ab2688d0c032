"""CUDA graphs that outlive what Lightning clears: cuBLAS's workspaces belong to the graphs that use them.

PyTorch gives every stream a workspace for cuBLAS and keeps it. Lightning frees all of them when a run starts and when
it ends, and what products inside a captured graph write to is then no memory any more. A workspace that is allocated
while a graph is captured lies in the graphs' own memory, which stays as long as they do.
"""

import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from qerl_kernels import FrozenWeight
from torch import Tensor, nn

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines.base import EngineSpec, SharedWeights
from qerl_pl.engines.vllm import linear_methods, weight_map
from qerl_pl.engines.vllm.compat import look_up
from qerl_pl.engines.vllm.linear_methods import Slots, attach_all, changes_products
from qerl_pl.engines.vllm.sampler import attach_sampler
from qerl_pl.engines.vllm.weight_map import Part, parts_of, vocabulary
from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import noisy_norm_names
from qerl_pl.memory import held_gib


@contextmanager
def workspaces_in_graphs() -> Iterator[None]:
    """Inside the block every captured graph brings its own workspaces for cuBLAS.

    Without it a graph takes those that the warm-up before it has left, which are anybody's to free.
    """
    graph: Any = torch.cuda.CUDAGraph
    begin = graph.capture_begin

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        torch._C._cuda_clearCublasWorkspaces()
        begin(self, *args, **kwargs)

    graph.capture_begin = capture_begin
    try:
        yield
    finally:
        graph.capture_begin = begin


ENOUGH = 1.5

"""Programs, one for each sequence and head of keys and values, for each of a GPU's processors: then none is cut.

On an H200 in 7B's shape a decode step is 3 % faster uncut at 64 sequences (1.9 of them) and at 192, and 5 % slower at 8
(0.2).
"""


def attend_in_one_part(groups: Iterable[Iterable[Any]], processors: int) -> int:
    """Let vLLM cut no sequence where there are enough of them; called before it captures graphs.

    How many a graph is captured for decides, which is the same at every replay.

    Args:
        groups: `attn_groups` of vLLM's model runner.
        processors: Of the GPU.

    Returns:
        Number of groups of layers for which it may choose. Those of other attention are left alone.
    """
    changed = 0
    for builder in (one for some in groups for group in some for one in group.metadata_builders):
        if getattr(builder, "aot_schedule", False) and getattr(builder, "max_num_splits", 0) > 1:
            builder.__class__ = _choosing(type(builder), ENOUGH * processors)
            changed += 1
    return changed


def _choosing(base: Any, enough: float) -> type:
    """vLLM's builder of what a layer of attention is told, which chooses by the number of sequences."""

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        most = self.max_num_splits
        if common_attn_metadata.num_reqs * self.num_heads_kv >= enough:
            self.max_num_splits = 1
        try:
            return base.build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        finally:
            self.max_num_splits = most

    return type(base.__name__, (base,), {"build": build, "__module__": base.__module__})


def processors(device: torch.device) -> int:
    """Of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object

CONFIG_KEY = "qerl"

_WORKERS = {"GPUPolicyWorker": ("gpu_worker", "Worker"), "CPUPolicyWorker": ("cpu_worker", "CPUWorker")}

_NEEDED = ("model_runner.kv_caches", "distributed_init_method")

_OVERRIDDEN = ("_maybe_get_memory_pool_context", "compile_or_warm_up_model", "init_device", "load_model")

"""Methods of vLLM's worker that `PolicyWorker` replaces: one that vLLM has renamed would never be called here."""

_NEEDED_OF_LINEARS = (
    "quant_method.apply",
    "input_size_per_partition",
    "output_size_per_partition",
    "output_partition_sizes",
)


def worker_class(device: torch.device, ranks: int = 1) -> str:
    """Qualified name of the worker that runs on `device`, in a run of so many ranks.

    Raises:
        UserError: vLLM's build cannot run there.
    """
    from vllm.platforms import current_platform

    if device.type == "cuda" and device.index and ranks == 1:
        raise UserError(
            f"a colocated vLLM runs on the first visible GPU; the trainer is on {device}: choose the GPU by "
            "CUDA_VISIBLE_DEVICES"
        )
    if device.type == "cpu" and current_platform.is_cpu():
        return f"{__name__}.CPUPolicyWorker"
    if device.type == "cuda" and current_platform.is_cuda():
        return f"{__name__}.GPUPolicyWorker"
    build = "CPU" if current_platform.is_cpu() else "GPU"
    seen = f"{torch.cuda.device_count()} GPUs are visible"
    raise UserError(
        f"vLLM's build must match the device; this is a {build} build, the run asks for {device.type} and {seen}: "
        "install the other build, change trainer.accelerator, or use TransformersEngine"
    )


def engine_config(spec: EngineSpec, dense_above: int | None, decode_gemm_max_tokens: int | None) -> dict[str, Any]:
    """vLLM's `additional_config`: what the worker must know at loading (see `vllm_linears`).

    It is part of the key of vLLM's cache of compiled graphs, so none of other norms, products or adapter ever runs.
    """
    adapter = {"rank": spec.lora_rank, "targets": sorted(spec.lora_targets), "whole": spec.full_finetuning}
    products = {
        "dense_above": dense_above,
        "decode_gemm_max_tokens": decode_gemm_max_tokens,
    }
    return {CONFIG_KEY: {"norms": "float32", **products, **adapter}}


class PolicyWorker(Worker):
    """Worker whose noisy norms have float32 scales and whose adapter and norms are written in place.

    The methods that `LLM.collective_rpc` calls have the prefix `qerl_`.
    """

    model_runner: Any
    vllm_config: Any
    distributed_init_method: str

    def init_device(self) -> None:
        """As vLLM, but the system chooses the port in the moment in which the process group of one listens there.

        vLLM 0.25 finds a free port, lets it go, and listens there later: by then another run may have it.
        """
        address, _, port = (look_up(self, "distributed_init_method") or "").rpartition(":")
        if address.startswith("tcp:") and port.isdecimal():
            self.distributed_init_method = f"{address}:0"
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model, add the adapter, widen the noisy norms: before compilation and CUDA graphs see them."""
        from vllm.model_executor.layers.layernorm import RMSNorm

        super().load_model(load_dummy_weights=load_dummy_weights)
        modules = dict(self.get_model().named_modules())
        self._qerl_norms = {name: module for name, module in modules.items() if isinstance(module, RMSNorm)}
        self._qerl_noisy = noisy_norm_names(self._qerl_norms)
        for name in self._qerl_noisy:
            norm = self._qerl_norms[name]
            norm.weight = nn.Parameter(norm.weight.data.float(), requires_grad=False)
        self._qerl_base = {name: self._qerl_norms[name].weight.data.clone() for name in self._qerl_noisy}
        self._qerl_slots: Slots = {}
        if self._missing_of_linears():
            return
        config, dtype = self.vllm_config.additional_config[CONFIG_KEY], self.vllm_config.model_config.dtype
        self._qerl_slots = attach_all(self._fused(), config, dtype)
        if config["whole"]:
            weight_map.make_writable(modules.values(), dtype)

    def compile_or_warm_up_model(self) -> Any:
        """Compile, and capture CUDA graphs; from here on this package samples, where it can (see `vllm_sampler`)."""
        groups = look_up(self, "model_runner.attn_groups") or ()  # a CPU has none that cuts
        attend_in_one_part(groups, processors(self.device))
        attach_sampler(self.model_runner)
        with workspaces_in_graphs():
            return super().compile_or_warm_up_model()

    def _linears(self) -> dict[str, Any]:
        from vllm.model_executor.layers.linear import LinearBase

        return {name: module for name, module in self.get_model().named_modules() if isinstance(module, LinearBase)}

    def _fused(self) -> dict[str, tuple[Any, list[Part]]]:
        """vLLM's linears by name, each with the base model's that it holds."""
        model = self.get_model()
        return {name: (linear, parts_of(model, name, linear)) for name, linear in self._linears().items()}

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        # Only what is allocated in the pool is unmapped by `sleep`. Weights, norms and adapter stay outside:
        # the trainer may hold them too, and a wrong adapter after waking cannot happen.
        if tag != "kv_cache":
            return nullcontext()
        context: AbstractContextManager[None] = super()._maybe_get_memory_pool_context(tag)
        return context

    def qerl_missing(self) -> list[str]:
        """Names this class relies on that this vLLM lacks."""
        config = self.vllm_config.additional_config[CONFIG_KEY]
        vllms = super()  # this class has the names itself
        missing = [path for path in _OVERRIDDEN if look_up(vllms, path) is None]
        missing += [path for path in _NEEDED if look_up(self, path) is None] + self._missing_of_linears()
        return missing + (linear_methods.missing() if changes_products(config) else [])

    def _missing_of_linears(self) -> list[str]:
        found = itertools.product(self._linears().values(), _NEEDED_OF_LINEARS)
        return sorted({f"{type(one).__name__}.{path}" for one, path in found if look_up(one, path) is None})

    def qerl_adapted(self) -> list[str]:
        """Linears of the base model that have an adapter."""
        return list(self._qerl_slots)

    def qerl_noisy(self) -> list[str]:
        """Norms that take noise."""
        return list(self._qerl_noisy)

    def qerl_kernels(self) -> list[str]:
        """Class names of the kernels or methods that multiply by the model's linears."""
        kernels = set()
        for module in self._linears().values():
            method = look_up(module, "quant_method.base") or module.quant_method
            kernels.add(type(look_up(module, "scheme.kernel") or method).__name__)
        return sorted(kernels)

    def qerl_lend(self) -> SharedWeights | None:
        """The 4-bit linears by name in the base model, embeddings and lm_head; None where a linear cannot be lent."""
        linears: dict[str, FrozenWeight] = {}
        for linear, parts in self._fused().values():
            rows = linear_methods.shared_rows(linear, parts)
            if rows is None:
                return None
            linears |= rows
        return SharedWeights(linears, vocabulary(self.get_model()))

    def qerl_memory_gib(self) -> dict[str, float]:
        """GiB of the model, of its adapter and of the key/value cache, mapped or not."""
        model = self.get_model()
        adapter = {name for name, _ in model.named_buffers() if name.endswith((".qerl_a", ".qerl_b"))}
        held = dict((*model.named_parameters(), *model.named_buffers()))
        return {
            "weights": held_gib(tensor for name, tensor in held.items() if name not in adapter),
            "adapter": held_gib(tensor for name, tensor in held.items() if name in adapter),
            "kv_cache": held_gib(look_up(self, "model_runner.kv_caches") or ()),
        }

    @torch.inference_mode()
    def qerl_write_adapter(self, adapter: Mapping[str, tuple[Tensor, Tensor]], scaling: float) -> None:
        """Write A [r, in] and scaling * B [out, r] of each linear; zeros where the adapter has none."""
        for name, (a, b) in self._qerl_slots.items():
            if name in adapter:
                a.copy_(adapter[name][0])
                b.copy_(adapter[name][1] * scaling)
            else:
                a.zero_()
                b.zero_()

    @torch.inference_mode()
    def qerl_write_tensors(self, tensors: Mapping[str, Tensor], noise: NormNoise | None) -> float:
        """Write what is trained whole; every noisy norm becomes (trained scale, or the base's) + noise.

        Returns:
            Standard deviation of (scale held now - clean scale) over all noisy norms.
        """
        norms = {name: tensors[f"{name}.weight"] for name in self._qerl_norms if f"{name}.weight" in tensors}
        if len(norms) < len(tensors):
            weight_map.write(tensors, self._fused().values(), self.get_model(), norms)
        device = self._qerl_base[self._qerl_noisy[0]].device
        draws: dict[str, Tensor] = {}
        if noise is not None:
            sizes = [self._qerl_base[name].numel() for name in self._qerl_noisy]
            drawn = torch.cat([noise.draw(name, size) for name, size in zip(self._qerl_noisy, sizes, strict=True)])
            draws = dict(zip(self._qerl_noisy, drawn.to(device).split(sizes), strict=True))  # one copy to the device
        for name in set(norms) - set(self._qerl_base):
            self._qerl_base[name] = self._qerl_norms[name].weight.data.clone()
        differences = []
        for name, base in self._qerl_base.items():
            held = self._qerl_norms[name].weight.data
            clean = norms[name].to(device, base.dtype) if name in norms else base
            held.copy_(clean + draws[name] if name in draws else clean)
            if name in self._qerl_noisy:
                differences.append(held - clean)
        return torch.cat(differences).double().std(correction=0).item()


def __getattr__(name: str) -> Any:
    """Build the worker class that vLLM asks for by its qualified name."""
    if name not in _WORKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, worker = _WORKERS[name]
    base = getattr(importlib.import_module(f"vllm.v1.worker.{module}"), worker)
    return type(name, (PolicyWorker, base), {"__module__": __name__})
