"""The site's pages: those of mkdocs.yml's navigation, at their paths in the repository, their pictures, and the API."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
API = "API"
"""Entry of the navigation whose pages are made here."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_CELL = re.compile(r"<t[dh].*?</t[dh]>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]+")
STYLE = ".md-typeset td code, .md-typeset th code { word-break: normal }"
"""Names in tables are not broken inside of a word, but where `on_page_content` allows it."""
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the API's pages."""
    api = {API: [{name: f"api/{name}.md"} for name in _packages()]}
    config.nav = [
        {tab: [api if entry == API else entry for entry in entries] for tab, entries in each.items()}
        for each in config.nav or []
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the pages of the navigation and their pictures, and add the API."""
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = [path for each in config.nav or [] for path in _paths(each) if not path.startswith("api/")]
    pictures = {
        target
        for page in pages
        for mark, _, link, _ in _LINK.findall((ROOT / page).read_text())
        if mark and "://" not in link and (target := _in_repository(page, link)) is not None
    }
    shown = [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in (*pages, *sorted(pictures))]
    api = [File.generated(config, f"api/{name}.md", content=f"::: {name}\n") for name in _packages()]
    return Files([*of_theme, *shown, *api, File.generated(config, "site.css", content=STYLE)])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Long names in tables break after a slash, a dot, an underscore or a comma."""

    def breaks(code: re.Match[str]) -> str:
        return re.sub(r"([/._,])(?=\w)", r"\1<wbr>", code[0])

    return _CELL.sub(lambda cell: _CODE.sub(breaks, cell[0]), html)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files that are no pages lead to the repository, or name them where `repo_url` is not set."""

    def link(found: re.Match[str]) -> str:
        mark, text, target, _ = found.groups()
        path = None if "://" in target else _in_repository(page.file.src_uri, target)
        if mark or path is None or files.get_file_from_path(path) is not None:
            return found[0]
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else f"{text} (`{path}`)"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def _in_repository(page: str, link: str) -> str | None:
    """Path from the root of the repository of a link's file; None if there is none."""
    target = (ROOT / page).parent.joinpath(link).resolve()
    return target.relative_to(ROOT).as_posix() if target.exists() else None


def _paths(entry: object) -> list[str]:
    """Paths of an entry of the navigation."""
    if isinstance(entry, dict):
        return [path for value in entry.values() for path in _paths(value)]
    return [path for value in entry for path in _paths(value)] if isinstance(entry, list) else [str(entry)]


def _packages() -> list[str]:
    """Import paths of the packages that say by `__all__` what is public."""
    folders = {"qerl_pl": ROOT / "qerl_pl", "qerl_kernels": ROOT / "kernels" / "qerl_kernels"}
    inits = [(name, init) for name, folder in folders.items() for init in sorted(folder.rglob("__init__.py"))]
    return [
        ".".join((name, *init.parent.relative_to(folders[name]).parts))
        for name, init in inits
        if "__all__" in init.read_text()
    ]
