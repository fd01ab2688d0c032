"""vLLM without this package's worker, for comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from qerl_pl.engines import EngineSpec
from qerl_pl.engines.vllm.requests import completion_of, request_params
from qerl_pl.engines.vllm.startup import graph_settings, import_vllm, process_state_restored
from qerl_pl.types import Completion, RolloutRequest, SamplingConfig

Adapter = Mapping[str, tuple[Tensor, Tensor]]


class StockEngine:
    """vLLM as it comes, 16-bit norms: its own LoRA kernels and an adapter from a folder, or none. For comparison only.

    Above 512 sequences it has `VLLMEngine`'s sizes of CUDA graphs, for by itself it captures none there.
    """

    def __init__(self, base: Path, spec: EngineSpec, adapter: Adapter | None, sequences: int, kv_gib: float) -> None:
        import_vllm()
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self._adapter, lora = None, dict[str, Any]()
        if adapter is not None:
            folder, rank, targets = base / "adapter", spec.lora_rank, list(spec.lora_targets)
            LoraConfig(r=rank, lora_alpha=rank, target_modules=targets).save_pretrained(str(folder))
            tensors = {
                f"base_model.model.{name}.lora_{side}.weight": tensor.to("cpu", spec.dtype)
                for name, pair in adapter.items()
                for side, tensor in zip("AB", pair, strict=True)
            }
            save_file(tensors, folder / "adapter_model.safetensors")
            self._adapter = LoRARequest("policy", 1, str(folder))
            lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": targets}
        with process_state_restored():
            self._llm = LLM(
                model=str(base),
                dtype="bfloat16",
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=spec.max_tokens,
                max_num_seqs=sequences,
                enable_prefix_caching=False,
                enforce_eager=spec.device.type == "cpu",
                compilation_config=graph_settings(sequences),
                logprobs_mode="processed_logprobs",
                gpu_memory_utilization=0.01,
                kv_cache_memory_bytes=int(kv_gib * 2**30),
                **lora,
            )

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> list[list[Completion]]:
        """A completion of each request, as `VLLMEngine.generate` returns them."""
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        params = [request_params(sampling, request.seeds[0], (), request.max_tokens) for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)
        return [[completion_of(output.outputs[0])] for output in outputs]
