"""A study's list of runs, from one YAML file.

    config: configs/quickstart.yaml          # what every run starts from; a path from the repository's root
    values: {device: gpu}                    # what ${device} stands for below; the command line may say otherwise
    set: {trainer.accelerator: "${device}"}  # overrides of every run, as `qerl fit` takes them
    factors:                                 # what runs differ in
      seed: {keys: [seed_everything, data.seed]}                   # levels are values of these keys
      method: {levels: {plain: {label: 16-bit LoRA, set: {model.policy.quantization: none}}, …}}
    defaults: {method: plain, seed: 0}       # the level of a factor that a block does not name
    blocks: [{method: [plain, nvfp4], seed: [0, 1, 2]}, …]         # all combinations of each; what is there twice, once

A level of a factor may also name a `config` of its own, and later factors override earlier ones. Where one level needs
others to know of it, `with: {policy: {toy: {model.optimizer.lr: 0.001}}}` beside `set` holds for that policy alone.
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
KEYS = {"config", "values", "set", "factors", "defaults", "blocks", "strata", "measure", "title", "note"}
_VALUE = re.compile(r"\$\{(\w+)\}")
Level = str | int | float | bool


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    levels: dict[str, Level]
    """Its level of every factor."""
    config: Path
    overrides: dict[str, Any]
    """By key of `qerl fit`; `${name}` is not yet replaced."""

    @property
    def name(self) -> str:
        """Such as "method=nvfp4,seed=0", a folder's name."""
        return ",".join(f"{factor}={level}" for factor, level in self.levels.items())

    @property
    def digest(self) -> str:
        """Of all that the run is made of, but for the values that differ from machine to machine."""
        made_of = [yaml.safe_load(self.config.read_text()), self.overrides]
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def devices(self) -> int:
        """How many it trains on."""
        return int(self.overrides.get("trainer.devices", 1))

    @property
    def needs(self) -> set[str]:
        """Names of the values that it needs."""
        return set(_VALUE.findall(json.dumps(self.overrides)))

    def missing(self, values: Mapping[str, Any]) -> list[str]:
        """Those that are not given."""
        return sorted(name for name in self.needs if values.get(name) is None)

    def words(self, folder: Path, values: Mapping[str, Any]) -> list[str]:
        """The command line of `qerl` that trains it in its folder, or goes on there."""

        def text(value: Any) -> str:
            return value if isinstance(value, str) else json.dumps(value)

        def replaced(value: Any) -> str:
            return _VALUE.sub(lambda found: text(values[found[1]]), text(value))

        given = {**self.overrides, "trainer.default_root_dir": str(folder)}
        options = [f"--{key}={replaced(value)}" for key, value in given.items()]
        return ["fit", "-c", str(self.config), "--resume=auto", *options]


@dataclass(frozen=True)
class Plan:
    """What a study's file says."""

    path: Path
    runs: list[Run]
    values: dict[str, Any]
    """What `${name}` stands for; None where the command line has to say it."""
    labels: dict[str, dict[str, str]]
    """What a reader sees of a level, by factor and level."""
    defaults: dict[str, Level]
    strata: tuple[str, ...]
    """Factors whose levels are compared within, never across, such as the policy."""
    measure: str
    """Tag of the held-out accuracy."""
    title: str
    """Of its page."""
    note: str
    """What a reader should know of it."""

    def label(self, factor: str, level: Level) -> str:
        """What a reader sees of a level."""
        return self.labels.get(factor, {}).get(str(level), f"{factor} {level}")


def read_plan(path: Path) -> Plan:
    """Read a study.

    Raises:
        UserError: The file names what it does not define, or says something that no study has.
    """
    given = yaml.safe_load(path.read_text())
    if unknown := set(given) - KEYS:
        raise UserError(f"a study has the keys {', '.join(sorted(KEYS))}; {path} has {sorted(unknown)[0]}; take it out")
    factors, defaults = given["factors"], given.get("defaults", {})
    runs: dict[str, Run] = {}
    for block in given["blocks"]:
        for levels in _combinations(path, block, factors, defaults):
            run = _run(path, given, factors, levels)
            runs.setdefault(run.name, run)
    labels = {
        factor: {str(level): one.get("label", str(level)) for level, one in about.get("levels", {}).items()}
        for factor, about in factors.items()
    }
    return Plan(
        path=path,
        runs=list(runs.values()),
        values=given.get("values", {}),
        labels=labels,
        defaults=defaults,
        strata=tuple(given.get("strata", ())),
        measure=given.get("measure", "val/pass@1"),
        title=given.get("title", "The paper's claims, put to the test"),
        note=given.get("note", ""),
    )


def _combinations(
    path: Path, block: Mapping[str, Any], factors: Mapping[str, Any], defaults: Mapping[str, Level]
) -> Iterator[dict[str, Level]]:
    """Levels of every factor; the last one in the file changes first."""
    if unknown := set(block) - set(factors):
        raise UserError(f"a block names factors; {path} has {sorted(unknown)[0]}, which is none of them; define it")
    if missing := [factor for factor in factors if factor not in block and factor not in defaults]:
        raise UserError(f"a factor needs levels or a default; {path} has a block without {missing[0]}; add either")
    choices = [block.get(factor, defaults.get(factor)) for factor in factors]
    lists = [choice if isinstance(choice, list) else [choice] for choice in choices]
    for levels in itertools.product(*lists):
        yield dict(zip(factors, levels, strict=True))


def _run(path: Path, given: Mapping[str, Any], factors: Mapping[str, Any], levels: dict[str, Level]) -> Run:
    overrides, config = dict(given.get("set", {})), given["config"]
    for factor, level in levels.items():
        about = factors[factor]
        if "keys" in about:
            overrides |= dict.fromkeys(about["keys"], level)
        elif level in about["levels"]:
            said = about["levels"][level]
            overrides |= said.get("set", {})
            for other, sets in said.get("with", {}).items():
                overrides |= sets.get(levels[other], {})
            config = said.get("config", config)
        else:
            raise UserError(f"a block names levels of a factor; {path} has {level} as {factor}; define it there")
    return Run(levels, ROOT / config, overrides)
