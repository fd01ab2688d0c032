"""Four-bit weights and token log-probabilities: tensors in, tensors out. Imports without a GPU and without Triton."""

from qerl_kernels.logprob import chunked_token_logprobs
from qerl_kernels.reference import (
    BlockScales,
    MXFP4Tensor,
    NVFP4Tensor,
    dequantize_mxfp4,
    dequantize_nvfp4,
    dequantize_nvfp4_unscaled,
    nvfp4_global_scale,
    quantize_mxfp4,
    quantize_nvfp4,
    token_logprobs,
)

__all__ = [
    "BlockScales",
    "MXFP4Tensor",
    "NVFP4Tensor",
    "chunked_token_logprobs",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "dequantize_nvfp4_unscaled",
    "nvfp4_global_scale",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "token_logprobs",
]
