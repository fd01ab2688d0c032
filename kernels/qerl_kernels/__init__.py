"""Four-bit weights and token log-probabilities: tensors in, tensors out. Imports without a GPU and without Triton.

`reference` is the plain truth of every op; `select_backend` chooses what the ops here run on.
"""

from qerl_kernels.activation import silu_product
from qerl_kernels.backend import Backend, select_backend, selected_backend, triton_available
from qerl_kernels.decode_gemm import (
    DECODE_GEMM_MAX_TOKENS,
    decode_gemm_linear,
    decode_gemm_linear_reference,
    decode_gemm_sizes,
    decode_gemm_supported,
)
from qerl_kernels.frozen_weights import DenseWeight, FrozenWeight, MarlinRows, MXFP4Weight, NVFP4Weight
from qerl_kernels.linear import (
    AdaptedWeight,
    LoraFactors,
    dense_linear,
    frozen_linear,
    frozen_linears,
)
from qerl_kernels.logprob import chunked_token_logprobs
from qerl_kernels.marlin import MarlinTensor, marlin_alpha
from qerl_kernels.norm import rms_norm
from qerl_kernels.ops import (
    dequantize_marlin,
    dequantize_mxfp4,
    dequantize_nvfp4_unscaled,
    quantize_nvfp4,
)
from qerl_kernels.reference import (
    BlockScales,
    MXFP4Tensor,
    NVFP4Tensor,
    dequantize_nvfp4,
    nvfp4_global_scale,
    quantize_mxfp4,
)
from qerl_kernels.rope import rotary
from qerl_kernels.sampling import sample_tokens
from qerl_kernels.selective_checkpointing import saves_products, selective_checkpoint_contexts

__all__ = [
    "AdaptedWeight",
    "Backend",
    "BlockScales",
    "DenseWeight",
    "DECODE_GEMM_MAX_TOKENS",
    "FrozenWeight",
    "LoraFactors",
    "MXFP4Tensor",
    "MXFP4Weight",
    "MarlinRows",
    "MarlinTensor",
    "NVFP4Tensor",
    "NVFP4Weight",
    "chunked_token_logprobs",
    "dense_linear",
    "dequantize_marlin",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "dequantize_nvfp4_unscaled",
    "decode_gemm_linear",
    "decode_gemm_sizes",
    "decode_gemm_supported",
    "frozen_linear",
    "frozen_linears",
    "marlin_alpha",
    "nvfp4_global_scale",
    "decode_gemm_linear_reference",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "rms_norm",
    "rotary",
    "sample_tokens",
    "saves_products",
    "select_backend",
    "selected_backend",
    "selective_checkpoint_contexts",
    "silu_product",
    "triton_available",
]
