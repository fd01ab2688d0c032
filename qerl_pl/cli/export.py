"""`qerl export`, and the evaluation of an exported adapter."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import LAYER_NORMS
from qerl_pl.formats.dense_checkpoint import write_dense_checkpoint
from qerl_pl.modules import QeRLModule
from qerl_pl.modules.policy import Policy, PolicyConfig
from qerl_pl.persistence.atomic_files import atomic_directory, folder_identity
from qerl_pl.persistence.checkpoint_io import CHECKPOINT_KEY, AtomicCheckpointIO, check_fits, newest_checkpoint
from qerl_pl.types import PolicyWeights

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_NOT_PLAIN = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")

"""Keys of PEFT for other adapters than alpha / rank * B A."""


class ExportedAdapter(Callback):
    """Loads an adapter in PEFT's format before an evaluation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the adapter."""
        assert isinstance(pl_module, QeRLModule)
        pl_module.policy.load_trained_state(load_file(self.folder / _WEIGHTS))
        pl_module.adapter_folder = self.folder

    on_validation_start = on_test_start


def take_adapter(policy: Any, command: str, resume: object) -> ExportedAdapter | None:
    """If a policy's path is an exported adapter, set its base and shape instead, and return what loads it.

    Args:
        policy: Configuration under model.policy; changed.
        command: The subcommand.
        resume: The value of --resume.

    Raises:
        UserError: The adapter is to be trained, --resume is set too, files are missing, or it is no plain LoRA.
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
        saved = json.loads((folder / _CONFIG).read_bytes())
        base, rank, alpha = str(saved["base_model_name_or_path"]), int(saved["r"]), float(saved["lora_alpha"])
        targets, full_finetuning = tuple(sorted(saved["target_modules"])), saved.get("modules_to_save") or []
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{_CONFIG} must be PEFT's of a LoRA; {folder} has another ({error!r}); export it again"
        ) from error
    if others := [key for key in _NOT_PLAIN if saved.get(key)]:
        raise UserError(
            f"an adapter adds alpha / rank times B A, of one rank and alpha; {folder / _CONFIG} sets {others[0]}; "
            "merge it into its base with PEFT, and name that model"
        )
    policy.path = base
    policy.lora.rank, policy.lora.alpha = rank, alpha
    policy.lora.targets = targets
    policy.train_norms = bool(set(LAYER_NORMS).intersection(full_finetuning))
    return ExportedAdapter(folder)


def export(run: Path, dst: Path, merge: bool = False, checkpoint: Path | None = None) -> None:
    """Write the adapter or model of a run, finished or not.

    Args:
        run: The run's folder (`trainer.default_root_dir`), which holds config.yaml and checkpoints.
        dst: Folder to write; must not exist. An adapter in PEFT's format, or with `merge` a model.
        merge: Write bf16 weights with the adapter merged in. After full fine-tuning the model is written in any case,
            in `model.policy.dtype`.
        checkpoint: Which checkpoint; by default the newest complete one.
    """
    if dst.exists():
        raise UserError(f"the destination must not exist; {dst} does; choose another name or remove it")
    path = checkpoint or newest_checkpoint(run)
    if path is None:
        raise UserError(f"export needs a checkpoint; {run} has none; name one with --checkpoint")
    state = AtomicCheckpointIO().load_checkpoint(path)[CHECKPOINT_KEY]
    config = _policy_config(run)
    base = config.base_folder()
    check_fits(state, folder_identity(base), config.finetune, config.scaling)
    policy = Policy(base, config, torch.device("cpu"), seed=0)
    policy.load_trained_state(state["trained"])
    if merge and not policy.full_finetuning:
        write_dense_checkpoint(base, dst, torch.bfloat16, partial(_merged, policy.weights(version=0)))
    else:
        with atomic_directory(dst) as folder:
            policy.save(folder)


def _merged(weights: PolicyWeights, name: str, tensor: Tensor) -> Tensor:
    """A tensor of the base with its adapter added, or its trained value."""
    factors = (weights.adapter or {}).get(name.removesuffix(".weight"))
    if factors is None:
        return weights.tensors.get(name, tensor)
    a, b = factors
    return tensor + weights.scaling * (b.float() @ a.float())


def _policy_config(run: Path) -> PolicyConfig:
    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(f"export reads the policy from the run's config.yaml; {run} has none; name a run's folder")
    try:
        document = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"a run's config.yaml must be YAML; {path} is not ({reason:.150}); restore it") from error
    model = document.get("model") if isinstance(document, dict) else None
    policy = model.get("policy") if isinstance(model, dict) else None
    if not isinstance(policy, dict) or not {"path", "lora"} <= policy.keys():
        raise UserError(
            f"export reads the policy from the run's config.yaml; {path} has no model.policy with path and lora; "
            "restore the file that `qerl fit` wrote, or name a run's folder"
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=PolicyConfig)
    config: PolicyConfig = parser.instantiate_classes(parser.parse_object({"policy": policy})).policy
    return config
