"""`VLLMEngine`: vLLM in the trainer's process, with the policy's worker."""

import itertools
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from qerl_kernels import DECODE_GEMM_MAX_TOKENS, select_backend_of

from qerl_pl.engines.base import (
    EngineSpec,
    RequestSource,
    RolloutEngine,
    SharedWeights,
    check_adapter,
    check_requests,
    check_targets,
    regroup,
)
from qerl_pl.engines.vllm import compat, linear_methods, weight_map, worker
from qerl_pl.engines.vllm.merged import AdapterMode, merged_above
from qerl_pl.engines.vllm.requests import BatchSource, allocated_by_block, completion_of, processed_once, request_params
from qerl_pl.engines.vllm.startup import (
    REPEATABLE,
    check_reads,
    graph_settings,
    import_vllm,
    linear_backend,
    load_options,
    moe_backend,
    position_overrides,
    process_state_restored,
    register_architecture,
    release_memory,
    runs,
    sequences_with_states,
    stdout_with_descriptor,
    vllm_errors_as_user_errors,
)
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.formats.base import format_of
from qerl_pl.formats.base_format import DENSE
from qerl_pl.formats.dense_checkpoint import write_dense_checkpoint
from qerl_pl.models.families import family_of, linear_shapes, names_match
from qerl_pl.models.folder import end_token_ids, load_config, load_tokenizer, read_config
from qerl_pl.models.memory import GIB, check_length, files_gib, kv_cache_size
from qerl_pl.models.shape import Shape
from qerl_pl.types import Completion, PolicyWeights, RolloutRequest, SamplingConfig

log = logging.getLogger(__name__)

CPU_BATCH = 4096
"""Tokens of a forward pass on a CPU."""


