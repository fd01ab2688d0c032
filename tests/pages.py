"""The documentation as tests read it: its pages, what is fenced in them, tables, names in code type."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
GUIDE = [ROOT / "README.md", *DOCS]
"""What a user reads."""
PAGES = [*GUIDE, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    """A page's path in the repository: a test's id."""
    return path.relative_to(ROOT).as_posix()


def fences(path: Path, language: str) -> list[str]:
    """Blocks of one language; "" is text in a fixed width."""
    return [body for kind, body in _FENCE.findall(path.read_text()) if kind == language]


def code(path: Path) -> list[str]:
    """What stands in code type within the prose."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", path.read_text()))


def links(path: Path) -> list[str]:
    """Targets of the links."""
    return re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", path.read_text()))


def sections(path: Path) -> dict[str, str]:
    """Text under each heading of the second level."""
    parts = re.split(r"^## (.+)\n", path.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of all tables, headers included."""
    lines = (line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def commands(path: Path) -> list[str]:
    """The command lines of the shell blocks, continued lines joined, comments left out."""
    lines = "".join(fences(path, "sh")).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.strip()]


def together(lines: list[str]) -> list[str]:
    """Command lines with the same files as one, where none sets what another sets: each takes a third of a second."""
    joined: list[tuple[str, dict[str, str]]] = []
    for line in lines:
        head, *rest = line.split(" --")
        options = {option.split()[0]: option for option in rest}
        for other, given in joined:
            new = [key for key, option in options.items() if given.get(key) != option]
            touching = (f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in new for b in given)
            if other == head and " -c " in head and "print_config" not in line and not any(touching):
                given |= options
                break
        else:
            joined.append((head, options))
    return [" --".join([head, *options.values()]) for head, options in joined]
