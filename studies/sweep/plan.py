"""The runs of a study, read from a YAML file.

    config: configs/quickstart.yaml          # base of every run; a path relative to the repository
    values: {device: gpu}                    # value of ${device} below; the command line may override it
    set: {trainer.accelerator: "${device}"}  # options of every run, as `qerl fit` takes them
    factors:                                 # what differs between runs
      seed: {keys: [seed_everything, data.seed]}                   # levels are values of these keys
      method: {levels: {lora16: {set: {model.policy.quantization: none}}, …}}
    defaults: {method: lora16, seed: 0}      # levels of factors that a block does not name
    blocks: [{method: [lora16, nvfp4], seed: [0, 1, 2]}, …]         # all combinations of each block, without duplicates

`${factor}` is the level of a factor. Later factors override earlier ones.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qerl_pl.errors import UserError

ROOT = Path(__file__).parents[2]
KEYS = {"config", "values", "set", "factors", "defaults", "blocks"}
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
        """Hash of the run's settings, without machine-dependent values."""
        made_of = [yaml.safe_load(self.config.read_text()), self.overrides]
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]

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


def read_plan(path: Path) -> Plan:
    """Read a study.

    Raises:
        UserError: The file uses an undefined name or an unknown key.
    """
    study: dict[str, Any] = yaml.safe_load(path.read_text())
    if unknown := set(study) - KEYS:
        raise UserError(f"a study has the keys {', '.join(sorted(KEYS))}; {path} has {sorted(unknown)[0]}; take it out")
    factors, defaults = study["factors"], study.get("defaults", {})
    runs: dict[str, Run] = {}
    for block in study["blocks"]:
        for levels in _combinations(path, block, factors, defaults):
            run = _run(path, study, factors, levels)
            runs.setdefault(run.name, run)
    return Plan(path, list(runs.values()), study.get("values", {}))


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
    overrides = dict(study.get("set", {}))
    for factor, level in levels.items():
        about = factors[factor]
        if "keys" in about:
            overrides |= dict.fromkeys(about["keys"], level)
        elif level in about["levels"]:
            overrides |= about["levels"][level].get("set", {})
        else:
            raise UserError(f"a block names levels of a factor; {path} has {level} as {factor}; define it there")
    return Run(levels, ROOT / study["config"], {key: _with_levels(value, levels) for key, value in overrides.items()})


def _with_levels(value: Any, levels: Mapping[str, Level]) -> Any:
    """A text with the levels of factors in place of their `${name}`; other values as they are."""
    if not isinstance(value, str):
        return value
    return _VALUE.sub(lambda match: str(levels.get(match[1], match[0])), value)
