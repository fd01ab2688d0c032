"""The model card that `qerl export` writes: what was trained, on what and how, for the model hub."""

import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from qerl_pl.callbacks.evaluation import metrics_table, sampling_line, weights_digest
from qerl_pl.callbacks.summary import held_out_rows
from qerl_pl.modules import Policy, PolicyConfig, QeRLModule, SFTModule
from qerl_pl.runtime.versions import installed_versions

log = logging.getLogger("qerl_pl")

CONFIG = "qerl_config.yaml"
"""The run's configuration beside the card."""
PLOT = "run.png"
PACKAGES = ("qerl-pl", "torch", "transformers", "lightning", "math-verify", "peft")
STEP = {QeRLModule.kind: "rollouts", SFTModule.kind: "steps"}
"""What a training counts."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)(?<!\.jsonl)(?<!\.csv)(?<!\.parquet)")
_TEXTS = ("system_prompt", "template")
"""Keys of prompts, which may look like paths: /no_think Answer in <answer></answer>."""
_TAGS = {QeRLModule.kind: "reinforcement-learning", SFTModule.kind: "sft"}
_OF_THIS_MACHINE = {"resume": None, "ckpt_path": None}
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
_NOISE, _ROLLOUT = "AdaptiveQuantizationNoise", "RolloutCallback"


def write_model_card(folder: Path, run: Path, policy: Policy, merged: bool, steps: int, kind: str) -> None:
    """Write README.md, and beside it the run's plot and its configuration without folders of this machine.

    What the run has not written (config.yaml, summary.json, run.png, evaluation.json) the card leaves out.

    Args:
        folder: The exported adapter or model.
        run: The run's folder.
        policy: With the weights that are exported.
        merged: Whether the adapter is merged into the base.
        steps: Rollouts or steps that the weights were trained for.
        kind: The training, `reinforcement learning` or `supervised fine-tuning`.
    """
    path = run / "config.yaml"
    given = yaml.safe_load(path.read_bytes()) if path.is_file() else {}
    config = without_folders(given) if given else {}
    if config:
        (folder / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    if (run / PLOT).is_file():
        shutil.copyfile(run / PLOT, folder / PLOT)
    is_adapter = not merged and not policy.full_finetuning
    data = _metadata(policy.config, given, is_adapter, kind)
    sections = [
        _introduction(policy.config, config, is_adapter, f"{steps} {STEP[kind]} of {kind}"),
        _curves(run, steps),
        _evaluation(run, policy),
        _repeat(config),
    ]
    text = "\n\n".join(section for section in sections if section)
    (folder / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n{text}\n", encoding="utf-8")


def without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration for publication, without folders and secrets.

    Of absolute paths the last name is left, of a URL the word URL, of another package's class its name. Loggers,
    plugins and the run's folder are left out.
    """
    trainer = {**config.get("trainer", {}), "default_root_dir": None}
    trainer |= {key: None for key in ("logger", "plugins") if not isinstance(trainer.get(key, True), bool)}
    public: dict[str, Any] = _public({key: value for key, value in config.items() if key in _KEYS})
    return public | {"trainer": _public(trainer)} | _OF_THIS_MACHINE


def _public(value: Any) -> Any:
    if isinstance(value, Mapping) and "class_path" in value:
        name, arguments = str(value["class_path"]), value.get("init_args") or {}
        if not name.startswith(_PACKAGES):
            arguments = {key: item for key, item in arguments.items() if key in _NUMBERS and _is_number(item)}
        elif name.startswith("qerl_pl.environments."):  # whose mappings are for other packages' classes
            arguments = {key: item for key, item in arguments.items() if not isinstance(item, Mapping)}
        return {"class_path": _public(name)} | ({"init_args": _public(arguments)} if "init_args" in value else {})
    if isinstance(value, Mapping):
        public = {key: item for key, item in value.items() if key not in _PRIVATE}
        return {key: item if key in _TEXTS else _public(item) for key, item in public.items()}
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
    numbers = value if isinstance(value, list) else [value]
    return all(isinstance(number, int | float) for number in numbers)


def _metadata(policy: PolicyConfig, config: Mapping[str, Any], is_adapter: bool, kind: str) -> ModelCardData:
    base = _hub_name(policy.path)
    tags = ["qerl_pl", _TAGS[kind], *(["lora"] if policy.finetune == "lora" else [])]
    tags += [policy.quantization] if policy.quantization != "none" else []
    if (objective := _at(config, "model", "objective", "class_path")) is not None:
        tags.append(_short(objective).lower())
    return ModelCardData(
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        datasets=sorted(set(_data_sets(_at(config, "data", "init_args")))) or None,
        pipeline_tag="text-generation",
        tags=tags,
        base_model_relation=("adapter" if is_adapter else "finetune") if base else None,
    )


def _hub_name(path: str | None) -> str | None:
    """The path as a name of the model hub; None for the toy policy and whatever is here."""
    if path is None or not _HUB_NAME.fullmatch(path) or Path(path).exists():
        return None
    return path


def _data_sets(settings: Any) -> Iterator[str]:
    """Hub data sets that were trained on: each `path`, except those under `sets`, which are for evaluation."""
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        if key == "path" and isinstance(value, str) and (name := _hub_name(value)) is not None:
            yield name
        elif key != "sets":
            for item in value if isinstance(value, list) else [value]:
                yield from _data_sets(item)


