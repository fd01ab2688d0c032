"""vLLM's worker with the policy in it: adapter and norms are written in place, the base's weights shared."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from qerl_kernels import FrozenWeight
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines.base import EngineSpec, SharedWeights
from qerl_pl.engines.vllm import fused_experts, linear_methods, merged, weight_map
from qerl_pl.engines.vllm.attach import attach_all
from qerl_pl.engines.vllm.sampler import attach_sampler
from qerl_pl.engines.vllm.startup import end_groups_without_experts
from qerl_pl.engines.vllm.weight_map import FusedSlice
from qerl_pl.errors import UserError
from qerl_pl.models.families import family_of, noisy_norm_names
from qerl_pl.models.memory import GIB, held_gib

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object

CONFIG_KEY = "qerl"
"""Key of this package's settings in vLLM's `additional_config`."""


def graphs_own_cublas_workspaces(model: nn.Module) -> RemovableHandle:
    """Have every CUDA graph of a model that is captured before the handle is removed own its cuBLAS workspaces.

    PyTorch caches a cuBLAS workspace for each stream, and Lightning frees all of them when a run starts or ends: a
    graph that uses the warm-up's workspace would then write to memory of others. With the cache emptied before each
    forward pass, the first GEMM of a captured pass allocates a workspace from the graphs' memory pool, which lives as
    long as they do.
    """
    return model.register_forward_pre_hook(lambda *_: torch._C._cuda_clearCublasWorkspaces())


def worker_class(device: torch.device, ranks: int = 1) -> str:
    """Qualified name of the worker for a device, in a run of so many ranks.

    Raises:
        UserError: vLLM's build does not run there.
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


def engine_config(
    spec: EngineSpec, dense_above: int | None, decode_gemm_max_tokens: int | None, merged_above: int | None
) -> dict[str, Any]:
    """vLLM's `additional_config` for `PolicyWorker`.

    It is part of the key of vLLM's cache of compiled graphs, so that no graph of other norms, GEMMs or adapters runs.
    """
    if not spec.lora_rank:
        merged_above = None
    if merged_above is not None and decode_gemm_max_tokens is not None:  # its variants take a start half a second each
        decode_gemm_max_tokens = min(decode_gemm_max_tokens, merged_above) or None
    return {
        "gdn_prefill_backend": "triton",  # of gated delta nets: vLLM 0.25 takes FlashInfer's, installed or not
        CONFIG_KEY: {
            "norms": "float32",
            "dense_above": dense_above,
            "decode_gemm_max_tokens": decode_gemm_max_tokens,
            "merged_above": merged_above,
            "rank": spec.lora_rank,
            "targets": sorted(spec.lora_targets),
            "full_finetuning": spec.full_finetuning,
        },
    }


@dataclass(frozen=True)
class WorkerReport:
    """What a worker has loaded."""

    kernels: list[str]
    """Class names of the kernels that multiply by the model's linears."""
    experts: list[str]
    """Class names of the kernels of its experts; empty without experts."""
    linears: int
    """Number of linears in 4 bits; of all linears if the base has none in 4 bits."""
    decode_gemm: int
    """Linears with the decode GEMM."""
    adapted: list[str]
    """Linears of the base model with an adapter."""
    merged: int
    """Linears of the base model with a merged copy."""
    noisy_norms: list[str]
    sampler: str | None
    """Why vLLM's own sampler draws the tokens; None where the Triton sampler does."""