@dataclass(eq=False, repr=False)
class VLLMEngine(RolloutEngine):
    """vLLM, colocated with the trainer: adapter, norms and noise are written into its memory.

    On a GPU vLLM gets a 4-bit base as it is; on a CPU (vLLM's CPU build) it gets dequantized weights. Log-probabilities
    are those of the distribution that is sampled from, temperature and filters included.

    Args:
        kv_cache_gib: GiB for the key/value cache. By default 4 on a GPU and 0.5 on a CPU.
        gpu_memory_utilization: Share of the GPU's memory for vLLM altogether, instead of kv_cache_gib; the trainer's
            memory counts as used. The cache takes what is free at the start, which may differ when a run is resumed;
            a cache that fills up changes the batches, and with them the last bits of results.
        kv_cache_dtype: fp8 (E4M3) halves the cache, so that it holds twice as many tokens; the sampler's
            log-probabilities then differ more from the trainer's. auto takes the model's data type.
        max_model_len: Longest sequence that vLLM prepares for; by default the longest that the run can ask for.
        max_num_seqs: Sequences decoded at once. Waiting ones are admitted when an eighth of these have finished.
        max_num_batched_tokens: Tokens of a forward pass; more speeds up prefill and needs more memory. By default
            vLLM chooses.
        linear_backend: Kernels of 4-bit linears and experts; auto lets vLLM choose. Not used on a CPU.
        decode_gemm_max_tokens: Tokens of a forward pass up to which NVFP4 linears, adapter included, run by this
            package's decode GEMM (bfloat16): all on Hopper GPUs; on others as many as a timing at the start finds
            faster than by Marlin. null leaves all to Marlin.
        dense_above: Tokens of a forward pass above which 4-bit linears multiply by their dequantized weight, as in
            prefill: twice as fast (bfloat16 only). null leaves all to Marlin.
        adapter: fused computes the adapter's products beside the base's, as the trainer does. merged multiplies by
            16-bit copies of the linears with the adapter in them, which round the sum and take 2 bytes a weight during
            rollouts. auto merges 16-bit bases, and on 4 bits takes copies above 64 sequences, if so many may run.
        enforce_eager: Run without compilation and CUDA graphs: starts a minute sooner and decodes slower. A CPU always
            does.
        sleep_mode: Release the key/value cache's memory during the update (GPU only).
        share_weights: Let the trainer use vLLM's weights instead of loading the base a second time (GPU; 4 bits by
            marlin). Marlin takes NVFP4's blocks below 3.5e-5 of a matrix's largest weight for zero. gpt-oss's experts
            run by Marlin for its sake; false leaves their kernels to vLLM.
        prefix_caching: Compute the prompt once for all its completions. By default, unless the model has gated delta
            nets: vLLM reuses their states in blocks of hundreds of tokens alone.
        load_format: auto reads the weights; dummy makes random ones from config.json alone, to measure speed (not NF4).
    """

    _alive: ClassVar[int] = 0

    kv_cache_gib: float | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    linear_backend: Literal["marlin", "auto"] = "marlin"
    decode_gemm_max_tokens: int | None = DECODE_GEMM_MAX_TOKENS
    dense_above: int | None = 256
    adapter: AdapterMode = "fused"
    enforce_eager: bool = False
    sleep_mode: bool = True
    share_weights: bool = True
    prefix_caching: bool | None = None
    load_format: Literal["auto", "dummy"] = "auto"

    def __post_init__(self) -> None:
        if self.kv_cache_gib is not None and self.gpu_memory_utilization is not None:
            raise UserError("set one of kv_cache_gib and gpu_memory_utilization; both are set: set the other to null")
        limits = {"max_num_seqs": self.max_num_seqs, "dense_above": self.dense_above}
        require_at_least(1, limits | {"decode_gemm_max_tokens": self.decode_gemm_max_tokens})
        self.kernels: list[str] = []
        """Class names of the kernels that vLLM has chosen for the linears."""
        self._expert_kernels: list[str] = []
        self.inactive: dict[str, str] = {}
        """Optional features that the settings ask for and that are off, each with the reason."""
        self._spec: EngineSpec | None = None
        self._llm: Any = None
        self._asleep = False
        self._stale = True  # merged copies, since a sync or since `sleep` released their memory
        self._shapes: dict[str, tuple[int, int]] = {}
        self._ends: tuple[int, ...] = ()
        self._has_tokenizer = False
        self._missing: dict[str, str] = {}

    @property
    def _on_gpu(self) -> bool:
        assert self._spec is not None, "launch comes first"
        return self._spec.device.type == "cuda"

    @property
    def _sleeps(self) -> bool:
        """Whether `sleep` releases the cache's memory: vLLM's CPU build cannot."""
        return self.sleep_mode and self._on_gpu

    def caches_prefixes(self, has_delta_nets: bool) -> bool:
        """Whether the prompt of a group is computed once, for a model with or without gated delta nets."""
        return not has_delta_nets if self.prefix_caching is None else self.prefix_caching

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Data type of cached keys and values, for a model of this data type."""
        return torch.float8_e4m3fn if self.kv_cache_dtype == "fp8" else dtype

    def launch(self, spec: EngineSpec) -> None:
        """Start vLLM, with room for the adapter.

        Raises:
            UserError: vLLM is absent, of an unknown release or a build for another device, or refuses to start; it does
                not run the requested kernel or length; a LoRA target is no linear of vLLM's model; vLLM does not read a
                setting of the model.
        """
        base_format = format_of(spec.base)
        served = base_format if runs(base_format, spec.device) else DENSE
        backend = linear_backend(served, self.linear_backend)
        config = load_config(spec.base)
        family = family_of(config.model_type)
        weight_map.check_fixed(config, family)
        if spec.device.type == "cpu" and spec.dtype != torch.bfloat16 and family.delta_net:
            raise UserError(
                f"vLLM's CPU build computes gated delta nets in bfloat16 alone; the run is in {spec.dtype}: set "
                "model.policy.dtype to bfloat16, or use TransformersEngine"
            )
        linears = linear_shapes(config)
        check_targets(spec, linears)
        self._shapes = {name: size for name, size in linears.items() if spec.adapts(name)}
        length = self.max_model_len or spec.max_tokens
        kv_gib = kv_cache_size(self.kv_cache_gib, self.gpu_memory_utilization, spec.device)
        least_bytes = partial(Shape.of(config).sequence_kv_bytes, dtype=self.cache_dtype(spec.dtype))
        check_length(length, spec.max_tokens, kv_gib, least_bytes)
        if backend == "marlin":
            quantized = {name: size for name, size in linears.items() if not names_match(name, family.dense_linears)}
            linear_methods.check_marlin_shapes(quantized)
        start = time.perf_counter()
        import_vllm()
        self._spec, self._ends = spec, end_token_ids(spec.base)
        self._has_tokenizer = load_tokenizer(spec.base) is not None
        with tempfile.TemporaryDirectory(prefix="qerl-vllm-") as folder, process_state_restored():
            base = spec.base
            if served is not base_format:
                log.info("vLLM gets dense weights: it does not run %s here", base_format.name.upper())
                base = write_dense_checkpoint(spec.base, Path(folder) / "dense", spec.dtype)
            others = torch.distributed.is_initialized()  # of engines alive, or of the trainer's ranks
            try:
                self._llm = self._start(spec, base, backend, length, kv_gib)
            except UserError:
                release_memory(last=not others)  # or the groups of this start stop the next
                raise
            VLLMEngine._alive += 1
            try:
                active = self._check_start(backend)
            except UserError:
                self.close()
                raise
        log.info("%s; started in %.0f s", active, time.perf_counter() - start)

    def _check_start(self, backend: str | None) -> str:
        """A line that says what is active.

        Args:
            backend: Requested kernels; None where there is no choice.

        Raises:
            UserError: vLLM's model lacks its noisy norms or an adapted linear, or other kernels run.
        """
        import vllm

        assert self._spec is not None, "launch comes first"
        report: worker.WorkerReport = self._call("qerl_report")
        self.kernels, self._expert_kernels = report.kernels, report.experts
        kernels = ", ".join(report.kernels + report.experts)
        if not report.noisy_norms:
            raise UserError(
                "the model's layers must have the norms that its family names; vLLM's has none: use "
                "TransformersEngine, or another model"
            )
        if left_out := sorted(set(self._shapes) - set(report.adapted)):
            raise UserError(f"LoRA targets must be linears in vLLM's model; {left_out[0]} is none: take it out")
        for names in (report.kernels, report.experts):
            if backend not in (None, "auto") and names and not any(backend in kernel.lower() for kernel in names):
                raise UserError(f"linear_backend is {backend}; vLLM runs {kernels}: choose auto")
        features, off = [], dict[str, str]()
        if backend is not None and self.decode_gemm_max_tokens is not None and self.adapter != "merged":
            features.append(f"decode GEMM on {report.decode_gemm} of {report.linears} linears")
            if report.decode_gemm < report.linears:
                needs = "it needs NVFP4 in Marlin's layout, bfloat16 and a GPU on which it beats Marlin"
                off[compat.DECODE_GEMM] = self._missing.get(compat.DECODE_GEMM, needs)
        if linears := len(report.adapted):
            fused = report.decode_gemm == report.linears
            features.append("fused LoRA" if fused else f"LoRA on {linears} linears")
            if report.merged:
                features.append(f"merged copies of {report.merged} linears")
        options = {compat.SAMPLER: report.sampler} if self._on_gpu else {}
        if self.share_weights:
            options["shared weights"] = self._share()[1]
        features += [name for name, reason in options.items() if not reason]
        off |= {name: reason for name, reason in options.items() if reason}
        if self.kv_cache_dtype != "auto":
            features.append(f"keys and values in {self.kv_cache_dtype}")
        self.inactive = off
        missing = "".join(f"; without {name}: {reason}" for name, reason in off.items())
        return f"vLLM {vllm.__version__} ({kernels}): {', '.join(features) or 'no optional feature'}{missing}"

    def _start(self, spec: EngineSpec, base: Path, backend: str | None, length: int, kv_gib: float | None) -> Any:
        from vllm import LLM

        ours = backend is not None and spec.dtype == torch.bfloat16
        dense_above, decode_gemm_max_tokens = (self.dense_above, self.decode_gemm_max_tokens) if ours else (None, None)
        worker_cls = worker.worker_class(spec.device, spec.ranks)
        self._missing = compat.check_names(spec.device.type)
        select_backend_of(spec.device)  # for every base: vLLM samples with what it compiles and warms up now
        config, base_format = read_config(base), format_of(base)
        family = family_of(config["model_type"])
        check_reads(base_format, self._missing)
        compat.check_records_routing(spec.record_routing, self.caches_prefixes(family.delta_net is not None))
        experts = None
        if family.experts is not None:
            experts = moe_backend(base_format, self.linear_backend, self.share_weights)
        sequences = sequences_with_states(base, self.max_num_seqs, kv_gib, self.cache_dtype(spec.dtype))
        copies_above = merged_above(self.adapter, backend is not None, self.max_num_seqs)
        with vllm_errors_as_user_errors(self.kv_cache_dtype), stdout_with_descriptor():
            register_architecture(config, spec.device)
            return LLM(
                model=str(base),
                dtype=str(spec.dtype).removeprefix("torch."),
                worker_cls=worker_cls,
                # Several ranks: on this rank's own GPU, beside the trainer's process group.
                distributed_executor_backend="external_launcher" if spec.ranks > 1 else None,
                # By name: vLLM would prefer a second layout of the weights, which Mistral's repositories have.
                config_format="hf",
                **load_options(base_format, self.load_format),
                skip_tokenizer_init=not self._has_tokenizer,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                hf_overrides=position_overrides(config),
                max_model_len=length,
                max_num_seqs=sequences,
                max_num_batched_tokens=self.max_num_batched_tokens
                or (None if self._on_gpu else max(length, CPU_BATCH)),
                # A seeded request whose prompt is split over two passes fails on a CPU.
                enable_chunked_prefill=self._on_gpu,
                use_tqdm_on_load=False,
                enable_prefix_caching=self.caches_prefixes(family.delta_net is not None),
                enforce_eager=self.enforce_eager or not self._on_gpu,
                enable_sleep_mode=self._sleeps,
                # Also with a given cache vLLM wants this share free at the start.
                gpu_memory_utilization=0.01 if kv_gib is not None else self.gpu_memory_utilization,
                kv_cache_memory_bytes=None if kv_gib is None else int(kv_gib * GIB),
                kv_cache_dtype=self.kv_cache_dtype,
                mamba_ssm_cache_dtype="auto" if family.delta_net is None else "float32",
                linear_backend=backend or "auto",
                enable_return_routed_experts=spec.record_routing,
                moe_backend=experts or "auto",
                additional_config=worker.engine_config(spec, dense_above, decode_gemm_max_tokens, copies_above),
                compilation_config={"inductor_compile_config": REPEATABLE} | graph_settings(sequences)
                if self._on_gpu
                else None,
            )

    def shared_weights(self) -> SharedWeights | None:
        """Linears, embeddings and lm_head, so that the GPU holds the base once; None with other kernels."""
        assert self._spec is not None, "launch comes first"
        shared, reason = self._share()
        if shared is None:
            log.info("the trainer loads its own copy of the base, %.3g GiB: %s", files_gib(self._spec.base), reason)
        return shared

    def _share(self) -> tuple[SharedWeights | None, str | None]:
        """The shared weights, or why there are none."""
        assert self._spec is not None, "launch comes first"
        if not self.share_weights:
            return None, "share_weights is off"
        if reason := linear_methods.why_not_shared([*self.kernels, *self._expert_kernels], self._spec):
            return None, reason
        shared: SharedWeights | None = self._call("qerl_shared_weights")
        return shared, None if shared else "a weight is padded, or shares one of Marlin's tiles with another"

    def _call(self, method: str, *args: object) -> Any:
        assert self._llm is not None, "launch comes first"
        return self._llm.collective_rpc(method, args=args)[0]

    def sync(self, weights: PolicyWeights) -> float:
        """Write adapter, trained weights and noise into vLLM's memory, and reset its prefix cache.

        Raises:
            UserError: The adapter names a linear, or has a rank, that the engine was not launched with; or vLLM's model
                has no such weight.
        """
        assert self._spec is not None and self._llm is not None, "launch comes first"
        adapter = weights.adapter or {}
        check_adapter(adapter, self._shapes, self._spec.lora_rank)
        self._call("qerl_write_adapter", adapter, weights.scaling)
        noise_std: float = self._call("qerl_write_tensors", weights.tensors, weights.noise)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: a request is still running")
        self._stale = True
        return noise_std

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> list[list[Completion]]:
        """Sample a completion for each seed of each request, as a vLLM request with that seed.

        Raises:
            UserError: As `check_requests`.
        """
        assert self._spec is not None and self._llm is not None, "launch comes first"
        check_requests(requests, sampling, self._spec, self._has_tokenizer)
        self.generate_from(source := BatchSource(requests, self.max_num_seqs), sampling)
        return regroup(requests, source.completions)

    def generate_from(self, source: RequestSource, sampling: SamplingConfig) -> None:
        """Sample all requests of a source, each as soon as it is ready, while others run.

        Raises:
            UserError: As `check_requests`.
        """
        assert self._spec is not None and self._llm is not None, "launch comes first"
        self.wake()
        if self._stale:
            self._call("qerl_merge")
            self._stale = False
        engine, running, number = self._llm.llm_engine, dict[str, int](), itertools.count()
        in_parts = sampling.stop or self._spec.record_routing
        try:
            with nullcontext() if in_parts else processed_once(engine.output_processor), allocated_by_block(engine):
                while True:
                    for key, request in source.take(wait=not running):
                        check_requests([request], sampling, self._spec, self._has_tokenizer)
                        (seed,) = request.seeds
                        name, prompt = f"request-{next(number)}", {"prompt_token_ids": list(request.prompt_ids)}
                        engine.add_request(name, prompt, request_params(sampling, seed, self._ends, request.max_tokens))
                        running[name] = key
                    if not running:
                        return
                    with self._without_compiler():
                        outputs = engine.step()
                    for output in outputs:
                        if output.finished:
                            source.put(running.pop(output.request_id), self._completion(output))
        finally:
            if running:  # an error: the next sync needs an engine without requests
                engine.abort_request(list(running))

    def _completion(self, output: Any) -> Completion:
        assert self._spec is not None
        return completion_of(output.outputs[0], len(output.prompt_token_ids) if self._spec.record_routing else None)

    def _without_compiler(self) -> AbstractContextManager[Any]:
        """On a CPU: small helpers that vLLM compiles even in eager mode would need a C++ compiler."""
        return nullcontext() if self._on_gpu else torch.compiler.set_stance("force_eager")

    def sleep(self) -> None:
        """Release the memory of the key/value cache and of merged copies; the rest stays. On a CPU nothing happens."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = self._stale = True

    def wake(self) -> None:
        """Allocate the cache's memory again; a no-op when awake.

        It comes from the driver, to which PyTorch first returns the update's cached memory.
        """
        if self._asleep:
            torch.cuda.empty_cache()
            self._llm.wake_up()
            self._asleep = False

    def memory_gib(self) -> Mapping[str, float]:
        """See `RolloutEngine`; without the model's weights on a CPU, whose build repacks linears out of sight."""
        held: dict[str, float] = self._call("qerl_memory_gib")
        if not self._on_gpu:
            del held["weights"]
        releasable = held["kv_cache"] + held["merged"] if self._sleeps else 0.0
        return held | {"releasable": releasable, "released": releasable if self._asleep else 0.0}

    def close(self) -> None:
        """Free vLLM's memory; on several ranks what it holds itself goes with the process.

        Shutdown would end the trainer's group.
        """
        if self._spec is None or self._llm is None:
            return
        alone = self._spec.ranks == 1
        if alone:
            self.wake()
            self._llm.llm_engine.engine_core.shutdown()
        self._llm, self._asleep = None, False
        VLLMEngine._alive -= 1
        release_memory(last=alone and VLLMEngine._alive == 0)
