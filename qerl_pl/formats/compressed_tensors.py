"""What config.json says of weights that are packed as compressed-tensors packs them, so that others can load them."""

from typing import Any


def quantization_config(file_format: str, strategy: str, group_size: int, scale_dtype: str) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose linears, but for lm_head, have 4-bit weights."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": False,
        "scale_dtype": scale_dtype,
        "observer": "memoryless_minmax",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
