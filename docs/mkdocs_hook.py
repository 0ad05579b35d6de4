"""A hook of mkdocs: pages that lie elsewhere in the repository become pages of the site, and links follow them.

A link to a file that is no page of the site, such as a source file, becomes its text. A link to nothing is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
MOVED = {
    "README.md": "index.md",
    "docs/index.md": "names.md",
    "recipes/README.md": "recipes.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/README.md": "every-result.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "RELEASE.md": "release.md",
    "SECURITY.md": "security.md",
}  # a path in the repository -> the page of the site
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the pages that mkdocs found by those of the repository, with links between pages of the site."""
    places = {f"docs/{file.src_uri}": file.src_uri for file in files}
    places |= {path.relative_to(ROOT).as_posix(): f"results/{path.name}" for path in pictures()} | MOVED
    kept = [file for file in files if not file.src_uri.endswith(".md")]
    for path, place in places.items():
        if path.endswith(".md"):
            kept.append(File.generated(config, place, content=linked(path, places)))
        elif not path.startswith("docs/"):
            kept.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return Files(kept)


def pictures() -> list[Path]:
    """Return the pictures of measurements."""
    return sorted((ROOT / "benchmarks" / "results").glob("*.png"))


def linked(path: str, places: dict[str, str]) -> str:
    """Return the text of a page of the repository with its links as the site has them."""

    def follow(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        named = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        place = places.get(named)
        if place is None:
            if not (ROOT / named).exists():
                raise PluginError(f"{path} has a link to {target}, which does not exist")
            return text
        relative = posixpath.relpath(place, posixpath.dirname(places[path]) or ".")
        return f"{picture}[{text}]({relative}{anchor or ''})"

    return LINK.sub(follow, (ROOT / path).read_text(encoding="utf-8"))
