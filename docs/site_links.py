"""A hook of MkDocs: adds the pages of the repository's root, adapts links that leave docs/, and fetches nothing.

Diagrams are drawn by the mermaid.min.js that `make docs` has put into the environment; without it they stay text.

A link to a file that the site does not have becomes plain text. A link to nothing stays, so that the build fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
MERMAID = ROOT / ".venv-docs" / "mermaid.min.js"
_OWN_MERMAID = "assets/mermaid.min.js"
ROOT_PAGES = {
    "README.md": "first-app.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""File in the root → page of the site."""
_SHIM = re.compile(r"https://[\w.]+/iframe-worker/shim")
_OWN_SHIM = "assets/iframe-worker.js"
_LABEL = re.compile(r"^(```\w+) [^\n]*$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:  # Any: MkDocs's own
    """Let the site's own Mermaid draw diagrams: the theme would fetch one, if a page needs it."""
    if MERMAID.exists():
        from pymdownx.superfences import fence_code_format

        fences = [{"name": "mermaid", "class": "mermaid", "format": fence_code_format}]
        config.mdx_configs["pymdownx.superfences"] = {"custom_fences": fences}
        config.extra_javascript.append(_OWN_MERMAID)
    return config


def on_files(files: Files, config: Any) -> Files:  # Any: MkDocs's own
    """Add the root's pages."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    if MERMAID.exists():
        files.append(File.generated(config, _OWN_MERMAID, abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # Any: MkDocs's own
    """Rewrite the links of a page, and shorten the labels of code blocks that tests use to the language."""
    markdown = _LABEL.sub(r"\1", markdown)
    here = page.file.src_uri
    source = next((name for name, made in ROOT_PAGES.items() if made == here), f"docs/{here}")
    return _LINK.sub(lambda link: _rewritten(link[0], link[1], link[2], source, here), markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:  # Any: MkDocs's own
    """Load the shim that searches in a folder from the site itself, since the theme would fetch it."""
    return _SHIM.sub(posixpath.relpath(_OWN_SHIM, posixpath.dirname(page.file.dest_uri) or "."), output)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:  # Any: MkDocs's own
    """Do the same for the page of a wrong address."""
    return _SHIM.sub(_OWN_SHIM, output_content)


def _rewritten(whole: str, text: str, target: str, source: str, here: str) -> str:
    path, hash_sign, anchor = target.partition("#")
    if not path or "://" in target or target.startswith("mailto:"):
        return whole
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if wanted in ROOT_PAGES:
        page = ROOT_PAGES[wanted]
    elif wanted.startswith("docs/") and not wanted.endswith(".py"):
        page = wanted.removeprefix("docs/")
    else:
        return text if (ROOT / wanted).exists() else whole
    return f"[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{hash_sign}{anchor})"
