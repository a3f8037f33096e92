"""A copy of the tree for mutants. The working tree never changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tests.mutants.commands import SECONDS
from tests.mutants.forked import Hangs, import_contracts, run_pytest
from tests.mutants.mutant import Mutant
from tests.servers.matrix import ALL, SELECTION

ROOT = Path(__file__).parents[2]
COPIED = ("libs", "services", "tests", "examples", "docs", "deploy", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class Scratch:
    """The copy's folder. Commands import the copy, beside the packages of this environment."""

    root: Path
    forks: bool
    """Whether pytest runs in forks of this process, which is faster. A process with threads must not fork."""

    @contextmanager
    def without(self, mutant: Mutant) -> Iterator[None]:
        """Remove the mutant's guard for a while."""
        path = self.root / mutant.file
        text = path.read_text(encoding="utf-8")
        self._write(path, mutant.apply(text))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Bytecode is recognised by the second and the size of its source, which a mutant may not change.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def passes(self, arguments: tuple[str, ...], *, imported: bool = False) -> bool:
        """Run a command on the copy; whether it succeeded. One that hangs has failed.

        `imported`: no Python file of the copy has changed since this process imported it (`scratch`).

        Raises:
            RuntimeError: the tests could not run at all.
        """
        try:
            if arguments[0] == "-m":
                status, output = self._run_python(arguments)
            elif not self.forks:
                status, output = self._run_python(("-m", "pytest", *arguments))
            else:
                status, output = run_pytest(arguments, self.root, ROOT, SECONDS, imported=imported)
        except (Hangs, subprocess.TimeoutExpired):
            return False
        # 3: an error got out of pytest, which takes a test that fails. The signals: code without its guard used up the
        # stack (SIGSEGV) or the memory (SIGKILL). Others: nothing was tested.
        if status not in (0, 1, 3, -signal.SIGSEGV, -signal.SIGKILL):
            raise RuntimeError(f"{' '.join(arguments)} ended with {status}:\n{output}")
        return status == 0

    def _run_python(self, arguments: tuple[str, ...]) -> tuple[int, str]:
        paths = [str(self.root / "libs" / "runtime_core" / "src"), str(self.root)]
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            env={
                "WEFT_TEST_CACHE": str(ROOT / ".cache"),
                **os.environ,
                SELECTION: ALL,
                "PYTHONPATH": os.pathsep.join(paths),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=SECONDS)
            except BaseException:
                # Its workers and servers, too.
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return process.returncode, output


@contextmanager
def scratch(*, forks: bool) -> Iterator[Scratch]:
    """Copy the tree into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="weft-mutants-") as folder:
        copy = Scratch(Path(folder), forks)
        for path in tree():
            target = copy.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target)
        if forks:
            import_contracts(copy.root, ROOT)
        yield copy


def tree() -> list[str]:
    """Files of the working tree that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *COPIED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted({path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()})


def digest() -> str:
    """Return a digest of the tree: results of another tree do not count."""
    found = hashlib.sha256()
    for path in tree():
        if path.startswith("tests/mutants/"):
            continue
        found.update(path.encode() + b"\0" + (ROOT / path).read_bytes() + b"\0")
    return found.hexdigest()[:16]
