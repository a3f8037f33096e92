"""Write the dashboards: `python -m deploy.observability.dashboards`. A test says when they are stale."""

from __future__ import annotations

from deploy.observability.dashboards.pages import FOLDER, files


def main() -> None:
    written = files()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in set(FOLDER.glob("*.json")) - set(written):
        path.unlink()
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
