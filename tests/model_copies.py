"""Copies of a model's folder in which a test changes something."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def copy_of(source: Path, folder: Path, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
    """Copy a model of one file; its tensors are `tensors`, if given, and config.json has these settings besides."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if tensors is not None:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    if config:
        settings = json.loads((source / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(settings))
    return folder
