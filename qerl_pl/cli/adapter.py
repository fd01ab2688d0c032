"""An exported adapter in place of a model: its base is evaluated with it."""

import json
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, dict_to_namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file

from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import LAYER_NORMS
from qerl_pl.formats.resolve import in_format, local_folder
from qerl_pl.modules import QeRLModule
from qerl_pl.modules.policy import BASE_FILE, PolicyConfig
from qerl_pl.toy import build_toy_policy

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_NOT_PLAIN = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
"""Keys of PEFT that scale or add something else; `qerl export` sets none."""


class ExportedAdapter(Callback):
    """Has the policy evaluated with the adapter that `qerl export`, or the end of a run, has written.

    Args:
        folder: In PEFT's format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load it."""
        assert isinstance(pl_module, QeRLModule)
        pl_module.policy.load_trained_state(load_file(self.folder / _WEIGHTS))
        pl_module.adapter_folder = self.folder

    on_validation_start = on_test_start


def base_of(folder: str | Path) -> Path:
    """Local folder of the base that an adapter was trained on, in its format; made again where the cache has none.

    Args:
        folder: What `qerl export`, or the end of a run, has written.

    Raises:
        UserError: It does not say, or the base is gone.
    """
    kept = _kept_base(Path(folder))
    if kept is None:
        raise UserError(f"an exported adapter names its base in {BASE_FILE}; {folder} has none; export it again")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=PolicyConfig)
    given = {name: value for name, value in kept.items() if value is not None}
    config: PolicyConfig = parser.instantiate_classes(parser.parse_object({"policy": given})).policy
    source = build_toy_policy(config.toy) if config.path is None else local_folder(config.path)
    return in_format(source, config.quantization)


def _kept_base(folder: Path) -> dict[str, Any] | None:
    """What the adapter says of its base; None of one that was exported by an earlier version."""
    path = folder / BASE_FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
        return {name: found[name] for name in ("path", "toy", "quantization")}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{BASE_FILE} must say what the base is; {path} fails ({error!r}); export it again") from error


def take_adapter(policy: Any, command: str, resume: object) -> ExportedAdapter | None:
    """Where `path` of a policy is an exported adapter, put its base and shape there, and give what loads it.

    Args:
        policy: Configuration under model.policy; changed.
        command: The subcommand.
        resume: A checkpoint that is asked for besides, or None.

    Raises:
        UserError: The adapter is to be trained, a checkpoint is named too, its files are not whole, or it is no plain
            LoRA.
    """
    folder = None if policy.path is None else Path(policy.path).expanduser()
    if folder is None or not (folder / _CONFIG).is_file():
        return None
    if command == "fit" or resume is not None:
        raise UserError(
            f"an exported adapter is evaluated by itself; found {folder} as model.policy.path with "
            f"{'qerl fit' if command == 'fit' else '--resume'}; name its base model there, and a checkpoint by --resume"
        )
    if not (folder / _WEIGHTS).is_file():
        raise UserError(f"an exported adapter needs {_WEIGHTS}; {folder} has none; export it again")
    try:
        found = json.loads((folder / _CONFIG).read_bytes())
        base, rank, alpha = str(found["base_model_name_or_path"]), int(found["r"]), float(found["lora_alpha"])
        targets, whole = tuple(sorted(found["target_modules"])), found.get("modules_to_save") or []
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{_CONFIG} must be PEFT's of a LoRA; {folder} has another ({error!r}); export it again"
        ) from error
    if others := [key for key in _NOT_PLAIN if found.get(key)]:
        raise UserError(
            f"an adapter adds alpha / rank times B A, of one rank and alpha; {folder / _CONFIG} sets {others[0]}; "
            "merge it into its base with PEFT, and name that model"
        )
    policy.path = base
    if (kept := _kept_base(folder)) is not None:
        policy.path, policy.quantization = kept["path"], kept["quantization"]
        if kept["toy"] is not None:
            policy.toy = dict_to_namespace(kept["toy"])
    policy.lora.rank, policy.lora.alpha = rank, alpha
    policy.lora.targets = targets
    policy.train_norms = bool(set(LAYER_NORMS).intersection(whole))
    return ExportedAdapter(folder)
