"""The site's pages: README and what its links lead to, at their paths in the repository, without studies; the API."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(([^)#\s]+)[^)\s]*\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_TITLED = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
_STUDY = re.compile(r"\[([^\]]+)\]\((?:\.\./)*(studies/[^)]+)\)")
_ROW = re.compile(r"^\| ([^|]+) \| (\[.*\)) \|$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from README's table of pages."""
    table = (ROOT / "README.md").read_text().partition("## Documentation")[2].partition("\n## ")[0]
    topics = [
        {_capital(topic): [{_capital(title): path} for title, path in _TITLED.findall(pages)]}
        for topic, pages in _ROW.findall(table)
    ]
    api = [{name: f"api/{name}.md"} for name in _packages()]
    end = [{"Benchmarks": "benchmarks/README.md"}, {"Changes": "CHANGELOG.md"}]
    config.nav = [{"qerl_pl": "README.md"}, *topics, {"API": api}, *end]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those that README leads to, and add a page for each package of the API."""
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in _reached("README.md")]
    api = [File.generated(config, f"api/{name}.md", content=f"::: {name}\n") for name in _packages()]
    return Files([*of_theme, *pages, *api])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name the files of studies, which are in the repository alone, in place of links to them."""
    return _STUDY.sub(r"\1 (`\2`)", markdown)


def _capital(title: str) -> str:
    return title[0].upper() + title[1:]


def _reached(start: str) -> list[str]:
    """Paths from the root of the repository that links of Markdown files lead to, in the order of their discovery."""
    found = [start]
    for path in found:
        if not path.endswith(".md"):
            continue
        for link in _LINK.findall(_FENCE.sub("", (ROOT / path).read_text())):
            if "://" in link:
                continue
            target = (ROOT / path).parent.joinpath(link).resolve()
            name = target.relative_to(ROOT).as_posix()
            if target.is_file() and name not in found and not name.startswith("studies/"):
                found.append(name)
    return found


def _packages() -> list[str]:
    """Import paths of the packages that say by `__all__` what is public."""
    folders = {"qerl_pl": ROOT / "qerl_pl", "qerl_kernels": ROOT / "kernels" / "qerl_kernels"}
    inits = [(name, init) for name, folder in folders.items() for init in sorted(folder.rglob("__init__.py"))]
    return [
        ".".join((name, *init.parent.relative_to(folders[name]).parts))
        for name, init in inits
        if "__all__" in init.read_text()
    ]