class PolicyWorker(Worker):
    """Worker whose noisy norms have float32 scales and whose adapter and norms are written in place.

    The methods that `LLM.collective_rpc` calls have the prefix `qerl_`.
    """

    model_runner: Any
    vllm_config: Any
    distributed_init_method: str

    def init_device(self) -> None:
        """Initialize the device as vLLM does, with a port that the system chooses when the process group listens.

        vLLM 0.25 looks up a free port and listens there later, when another run may have it. A mixture of experts does
        not reuse the groups of a dense model.
        """
        address, _, port = self.distributed_init_method.rpartition(":")
        if address.startswith("tcp:") and port.isdecimal():
            self.distributed_init_method = f"{address}:0"
        if family_of(self.vllm_config.model_config.hf_config.model_type).experts is not None:
            end_groups_without_experts()
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model, add the adapter, cast the noisy norms to float32: before vLLM compiles and captures them."""
        from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

        super().load_model(load_dummy_weights=load_dummy_weights)
        modules = dict(self.get_model().named_modules())
        self._qerl_family = family = family_of(self.vllm_config.model_config.hf_config.model_type)
        if family.sinks is not None and self.device.type == "cpu":
            weight_map.round_sinks(modules.values())
        self._qerl_norms = {
            name: module for name, module in modules.items() if isinstance(module, RMSNorm | GemmaRMSNorm)
        }
        self._qerl_noisy = noisy_norm_names(self._qerl_norms, family)
        for name in self._qerl_noisy:
            norm = self._qerl_norms[name]
            norm.weight = nn.Parameter(norm.weight.data.float(), requires_grad=False)
        self._qerl_clean = {name: self._qerl_norms[name].weight.data.clone() for name in self._qerl_noisy}
        config, dtype = self.vllm_config.additional_config[CONFIG_KEY], self.vllm_config.model_config.dtype
        above = config["merged_above"]
        linears = self._linears()
        if config["full_finetuning"]:
            weight_map.make_writable(modules.values(), dtype)
        elif above is not None and self.device.type == "cpu":
            weight_map.make_writable((linear for linear, _ in linears.values()), dtype)
            weight_map.fill(linears.values(), Path(self.vllm_config.model_config.model))
        self._qerl_attached = attach_all(linears, config, dtype)
        self._qerl_merged: list[merged.MergedRows] = []
        if above is not None:
            pool = super()._maybe_get_memory_pool_context("merged")
            self._qerl_merged = merged.attach_merged(linears, self._qerl_attached.lora, above, dtype, pool)

    def compile_or_warm_up_model(self) -> Any:
        """Compile, and capture CUDA graphs, with the Triton sampler where it serves."""
        self._qerl_sampler = attach_sampler(self.model_runner)
        on_gpu = self.device.type == "cuda"
        with graphs_own_cublas_workspaces(self.get_model()) if on_gpu else nullcontext():
            return super().compile_or_warm_up_model()

    def _linears(self) -> dict[str, tuple[Any, list[FusedSlice]]]:
        """vLLM's linears by name, each with all its slices; a router, which is replicated and frozen, is none."""
        from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

        model, kinds = self.get_model(), (ColumnParallelLinear, RowParallelLinear)
        linears = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
        family = self._qerl_family
        layers = family.layers_without_values(self.vllm_config.model_config.hf_config)
        keyed = {f"model.layers.{layer}.self_attn" for layer in layers}
        return {
            name: (linear, weight_map.fused_slices(model, family.name_in_base(name), linear, keyed))
            for name, linear in linears.items()
        }

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        # `sleep` unmaps what is allocated in the pool. Weights, norms and adapter stay outside: the trainer may share
        # them, and no adapter has to be restored on waking. Merged copies are in a pool of their own.
        if tag != "kv_cache":
            return nullcontext()
        context: AbstractContextManager[None] = super()._maybe_get_memory_pool_context(tag)
        return context

    def qerl_report(self) -> WorkerReport:
        """What the worker has loaded."""
        linears = [linear for linear, _ in self._linears().values()]
        quantized = [linear for linear in linears if getattr(linear, "weight_scale", None) is not None]
        return WorkerReport(
            kernels=sorted({linear_methods.kernel_name(linear) for linear in linears}),
            experts=fused_experts.kernel_names(self.get_model()),
            linears=len(quantized or linears),
            decode_gemm=self._qerl_attached.decode_gemm,
            adapted=list(self._qerl_attached.lora),
            merged=len(self._qerl_merged),
            noisy_norms=list(self._qerl_noisy),
            sampler=self._qerl_sampler,
        )

    def qerl_shared_weights(self) -> SharedWeights | None:
        """Linears and 4-bit experts by name in the base model, embeddings and lm_head; None where one cannot be.

        Raises:
            UserError: As `fused_experts.shared_experts`.
        """
        shared: dict[str, FrozenWeight] = {}
        for linear, slices in self._linears().values():
            rows = linear_methods.shared_rows(linear, slices)
            if rows is None:
                return None
            shared |= rows
        config = self.vllm_config.model_config.hf_config
        experts = fused_experts.shared_experts(self.get_model(), self._qerl_family, config)
        return None if experts is None else SharedWeights(shared, weight_map.vocabulary(self.get_model()), experts)

    def qerl_memory_gib(self) -> dict[str, float]:
        """GiB of the model, of its adapter, of merged copies and of the key/value cache, mapped or not."""
        model = self.get_model()
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        adapter = {name for name in tensors if name.endswith(("qerl_a", "qerl_b"))}
        copies = {name for name in tensors if name.endswith("qerl_merged")}
        # Several layers are parts of one storage; a gated delta net has two.
        caches = [tensor.untyped_storage() for tensor in tree_leaves(self.model_runner.kv_caches)]
        return {
            "weights": held_gib(tensor for name, tensor in tensors.items() if name not in adapter | copies),
            "adapter": held_gib(tensors[name] for name in adapter),
            "merged": held_gib(tensors[name] for name in copies),
            "kv_cache": sum({storage.data_ptr(): storage.nbytes() for storage in caches}.values()) / GIB,
        }

    @torch.inference_mode()
    def qerl_write_adapter(self, adapter: Mapping[str, tuple[Tensor, Tensor]], scaling: float) -> None:
        """Write A [r, in] and scaling * B [out, r] of each linear; zeros where the adapter has none."""
        for name, (a, b) in self._qerl_attached.lora.items():
            if name in adapter:
                new_a, new_b = adapter[name]
                a.copy_(new_a)
                b.unflatten(0, (-1, len(new_b))).copy_(new_b * scaling)  # keys that are values: twice
            else:
                a.zero_()
                b.zero_()

    def qerl_merge(self) -> None:
        """Write the merged copies, whose memory is fresh after each sleep."""
        merged.merge(self._qerl_merged)

    @torch.inference_mode()
    def qerl_write_tensors(self, tensors: Mapping[str, Tensor], noise: NormNoise | None) -> float:
        """Write trained weights; every noisy norm becomes (trained scale, or the base's) + noise.

        Returns:
            Standard deviation of (written scale - clean scale) over the norms that have noise.
        """
        norms = {name: tensors[f"{name}.weight"] for name in self._qerl_norms if f"{name}.weight" in tensors}
        if len(norms) < len(tensors):
            weight_map.write(tensors, self._linears().values(), self.get_model(), norms)
        device = self._qerl_clean[self._qerl_noisy[0]].device
        draws: dict[str, Tensor] = {}
        if noise is not None:
            for name in self._qerl_noisy:
                clean = norms.get(name, self._qerl_clean[name])
                draws[name] = noise.of_norm(name, clean.float() + self._qerl_family.norm_offset)
            sizes = [drawn.numel() for drawn in draws.values()]  # one copy to the device
            draws = dict(zip(draws, torch.cat([*draws.values()]).to(device).split(sizes), strict=True))
        for name in set(norms) - set(self._qerl_clean):
            self._qerl_clean[name] = self._qerl_norms[name].weight.data.clone()
        differences = []
        for name, base in self._qerl_clean.items():
            scale = self._qerl_norms[name].weight.data
            clean = norms[name].to(device, base.dtype) if name in norms else base
            scale.copy_(clean + draws[name] if name in draws else clean)
            if name in self._qerl_noisy:
                differences.append(scale - clean)
        return torch.cat(differences).double().std(correction=0).item()


def __getattr__(name: str) -> Any:
    """The worker that vLLM imports by its qualified name: `PolicyWorker` over vLLM's own for the device."""
    if name == "GPUPolicyWorker":
        from vllm.v1.worker.gpu_worker import Worker as GPUWorker

        return type(name, (PolicyWorker, GPUWorker), {"__module__": __name__})
    if name == "CPUPolicyWorker":
        from vllm.v1.worker.cpu_worker import CPUWorker

        return type(name, (PolicyWorker, CPUWorker), {"__module__": __name__})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
