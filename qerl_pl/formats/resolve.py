"""Which folder a base model is loaded from, by trainer and engine alike: found, downloaded or quantized, each once."""

import hashlib
import logging
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from qerl_pl.errors import UserError
from qerl_pl.formats.base import Quantization, format_of
from qerl_pl.formats.dense import DENSE
from qerl_pl.formats.model_files import other_files
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.run.files import cache_root, folder_identity, made_once

log = logging.getLogger(__name__)


def local_folder(path: str) -> Path:
    """A model's folder by its path, or by its name on the hub, from where it is downloaded once.

    Raises:
        UserError: The path is neither a folder nor a model of the hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the hub cannot be reached"
        raise UserError(
            f"model.policy.path must be a folder or a model of the hub; {path!r} is no folder here, was not downloaded "
            f"before, and {why}; connect this machine to the network, or give the folder of the downloaded model"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"model.policy.path must be a folder or a model of the hub; {path!r} is neither "
            f"({type(error).__name__}); check the spelling, or download the model and give its folder"
        ) from error


def in_format(source: Path, quantization: Quantization) -> Path:
    """A model in a format: its folder as it is, or a copy that is quantized once and cached.

    Args:
        source: The model's folder.
        quantization: Name of the format.

    Raises:
        UserError: The weights are quantized in another format.
    """
    found = format_of(source)
    if found.name == quantization:
        return source
    if quantization == "none" or found is not DENSE:
        raise UserError(
            f"quantization: {quantization} needs 16-bit weights; {source} is {found.name.upper()}; "
            f"set model.policy.quantization to {found.name} or name the 16-bit model"
        )
    target = cache_root() / f"{quantization}-{_identity(source)}"
    with made_once(target) as missing:
        if missing:
            log.info("quantizing %s to %s (once; `qerl quantize` does it beforehand)", source, quantization.upper())
            quantize_checkpoint(source, target, quantization, device="cuda" if torch.cuda.is_available() else "cpu")
    return target


def _identity(source: Path) -> str:
    """Digest of all that a quantized copy is made of: weights, and the files that are copied."""
    digest = hashlib.blake2b(folder_identity(source).encode(), digest_size=16)
    for path in other_files(source):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