def _introduction(policy: PolicyConfig, config: Mapping[str, Any], is_adapter: bool, training: str) -> str:
    base = "Toy policy" if policy.path is None else Path(policy.path).name
    name = _hub_name(policy.path)
    link = base if name is None else f"[{name}](https://huggingface.co/{name})"
    held = "" if policy.quantization == "none" else f"in {policy.quantization.upper()}, other tensors "
    lora = policy.lora_spec
    trained = "all weights"
    if lora is not None:
        trained = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}"
    norms = ", and the RMSNorm scales" if policy.train_norms and policy.finetune == "lora" else ""
    what = "The adapter" if is_adapter else "The model, with the adapter merged in,"
    what = "The model" if policy.finetune == "full" else what
    objective = _at(config, "model", "objective", "class_path")
    rows = [
        ("base", f"{link}, {held}in {policy.dtype}"),
        ("trained", f"{trained}{norms}"),
        ("data", _class(_at(config, "data"))),
        ("objective", _class(_at(config, "model", "objective"))),
        ("optimizer", _class(_at(config, "model", "optimizer"))),
        *_rollout_rows(config),
        ("versions", ", ".join(" ".join(pair) for pair in installed_versions(PACKAGES).items())),
    ]
    table = [f"| {label} | {_cell(text)} |" for label, text in rows if text]
    return "\n".join(
        [
            f"# {base}" + ("" if objective is None else f" trained by {_short(objective)}"),
            "",
            f"{what} after {training} with qerl_pl.",
            "",
            "| | |",
            "|---|---|",
            *table,
            "",
            "The versions are those that exported it.",
        ]
    )


def _rollout_rows(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of sampling, rewards and noise; none for a run without rollouts."""
    rollout = _callback(config, "rollout", _ROLLOUT)
    if not rollout or not rollout.get("rewards"):
        return []
    rewards = rollout["rewards"]
    named = rewards.items() if isinstance(rewards, Mapping) else (("", reward) for reward in rewards)
    noise = _callback(config, "noise", _NOISE)
    return [
        ("rewards", "; ".join(f"{name}: {_class(one)}".removeprefix(": ") for name, one in named)),
        ("rollouts", f"{rollout['group_size']} completions a prompt, {_settings(rollout['sampling'])}"),
        ("noise", "none" if noise is None else f"adaptive quantization noise: {_settings(noise)}"),
    ]


def _callback(config: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any] | None:
    """Settings of a callback, from `trainer.callbacks` or its top-level key; None where it is off."""
    listed = _at(config, "trainer", "callbacks")
    for one in listed if isinstance(listed, list) else [listed]:
        if isinstance(one, Mapping) and _short(str(one.get("class_path"))) == name:
            return one.get("init_args", {})
    value = config.get(key)
    return value.get("init_args", value) if isinstance(value, Mapping) else None


def _curves(run: Path, rollouts: int) -> str:
    plot = f"![Reward, entropy and noise of the run]({PLOT})" if (run / PLOT).is_file() else ""
    path = run / "summary.json"
    summary = json.loads(path.read_bytes()) if path.is_file() else {}
    if "held_out_reward_before" not in summary:
        return f"## Curves\n\n{plot}" if plot else ""
    rows = [("reward, mean of the first and the last rollouts", summary["reward_first"], summary["reward_last"])]
    rows += held_out_rows(summary)
    rows.append(("policy entropy, nats", summary["entropy_first"], summary["entropy_last"]))
    lines = [f"| {name} | {_number(first)} | {_number(last)} |" for name, first, last in rows]
    run_of = "" if summary["steps"] == rollouts else f"Of the complete run of {summary['steps']} rollouts.\n\n"
    table = "\n".join(["| | at the start | at the end |", "|---|---|---|", *lines])
    return f"## Curves\n\n{run_of}{plot}\n\n{table}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _evaluation(run: Path, policy: Policy) -> str:
    path = run / "evaluation.json"
    if not path.is_file():
        return ""
    report = json.loads(path.read_bytes())
    if report["trained"] != weights_digest(policy.trained_state()):
        log.warning("%s is of other weights than are exported; the model card leaves it out", path)
        return ""
    held = f"{report['quantization']}, {report['dtype']}, {report['engine']}"
    return f"## Evaluation\n\n{metrics_table(report)}\n\nBase in {held}; {sampling_line(report)}"


def _repeat(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    return f"""## Repeat

[{CONFIG}]({CONFIG}) is the configuration. Of local files it has the names: lay them beside it. Loggers, keys, and
arguments of other packages' classes are left out, and URLs have become the word URL: set what the run needs.

```sh
qerl fit -c {CONFIG}
```"""


def _class(value: Any) -> str:
    """A class of the configuration and its settings, in a line."""
    if isinstance(value, str):
        return f"`{_short(value)}`"
    if not isinstance(value, Mapping) or "class_path" not in value:
        return ""
    settings = _settings(value.get("init_args") or {})
    return f"`{_short(value['class_path'])}`" + (f": {settings}" if settings else "")


def _settings(values: Mapping[str, Any], prefix: str = "") -> str:
    """Settings in a line, nested ones by their keys, without those that are null or empty."""
    texts = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            texts.append(_settings(value, f"{prefix}{name}."))
        elif value not in (None, [], ""):
            texts.append(f"{prefix}{name} {value}")
    return ", ".join(text for text in texts if text)


def _short(name: str) -> str:
    """The last name of an import path; a function in a file, file.py:function, as it is."""
    return name if ":" in name else name.rpartition(".")[2]


def _cell(text: str) -> str:
    """Text of a table's cell, with Markdown's column marks and tags escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _at(config: Any, *keys: str) -> Any:
    """The value below these keys, None where one is missing."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config
