"""Names of vLLM's private parts: looked up where they are used, for another release may lack them or mean others."""

import inspect
import sys
from typing import Any


def look_up(root: object, path: str) -> Any:
    """Attribute at a dotted path, None where a step is missing."""
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def imported(path: str) -> Any:
    """What a module that is imported already has by this name, or None: vLLM's runner imports all that it uses."""
    module, _, name = path.rpartition(".")
    return look_up(sys.modules.get(module), name)


def takes(function: Any, names: tuple[str, ...]) -> bool:
    """Whether a call with arguments of these names, in this order, is all that a function asks for."""
    if function is None:
        return False
    parameters = inspect.signature(function).parameters
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    return tuple(parameters)[: len(names)] == names and set(needed) <= set(names)
