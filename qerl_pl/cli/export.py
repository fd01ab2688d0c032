"""`qerl export`, and the evaluation of an exported adapter."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, dict_to_namespace
from torch import Tensor

from qerl_pl.callbacks.evaluation import ExportedAdapter
from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import LAYER_NORMS
from qerl_pl.formats.dense_checkpoint import write_dense_checkpoint
from qerl_pl.formats.quantize import in_format, local_folder
from qerl_pl.modules.policy import BASE_FILE, Policy, PolicyConfig
from qerl_pl.persistence.atomic_files import atomic_directory, folder_identity
from qerl_pl.persistence.checkpoint_io import CHECKPOINT_KEY, check_fits, load_saved, saved_checkpoint
from qerl_pl.toy import build_toy_policy
from qerl_pl.types import PolicyWeights

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_NOT_PLAIN = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")

"""Keys of PEFT for other adapters than alpha / rank * B A."""


def base_of(folder: str | Path) -> Path:
    """Local folder of an exported adapter's base, in its format; downloaded or quantized again if it is not cached.

    Args:
        folder: Output of `qerl export`, or RUN/adapter.

    Raises:
        UserError: The folder does not name its base, or the base is gone.
    """
    saved = _saved_base(Path(folder))
    if saved is None:
        raise UserError(f"an exported adapter names its base in {BASE_FILE}; {folder} has none; export it again")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=PolicyConfig)
    settings = {name: value for name, value in saved.items() if value is not None}
    config: PolicyConfig = parser.instantiate_classes(parser.parse_object({"policy": settings})).policy
    source = build_toy_policy(config.toy) if config.path is None else local_folder(config.path)
    return in_format(source, config.quantization)


def _saved_base(folder: Path) -> dict[str, Any] | None:
    """The contents of `BASE_FILE`; None for an adapter of an earlier version, which has none."""
    path = folder / BASE_FILE
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_bytes())
        return {name: saved[name] for name in ("path", "toy", "quantization")}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{BASE_FILE} must say what the base is; {path} fails ({error!r}); export it again") from error


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
    if (kept := _saved_base(folder)) is not None:
        policy.path, policy.quantization = kept["path"], kept["quantization"]
        if kept["toy"] is not None:
            policy.toy = dict_to_namespace(kept["toy"])
    policy.lora.rank, policy.lora.alpha = rank, alpha
    policy.lora.targets = targets
    policy.train_norms = bool(set(LAYER_NORMS).intersection(full_finetuning))
    return ExportedAdapter(folder)


def export(run: Path, dst: Path, merge: bool = False, checkpoint: Path | None = None) -> None:
    """Write the adapter or model of a run, finished or not.

    Args:
        run: The run's folder (`trainer.default_root_dir`), which holds config.yaml and checkpoints; for a run from
            Python, Lightning's checkpoints.
        dst: Folder to write; must not exist. An adapter in PEFT's format, or with `merge` a model.
        merge: Write bf16 weights with the adapter merged in. After full fine-tuning the model is written in any case,
            in `model.policy.dtype`.
        checkpoint: Which checkpoint; by default the newest complete one.
    """
    if dst.exists():
        raise UserError(f"the destination must not exist; {dst} does; choose another name or remove it")
    path = checkpoint or saved_checkpoint(run)
    if path is None:
        raise UserError(
            f"export needs a checkpoint; {run} has no checkpoints/step=N.ckpt of ResumeCheckpoint, and no other in "
            "checkpoints or lightning_logs/version_N/checkpoints; name one with --checkpoint"
        )
    state = load_saved(path)[CHECKPOINT_KEY]
    config = _policy_config(run, state)
    base = config.base_folder()
    check_fits(state, folder_identity(base), config.finetune, config.scaling)
    policy = Policy(base, config, torch.device("cpu"), seed=0)
    policy.load_trained_state(state["trained"])
    if merge and not policy.full_finetuning:
        write_dense_checkpoint(base, dst, torch.bfloat16, partial(_merged, policy.weights(version=0)))
    else:
        with atomic_directory(dst) as folder:
            policy.save(folder)
    rollouts = state["policy_version"]
    print(f"wrote {_described(config, merge)} to {dst}, {_size(dst)}; after {rollouts} rollouts, from {path}")


def _described(config: PolicyConfig, merge: bool) -> str:
    if config.adapter is None:
        return f"the whole model ({config.dtype})"
    if merge:
        return "the whole model (adapter merged in, bfloat16)"
    held = "" if config.quantization == "none" else f" in {config.quantization.upper()}"
    return f"the adapter (rank {config.adapter.rank}, base {config.base_name}{held})"


def _size(folder: Path) -> str:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return f"{len(sizes)} files of {sum(sizes) / 2**20:.1f} MiB"


def _merged(weights: PolicyWeights, name: str, tensor: Tensor) -> Tensor:
    """A tensor of the base with its adapter added, or its trained value."""
    factors = (weights.adapter or {}).get(name.removesuffix(".weight"))
    if factors is None:
        return weights.tensors.get(name, tensor)
    a, b = factors
    return tensor + weights.scaling * (b.float() @ a.float())


def _policy_config(run: Path, state: dict[str, Any]) -> PolicyConfig:
    """As the command line has written it; of a run by Python as its checkpoint has it."""
    path = run / "config.yaml"
    if not path.is_file() and "policy" in state:
        return _built(state["policy"])
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
    return _built(policy)


def _built(policy: dict[str, Any]) -> PolicyConfig:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=PolicyConfig)
    config: PolicyConfig = parser.instantiate_classes(parser.parse_object({"policy": policy})).policy
    return config
