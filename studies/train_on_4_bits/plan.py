"""The runs of a study, read from a YAML file.

    config: configs/quickstart.yaml          # base of every run; a path relative to the repository
    values: {device: gpu}                    # value of ${device} below; the command line may override it
    set: {trainer.accelerator: "${device}"}  # options of every run, as `qerl fit` takes them
    factors:                                 # what differs between runs
      seed: {keys: [seed_everything, data.seed]}                   # levels are values of these keys
      method: {levels: {plain: {label: 16-bit LoRA, set: {model.policy.quantization: none}}, …}}
    defaults: {method: plain, seed: 0}       # levels of factors that a block does not name
    blocks: [{method: [plain, nvfp4], seed: [0, 1, 2]}, …]         # all combinations of each block, without duplicates

`${factor}` is the level of a factor, also within another name, as in `${rate_${method}}`. A level may also set its own
`config`, and later factors override earlier ones. `extends: study.yaml`, a path from this one's folder, adds `values`,
`set`, `factors` and `defaults` to those of another study, and takes the rest from it where this one has none.
`with: {policy: {toy: {model.optimizer.lr: 0.001}}}` beside `set` applies only in combination with that level of another
factor.

Its page is set by

    question: Should I train on 4 bits?      # answered by the difference of two methods in `measure`:
    compare: [nvfp4_aqn, lora16]             # first minus second; the second is the reference of pictures and ceilings
    answer: One sentence.                    # shown beside what the rows say
    limits: [What the study cannot say, …]
    preregistered: plan.md                   # written before the runs; exempts the answer's difference from Holm's
    negligible: 0.01                         # accuracy; a smaller difference is none
    units: [rounding, seed]                  # random factors: differences are paired by all, averaged within the first
    strata: [policy]                         # factors whose levels are never compared; the first names the policy
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qerl_pl.errors import UserError

ROOT = Path(__file__).parents[2]
KEYS = {"config", "values", "set", "factors", "defaults", "blocks", "strata", "measure", "title", "note"} | {
    *("question", "answer", "limits", "compare", "preregistered", "units", "negligible", "extends"),
}
OWN_KEYS = {"question", "answer", "limits", "preregistered"}
"""Keys that `extends` does not inherit: a page's opening."""
_VALUE = re.compile(r"\$\{(\w+)\}")
Level = str | int | float | bool


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    levels: dict[str, Level]
    """The level of every factor."""
    config: Path
    overrides: dict[str, Any]
    """Options of `qerl fit` by key, before `${name}` is replaced."""

    @property
    def name(self) -> str:
        """Name of the run and its folder, such as "method=nvfp4,seed=0"."""
        return ",".join(f"{factor}={level}" for factor, level in self.levels.items())

    @property
    def digest(self) -> str:
        """Hash of the run's settings, without machine-dependent values, named as when the first rows were measured."""
        config = yaml.safe_load(self.config.read_text())
        if "evaluation" in config.get("rollout", {}):
            config["rollout"]["eval_samples"] = config["rollout"].pop("evaluation")["samples"]
        overrides = {key.replace("evaluation.samples", "eval_samples"): value for key, value in self.overrides.items()}
        made_of = [config, overrides]
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return int(self.overrides.get("trainer.devices", 1))

    @property
    def needs(self) -> set[str]:
        """Names of the placeholders in its options."""
        return set(_VALUE.findall(json.dumps(self.overrides)))

    def missing(self, values: Mapping[str, Any]) -> list[str]:
        """Placeholders without a value."""
        return sorted(name for name in self.needs if values.get(name) is None)

    def words(self, folder: Path, values: Mapping[str, Any]) -> list[str]:
        """Arguments of `qerl` that train or resume it in its folder."""

        def text(value: Any) -> str:
            return value if isinstance(value, str) else json.dumps(value)

        def replaced(value: Any) -> str:
            return _VALUE.sub(lambda match: text(values[match[1]]), text(value))

        overrides = {**self.overrides, "trainer.default_root_dir": str(folder)}
        options = [f"--{key}={replaced(value)}" for key, value in overrides.items()]
        return ["fit", "-c", str(self.config), "--resume=auto", *options]


