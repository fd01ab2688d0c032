"""`qerl export`: the trained adapter out of a run, or a whole model: with the adapter merged in, or fine-tuned."""

from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.dense_copy import write_dense_checkpoint
from qerl_pl.modules.policy import Policy, PolicyConfig
from qerl_pl.run.checkpoints import CHECKPOINT_KEY, check_fits, load_saved, saved_checkpoint
from qerl_pl.run.files import building, folder_identity


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
    if merge and not policy.whole:
        write_dense_checkpoint(base, dst, torch.bfloat16, _Merge(policy))
    else:
        with building(dst) as folder:
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
