"""4-bit linear layers, token log-probabilities and sampling: tensors in, tensors out. Needs neither a GPU nor Triton.

`reference` holds plain PyTorch versions; `select_backend` selects PyTorch or Triton for all ops.
"""

from qerl_kernels.attention import varlen_attention
from qerl_kernels.backend import (
    Backend,
    backend_for,
    select_backend,
    select_backend_of,
    selected_backend,
    triton_available,
)
from qerl_kernels.decode_gemm import (
    DECODE_GEMM_MAX_TOKENS,
    compile_decode_gemm,
    decode_gemm_linear,
    decode_gemm_linear_reference,
    decode_gemm_measured,
    decode_gemm_sizes,
    decode_gemm_supported,
)
from qerl_kernels.delta_rule import check_flash_linear_attention, gated_delta_rule
from qerl_kernels.experts import ExpertBiases, mixture_of_experts
from qerl_kernels.frozen_weights import (
    DenseStack,
    DenseWeight,
    FrozenWeight,
    MarlinRows,
    MarlinStack,
    MXFP4Stack,
    MXFP4Weight,
    NVFP4Stack,
    NVFP4Weight,
    StackedWeight,
    dequantize_marlin,
    dequantize_mxfp4,
    dequantize_nvfp4_unscaled,
)
from qerl_kernels.linear import AdaptedWeight, LoraFactors, frozen_linear, frozen_linears
from qerl_kernels.logprob import chunked_reverse_kl, chunked_token_logprobs
from qerl_kernels.marlin import MarlinTensor, marlin_alpha
from qerl_kernels.pointwise import (
    clamped_swiglu,
    clamped_swiglu_reference,
    gelu_tanh_product,
    rms_norm,
    rotary,
    silu_product,
)
from qerl_kernels.reference import (
    MXFP4Tensor,
    NVFP4Tensor,
    dequantize_nvfp4,
    nvfp4_global_scale,
    quantize_mxfp4,
    quantize_nvfp4,
)
from qerl_kernels.sampling import sample_tokens
from qerl_kernels.selective_checkpointing import (
    addend_checkpoint_contexts,
    last_addend,
    leaves_out_last_addend,
    selective_checkpoint_contexts,
    without_last_addend,
    without_saving_products,
)
from qerl_kernels.shared_prompts import SharedPrompts, shared_prompt_attention

__all__ = [
    "AdaptedWeight", "Backend", "DECODE_GEMM_MAX_TOKENS", "DenseStack", "DenseWeight", "ExpertBiases", "FrozenWeight",
    "LoraFactors", "MXFP4Stack", "MXFP4Tensor", "MXFP4Weight", "MarlinRows", "MarlinStack", "MarlinTensor",
    "NVFP4Stack", "NVFP4Tensor", "NVFP4Weight", "SharedPrompts", "StackedWeight", "addend_checkpoint_contexts",
    "backend_for", "check_flash_linear_attention", "chunked_reverse_kl", "chunked_token_logprobs", "clamped_swiglu",
    "clamped_swiglu_reference", "compile_decode_gemm",
    "decode_gemm_linear", "decode_gemm_linear_reference", "decode_gemm_measured", "decode_gemm_sizes",
    "decode_gemm_supported",
    "dequantize_marlin", "dequantize_mxfp4", "dequantize_nvfp4", "dequantize_nvfp4_unscaled", "frozen_linear",
    "frozen_linears", "gated_delta_rule", "gelu_tanh_product", "last_addend", "leaves_out_last_addend", "marlin_alpha",
    "mixture_of_experts", "nvfp4_global_scale", "quantize_mxfp4", "quantize_nvfp4", "rms_norm",
    "rotary", "sample_tokens", "select_backend", "select_backend_of", "selected_backend",
    "selective_checkpoint_contexts", "shared_prompt_attention", "silu_product", "triton_available", "varlen_attention",
    "without_last_addend", "without_saving_products",
]  # fmt: skip
