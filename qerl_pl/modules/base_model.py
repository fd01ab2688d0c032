"""Which folder the base model is loaded from: by trainer and engine alike."""

import hashlib
import logging
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from qerl_pl.errors import UserError
from qerl_pl.formats.described import described_model
from qerl_pl.formats.model_files import is_nvfp4, other_files
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules.lora import check_targets
from qerl_pl.modules.policy import PolicyConfig
from qerl_pl.run.files import cache_root, folder_identity
from qerl_pl.toy import build_toy_policy

log = logging.getLogger(__name__)


def resolve_base(config: PolicyConfig) -> Path:
    """Local folder of the base model, in the precision that the policy asks for.

    Builds the toy policy, downloads from the hub, or quantizes 16-bit weights, each once: the results are cached.

    Raises:
        UserError: The path is neither a folder nor a model of the hub, its files disagree, it has no place for the
            adapter, or the weights are quantized although the policy asks for none.
    """
    source = build_toy_policy(config.toy) if config.path is None else _local_folder(config.path)
    check_targets(described_model(source), config.lora)
    if config.quantization == "none":
        if is_nvfp4(source):
            raise UserError(
                f"quantization: none needs 16-bit weights; {source} is NVFP4; "
                "set model.policy.quantization to nvfp4 or name the 16-bit model"
            )
        return source
    if is_nvfp4(source):
        return source
    target = cache_root() / f"nvfp4-{_identity(source)}"
    if not target.is_dir():
        log.info("quantizing %s to NVFP4 (once; `qerl quantize` does it beforehand)", source)
        quantize_checkpoint(source, target, device="cuda" if torch.cuda.is_available() else "cpu")
    return target


def _identity(source: Path) -> str:
    """Digest of all that a quantized copy is made of: weights, and the files that are copied."""
    digest = hashlib.blake2b(folder_identity(source).encode(), digest_size=16)
    for path in other_files(source):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _local_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"model.policy.path must be a folder or a model of the hub; {path!r} is neither "
            f"({type(error).__name__}); check the spelling, or download the model and give its folder"
        ) from error
