"""`qerl export`, and the evaluation of an exported adapter."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, dict_to_namespace
from torch import Tensor

from qerl_pl.cli.model_card import STEP, gguf_line, serving_line, write_model_card
from qerl_pl.errors import UserError
from qerl_pl.formats.base import QUANTIZATIONS, format_of
from qerl_pl.formats.base_format import DENSE
from qerl_pl.formats.dense_checkpoint import fill_dense_folder
from qerl_pl.formats.quantize import config_in_reach, in_format
from qerl_pl.models.folder import TensorFiles, read_config
from qerl_pl.policy.adapter import is_adapter, read_adapter, rename_to_multimodal
from qerl_pl.policy.lora import LoraConfig
from qerl_pl.policy.policy import BASE_FILE, Policy, PolicyConfig, mark_trained
from qerl_pl.runtime.checkpoint_io import (
    CHECKPOINT_KEY,
    check_fits,
    finished_rollouts,
    load_saved,
    newest_checkpoint,
)
from qerl_pl.runtime.files import atomic_directory, folder_fingerprint, require_absent
from qerl_pl.types import PolicyWeights

ROUNDED_ROWS = 256
"""First rows of each matrix by which a merge measures what rounding leaves of the adapter."""
KEPT = 0.9
"""Share of the adapter's change from which merged weights may be rounded to 4 bits again."""


def base_of(folder: str | Path) -> Path:
    """Local folder of an exported adapter's base, in its format; downloaded or quantized again if it is not cached.

    Args:
        folder: Output of `qerl export`, or RUN/adapter.

    Raises:
        UserError: The folder does not name its base, or the base is gone.
    """
    saved = _saved_base(Path(folder), None)
    if saved is None:
        raise UserError(f"an exported adapter names its base in {BASE_FILE}; {folder} has none; export it again")
    config = _built({name: value for name, value in saved.items() if value is not None})
    return in_format(config.source_folder(), config.quantization)


def _saved_base(folder: Path, named: str | None) -> dict[str, Any] | None:
    """The contents of `BASE_FILE`; None for another program's adapter, which has none.

    Args:
        folder: Folder of the adapter.
        named: Base format that the user has named. The file of a downloaded adapter must not choose what code runs.
    """
    path = folder / BASE_FILE
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_bytes())
        found = {name: saved[name] for name in ("path", "toy", "quantization")}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{BASE_FILE} must say what the base is; {path} fails ({error!r}); export it again") from error
    if found["quantization"] not in (*QUANTIZATIONS, named):
        raise UserError(
            f"an adapter's base is in one of {', '.join(QUANTIZATIONS)}, or in the format that you name; {path} names "
            f"{found['quantization']!r:.60}; if you trust its code, set model.policy.quantization to it"
        )
    return found


def take_adapter(policy: Any, command: str, resume: object) -> None:
    """If a policy's path is an exported adapter, set the path to its base and `adapter` to the adapter.

    Raises:
        UserError: The adapter is to be trained, --resume is set too, files are missing, or it is no plain LoRA.
    """
    folder = None if policy.path is None else Path(policy.path).expanduser()
    if folder is None or not is_adapter(folder):
        return
    if command == "fit" or resume is not None:
        raise UserError(
            f"an exported adapter is evaluated by itself; got {folder} as model.policy.path with "
            f"{'qerl fit' if command == 'fit' else '--resume'}; name its base model there, and "
            f"{'the adapter as model.policy.adapter' if command == 'fit' else 'a checkpoint by --resume'}"
        )
    policy.path, policy.adapter = read_adapter(str(folder), "model.policy.path").base, str(folder)
    if (base := _saved_base(folder, policy.quantization)) is not None:
        policy.path, policy.quantization = base["path"], base["quantization"]
        if base["toy"] is not None:
            policy.toy = dict_to_namespace(base["toy"])
    policy.lora.rank = policy.lora.alpha = policy.lora.targets = policy.lora.use_rslora = None
    policy.train_norms = False


