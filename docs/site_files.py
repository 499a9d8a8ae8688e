"""Files of the documentation site that are not in ``docs``; mkdocs calls these functions.

The README and the other pages of the project become pages of the site, and a file of the project that a
page links to becomes a page with its text, so that every link leads somewhere on the site.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "build" / "pages"
PAGES = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "build/pages/results.md": "results.md",
    "build/pages/gallery.md": "gallery.md",
    "CONTRIBUTING.md": "contributing.md",
    "NOTES.md": "notes.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".cc": "cpp", ".json": "json", ".toml": "toml", ".sh": "bash", ".yaml": "yaml"}
LARGEST_LISTING = 100_000


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages of the project, those of the benchmarks' results, and what all pages link to."""
    _write_results()
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=_linked(path)))
    for path in [path for path in files.src_uris if path.endswith(".md")]:
        file = files.src_uris[path]
        if file.generated_by is None:
            text = _linked(f"docs/{path}")
            files.remove(file)
            files.append(File.generated(config, path, content=text))
    for path in sorted(_wanted):
        files.append(_listing(config, path))
    return files


_wanted: set[str] = set()


def _write_results() -> None:
    """Write the pages that are made from the JSON of the benchmarks' results, and not kept."""
    GENERATED.mkdir(parents=True, exist_ok=True)
    words = ["--page", f"{GENERATED}/results.md", "--gallery", f"{GENERATED}/gallery.md"]
    command = [sys.executable, "-m", "benchmarks", "report", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _linked(path: str) -> str:
    """Return the text of a page, with links to where things are on the site."""
    page = PAGES.get(path, path.removeprefix("docs/"))

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{path} links to {match[2]}, which does not exist")
        return match[1] + posixpath.relpath(_place(target), posixpath.dirname(page)) + match[3]

    return LINK.sub(replaced, (ROOT / path).read_text())


def _place(target: str) -> str:
    """Return where a file of the project is on the site."""
    target = os.path.relpath((ROOT / target).resolve(), ROOT)
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    _wanted.add(target)
    return f"source/{target}" if _is_picture(target) else f"source/{target}.md"


def _is_picture(target: str) -> bool:
    return PurePosixPath(target).suffix in (".png", ".svg", ".gif")


def _listing(config: MkDocsConfig, target: str) -> File:
    path = ROOT / target
    if _is_picture(target):
        return File.generated(config, f"source/{target}", abs_src_path=str(path))
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if not file.name.startswith("_"))
        text = "\n".join(f"- `{name}`" for name in names)
    elif path.suffix == ".ipynb":
        text = _notebook(path)
    else:
        language = LANGUAGES.get(path.suffix, "text")
        text = f"````{language}\n{path.read_text()[:LARGEST_LISTING]}\n````"
    page = f"---\nsearch:\n  exclude: true\n---\n\n# {target}\n\n{text}\n"
    return File.generated(config, f"source/{target}.md", content=page)


def _notebook(path: Path) -> str:
    """Return the cells of a notebook, without what they print."""
    cells = json.loads(path.read_text())["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(
        f"````python\n{text}\n````" if kind == "code" else text for kind, text in texts
    )
