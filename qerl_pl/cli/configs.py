"""Configuration files: merging by `-c`, shipped ones by name, and the command `qerl configs`."""

import re
from pathlib import Path

import yaml
from jsonargparse import (  # type: ignore[attr-defined]  # ActionConfigFile is missing from its __all__
    ActionConfigFile,
    ArgumentParser,
    Namespace,
)

from qerl_pl.errors import UserError, did_you_mean
from qerl_pl.runtime.files import atomic_write, require_absent

SHIPPED_CONFIGS = Path(__file__).parents[1] / "configs"
_PATH = re.compile(r"[\w./-]+")
_NULL = "tag:yaml.org,2002:null"
_GROUPS = (
    "trainer", "model", "model.policy", "model.policy.lora", "model.teacher", "rollout", "rollout.sampling",
    "rollout.evaluation", "rollout.environment",
)  # fmt: skip


class ConfigFile(ActionConfigFile):
    """A configuration file or the name of a shipped one; rewards are merged by name with earlier ones, {} drops all."""

    @staticmethod
    def apply_config(parser: ArgumentParser, cfg: Namespace, dest: str, value: str) -> None:
        """Merge a file into the configuration; jsonargparse by itself replaces a dictionary."""
        earlier = cfg.get("rollout.rewards")
        ActionConfigFile.apply_config(parser, cfg, dest, config_path(value))
        rewards = cfg.get("rollout.rewards")
        if isinstance(earlier, dict) and isinstance(rewards, dict) and rewards:
            cfg["rollout.rewards"] = earlier | rewards


def config_path(value: str) -> str:
    """The file that `-c VALUE` names: one in the working directory, else the shipped configuration of that name.

    Args:
        value: A path, a name, or YAML. Only the name of a shipped configuration is changed.

    Raises:
        UserError: No file and no configuration has the name.
    """
    if not _PATH.fullmatch(value) or Path(value).is_file() or Path(value).is_fifo():
        return value
    return str(_shipped(value))


def check_config(value: str) -> str | None:
    """Check the keys of the file that `-c VALUE` names: one twice, and a class's argument beside its name.

    Returns:
        `model.class_path`, if the file has it.

    Raises:
        UserError: No file and no configuration has the name, or the file is no mapping of keys in YAML.
    """
    path = config_path(value)
    if not Path(path).is_file():
        return None
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        found = " ".join(str(error).split())
        raise UserError(
            f"a configuration is YAML in UTF-8, indented with spaces; {path}: {found:.180}; correct it"
        ) from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError(
            f"a configuration is a mapping of keys to values; {path} is {'empty' if root is None else 'none'}; write "
            "some, as in trainer: {max_steps: 8}, or leave the file out"
        )
    runs = [root, *(value for key, value in root.value if key.value in ("fit", "validate", "test"))]
    for run in runs:
        _check_groups(run, path)
    model = next((node for run in runs if (node := _below(run, "model")) is not None), None)
    _check_node(root, path, model, ())
    class_path = None if model is None else _below(model, "class_path")
    return None if class_path is None else str(class_path.value)


def _below(node: yaml.Node, name: str) -> yaml.Node | None:
    """The value of a key; None of a node that has none."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == name), None)


def _check_groups(run: yaml.Node, path: str) -> None:
    """Refuse a group of keys without any, which would drop those of earlier files."""
    for group in _GROUPS:
        node: yaml.Node | None = run
        for name in group.split("."):
            node = None if node is None else _below(node, name)
        is_null = node is not None and node.tag == _NULL
        if is_null or (group == "model" and not isinstance(node, yaml.MappingNode | None)):
            raise UserError(f"{group} is a mapping of keys; {path} has no keys below it; set some, or leave it out")


def _check_node(node: yaml.Node, path: str, model: yaml.Node | None, above: tuple[yaml.Node, ...]) -> None:
    """Refuse a key that stands twice, of which YAML keeps the last, and an argument of a class beside `class_path`.

    Those of the module do stand beside it: they are the same without it, and in other files.
    """
    if any(node is one for one in above):
        raise UserError(
            f"a YAML anchor must not contain its own alias; {path}, line {node.start_mark.line + 1} has one that "
            "does; write the values out"
        )
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_node(item, path, model, above)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    is_class = node is not model and any(key.value == "class_path" for key, _ in node.value)
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen:
            raise UserError(
                f"a key stands once in a mapping; {path}, line {line} has {name} again; put the values of both "
                "under one"
            )
        if is_class and name not in ("class_path", "init_args", "dict_kwargs"):
            raise UserError(
                f"arguments of a class stand under init_args; {path}, line {line} has {name} beside class_path; write "
                f"init_args: {{{name}: ...}}"
            )
        seen.add(name)
        _check_node(value, path, model, above)


def list_configs() -> None:
    """Print the names of the shipped configurations, and what they are for."""
    files = _files()
    width = max(map(len, files))
    for name, path in files.items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:{width}}  {first.removeprefix('# ').rstrip(':')}")


def copy_config(name: str, dst: Path | None) -> None:
    """Copy a shipped configuration to a file or folder; None is NAME.yaml here.

    Raises:
        UserError: There is no configuration of that name, or the destination exists.
    """
    source = _shipped(name)
    target = Path(source.name) if dst is None else dst / source.name if dst.is_dir() else dst
    require_absent(target)
    atomic_write(target, source.read_bytes())
    print(f"wrote {target}")


def _shipped(name: str) -> Path:
    files = _files()
    if name not in files:
        raise UserError(
            f"a configuration is a YAML file or one that comes with the package; got {name}, which is neither; "
            f"{did_you_mean(Path(name).stem, files)}`qerl configs` lists those of the package"
        )
    return files[name]


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(SHIPPED_CONFIGS.glob("*.yaml"))}
