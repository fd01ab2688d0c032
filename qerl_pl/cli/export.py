"""An exported adapter in place of a model: its base is evaluated with it."""

import json
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

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_NOT_PLAIN = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")

"""Keys of PEFT that scale or add something else; `qerl export` sets none."""


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
        targets, full_finetuning = tuple(sorted(found["target_modules"])), found.get("modules_to_save") or []
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
    policy.train_norms = bool(set(LAYER_NORMS).intersection(full_finetuning))
    return ExportedAdapter(folder)


def export(run: Path, dst: Path, merge: bool = False, checkpoint: Path | None = None) -> None:
    """Write what a run has learned, also of one that is not finished.

    Args:
        run: The run's folder (`trainer.default_root_dir`), which holds config.yaml and checkpoints; of a run by Python
            Lightning's checkpoints alone.
        dst: Folder to write; must not exist. An adapter in PEFT's format, or with `merge` a whole model.
        merge: Write bf16 weights with the adapter merged in instead of the adapter. After full fine-tuning, where there
            is none, the model is written in any case, in `model.policy.dtype`.
        checkpoint: Which checkpoint; by default the newest whole one.
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
        write_dense_checkpoint(base, dst, torch.bfloat16, _Merge(policy))
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


class _Merge:
    """Adds the adapter to a weight, or puts a tensor that was trained whole in its place."""

    def __init__(self, policy: Policy) -> None:
        self.weights = policy.weights(version=0)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        factors = (self.weights.adapter or {}).get(name.removesuffix(".weight"))
        if factors is not None:
            a, b = factors
            return tensor + self.weights.scaling * (b.float() @ a.float())
        return self.weights.tensors.get(name, tensor)


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
        found = " ".join(str(error).split())
        raise UserError(f"a run's config.yaml must be YAML; {path} is not ({found:.150}); restore it") from error
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