@dataclass(frozen=True)
class Plan:
    """A study as read from its file."""

    path: Path
    runs: list[Run]
    values: dict[str, Any]
    """Values of the placeholders `${name}`; None if the command line must set them."""
    labels: dict[str, dict[str, str]]
    """Display names of levels, by factor and level."""
    defaults: dict[str, Level]
    strata: tuple[str, ...]
    """Factors whose levels are never compared with each other, such as the policy."""
    measure: str
    """Tag of the held-out accuracy."""
    title: str
    """Title of its page."""
    note: str
    """Introduction of its page."""
    question: str = ""
    """What the page answers first."""
    answer: str = ""
    """A sentence beside the answer that the rows give."""
    limits: tuple[str, ...] = ()
    """What the study cannot say."""
    compare: tuple[str, str] = ("nvfp4_aqn", "lora16")
    """Methods whose difference answers the question; the second is the reference."""
    preregistered: str = ""
    """Page that was written before the runs; its link, relative to the study's file."""
    units: tuple[str, ...] = ("seed",)
    """Factors that are drawn at random; values are averaged within levels of the first."""
    negligible: float = 0.0
    """Accuracy below which a difference counts as none."""

    def label(self, factor: str, level: Level) -> str:
        """Display name of a level."""
        return self.labels.get(factor, {}).get(str(level), f"{factor} {level}")


def read_plan(path: Path) -> Plan:
    """Read a study.

    Raises:
        UserError: The file uses an undefined name or an unknown key.
    """
    study = _read(path)
    factors, defaults = study["factors"], study.get("defaults", {})
    runs: dict[str, Run] = {}
    for block in study["blocks"]:
        for levels in _combinations(path, block, factors, defaults):
            run = _run(path, study, factors, levels)
            runs.setdefault(run.name, run)
    labels = {
        factor: {str(level): one.get("label", str(level)) for level, one in about.get("levels", {}).items()}
        for factor, about in factors.items()
    }
    return Plan(
        path=path,
        runs=list(runs.values()),
        values=study.get("values", {}),
        labels=labels,
        defaults=defaults,
        strata=tuple(study.get("strata", ())),
        measure=study.get("measure", "val/pass@1"),
        title=study.get("title", "A study of the paper's claims"),
        note=study.get("note", ""),
        question=study.get("question", ""),
        answer=study.get("answer", ""),
        limits=tuple(study.get("limits", ())),
        compare=_two(path, study.get("compare", Plan.compare)),
        preregistered=study.get("preregistered", ""),
        units=tuple(study.get("units", ("seed",))),
        negligible=study.get("negligible", 0.0),
    )


def _read(path: Path) -> dict[str, Any]:
    """The contents of a study's file, with those of the one that it extends."""
    study: dict[str, Any] = yaml.safe_load(path.read_text())
    if unknown := set(study) - KEYS:
        raise UserError(f"a study has the keys {', '.join(sorted(KEYS))}; {path} has {sorted(unknown)[0]}; take it out")
    if "extends" not in study:
        return study
    other = {key: value for key, value in _read(path.parent / study["extends"]).items() if key not in OWN_KEYS}
    added = {key: {**other.get(key, {}), **study.get(key, {})} for key in ("values", "set", "factors", "defaults")}
    return {**other, **study, **added}


def _two(path: Path, methods: Sequence[str]) -> tuple[str, str]:
    if len(methods) != 2:
        raise UserError(f"a study compares two methods; {path} has {len(methods)} in compare; name two")
    return methods[0], methods[1]


def _combinations(
    path: Path, block: Mapping[str, Any], factors: Mapping[str, Any], defaults: Mapping[str, Level]
) -> Iterator[dict[str, Level]]:
    """All combinations of levels; the last factor varies fastest."""
    if unknown := set(block) - set(factors):
        raise UserError(f"a block names factors; {path} has {sorted(unknown)[0]}, which is none of them; define it")
    if missing := [factor for factor in factors if factor not in block and factor not in defaults]:
        raise UserError(f"a factor needs levels or a default; {path} has a block without {missing[0]}; add either")
    choices = [block.get(factor, defaults.get(factor)) for factor in factors]
    lists = [choice if isinstance(choice, list) else [choice] for choice in choices]
    for levels in itertools.product(*lists):
        yield dict(zip(factors, levels, strict=True))


def _run(path: Path, study: Mapping[str, Any], factors: Mapping[str, Any], levels: dict[str, Level]) -> Run:
    overrides, config = dict(study.get("set", {})), study["config"]
    for factor, level in levels.items():
        about = factors[factor]
        if "keys" in about:
            overrides |= dict.fromkeys(about["keys"], level)
        elif level in about["levels"]:
            settings = about["levels"][level]
            overrides |= settings.get("set", {})
            for other, sets in settings.get("with", {}).items():
                overrides |= sets.get(levels[other], {})
            config = settings.get("config", config)
        else:
            raise UserError(f"a block names levels of a factor; {path} has {level} as {factor}; define it there")
    return Run(levels, ROOT / config, {key: _with_levels(value, levels) for key, value in overrides.items()})


def _with_levels(value: Any, levels: Mapping[str, Level]) -> Any:
    """A text with the levels of factors in place of their `${name}`; other values as they are."""
    if not isinstance(value, str):
        return value
    return _VALUE.sub(lambda match: str(levels.get(match[1], match[0])), value)