def export(
    run: Path,
    dst: Path,
    merge: bool = False,
    checkpoint: Path | None = None,
    multimodal: str | None = None,
    base: Path | None = None,
) -> None:
    """Write the adapter or model of a run, finished or not, with its tokenizer and a model card.

    Args:
        run: The run's folder (`trainer.default_root_dir`), which holds checkpoints; for a run from Python, Lightning's.
        dst: Folder to write; must not exist. An adapter in PEFT's format, or with `merge` a model.
        merge: Write bf16 weights with the adapter merged in. After full fine-tuning the model is written in any case,
            in `model.policy.dtype`.
        checkpoint: Which checkpoint; by default the newest complete one.
        multimodal: Folder or hub name of the model of text and images that the base is the text model of, to serve the
            adapter on it: vLLM silently ignores an adapter whose names are not those of the model that it serves.
        base: Folder of the run's base model, if it has been moved.
    """
    require_absent(dst)
    path = checkpoint or newest_checkpoint(run)
    if path is None:
        checkpoints = [*run.rglob("*.ckpt")]
        if not checkpoints:
            raise UserError(f"export needs a checkpoint; {run} has none; name one with --checkpoint")
        if len(folders := sorted({str(file.parent) for file in checkpoints})) > 1:
            raise UserError(
                f"export takes one run; {run} has checkpoints in {len(folders)} folders, {', '.join(folders[:3])}; "
                "name the run, or a checkpoint with --checkpoint"
            )
        path = max(checkpoints, key=finished_rollouts)
    state = load_saved(path)[CHECKPOINT_KEY]
    config = _built(state["policy"] if base is None else state["policy"] | {"path": str(base)})
    if state["lora"] is not None:  # what the run started from may be gone
        trains_norms = config.train_norms or any(".lora_" not in name for name in state["trained"])
        config = replace(config, adapter=None, lora=LoraConfig(**state["lora"]), train_norms=trains_norms)
    try:
        source = config.base_folder()
    except UserError as error:
        error.add_note("a base that has been moved is named by --base")
        raise
    if multimodal is not None:
        _check_multimodal(multimodal, source, merge or config.lora_spec is None)
    check_fits(state, base=folder_fingerprint(source), finetune=config.finetune, scaling=config.scaling)
    policy = Policy(source, config, torch.device("cpu"), seed=0)
    policy.load_trained_state(state["trained"])
    steps, kind = state["policy_version"], state["kind"]
    merged = _Merged(policy.weights(version=0), source) if merge and not policy.full_finetuning else None
    with atomic_directory(dst) as folder:
        if merged is not None:
            fill_dense_folder(source, folder, torch.bfloat16, merged)
            mark_trained(folder)
        else:
            policy.save(folder)
            if multimodal is not None:
                rename_to_multimodal(folder, multimodal)
        write_model_card(folder, run, _run_config(run), policy, merge, steps, kind, dst.name, multimodal)
    what = "the complete model" if merge or policy.full_finetuning else f"the adapter of {config.base_name}"
    print(f"wrote {what} to {dst}; after {steps} {STEP[kind]}, from {path}")
    own = config.path if config.quantization == "none" and config.path is not None else str(source)
    print(f"serve it: {serving_line(config, merge, multimodal or own, str(dst), multimodal is not None)}")
    if config.path is not None and (merge or policy.full_finetuning):  # no other program knows the toy's tokenizer
        print(f"as GGUF: {gguf_line(str(dst))}")
    if merged is not None and (kept := merged.kept_by_rounding()) is not None:
        advice = "quantizing them is fine" if kept >= KEPT else "serve them in 16 bits, or the adapter on its base"
        print(f"rounded to {config.quantization.upper()} again, they keep {kept:.2f} of the adapter's change: {advice}")


def _check_multimodal(model: str, base: Path, is_model: bool) -> None:
    """Refuse to name weights as another model has them, or a complete model's."""
    if is_model:
        raise UserError(
            f"--multimodal renames an adapter's weights; got {model} and a complete model to write; leave one out"
        )
    inner = config_in_reach(model).get("text_config") or {}
    own, found = read_config(base)["model_type"], inner.get("model_type")
    if own != found:
        raise UserError(
            f"--multimodal must be a model of text and images whose text model is the run's base, {own}; {model} has "
            f"{found or 'none, or cannot be reached'}; name the model that `qerl quantize` took the base from"
        )


class _Merged:
    """Adds the adapter to the base's tensors, and measures what rounding them to its format again would leave of it."""

    def __init__(self, weights: PolicyWeights, base: Path) -> None:
        self._weights, self._format, self._stored = weights, format_of(base), TensorFiles(base)
        self._kept = self._whole = 0.0

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the base with its adapter added, or its trained value."""
        linear = name.removesuffix(".weight")
        factors = (self._weights.adapter or {}).get(linear)
        if factors is None:
            return self._weights.tensors.get(name, tensor)
        a, b = factors
        change = self._weights.scaling * (b.float() @ a.float())
        merged = tensor + change
        if self._format is not DENSE and self._format.tensor_names(linear)[-1] in self._stored:
            whole = merged.bfloat16().float()
            scale, rows, before = self._format.global_scale([whole]), change[:ROUNDED_ROWS], tensor[:ROUNDED_ROWS]
            after = self._format.decode(*self._format.encode(whole[:ROUNDED_ROWS], scale), scale)
            self._kept += float(((after - before) * rows).sum())
            self._whole += float(rows.square().sum())
        return merged

    def kept_by_rounding(self) -> float | None:
        """Projection of the rounded change on the adapter's; None if the base has 16 bits, or nothing was trained."""
        return self._kept / self._whole if self._whole else None


def _run_config(run: Path) -> dict[str, Any]:
    """The contents of a run's config.yaml; empty for a run from Python, which has none."""
    path = run / "config.yaml"
    try:
        given = yaml.safe_load(path.read_bytes()) if path.is_file() else {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"a run's config.yaml must be YAML; {path} is not ({reason:.150}); restore it") from error
    return given if isinstance(given, dict) else {}


def _built(policy: dict[str, Any]) -> PolicyConfig:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=PolicyConfig)
    config: PolicyConfig = parser.instantiate_classes(parser.parse_object({"policy": policy})).policy
    return config
