"""What an image is built from, and how it chooses a service."""

from __future__ import annotations

import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import tomllib

import pytest

from runtime_core.host.service import SERVICES
from tests.architecture.tree import ROOT

DOCKERFILE = (ROOT / "deploy" / "images" / "Dockerfile").read_text(encoding="utf-8")
LOCKS = ("image.txt", "image-ray.txt", "image-spark.txt")


def test_packages_come_from_locks_with_hashes() -> None:
    for line in re.findall(r"pip install[^&;]*", DOCKERFILE.replace("\\\n", " ")):
        assert "--require-hashes" in line or "--no-deps" in line, line
    copied = re.findall(r"requirements/([a-z-]+\.txt)", DOCKERFILE)
    assert set(copied) >= {*LOCKS, "engines-build.txt"}
    for name in LOCKS:
        assert "--hash=sha256:" in (ROOT / "requirements" / name).read_text(encoding="utf-8"), name


def test_the_image_has_a_numeric_user_and_a_health_check() -> None:
    assert re.search(r"^USER (?!0)\d+:\d+$", DOCKERFILE, flags=re.MULTILINE), "Kubernetes needs a number"
    assert re.search(r"^HEALTHCHECK ", DOCKERFILE, flags=re.MULTILINE)
    assert "WEFT_DATA_DIR" not in DOCKERFILE, "a data folder that is set is a blob store that nobody shares"
    labels = set(re.findall(r"org\.opencontainers\.image\.([a-z.]+)=", DOCKERFILE))
    assert labels == {"title", "description", "version", "revision", "base.name"}


def test_its_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, flags=re.MULTILINE) == [project["version"]]


def test_two_builds_give_the_same_files() -> None:
    """Two builds gave equal files. Each of these once made them differ."""
    assert "compileall -q -f -j 0 --invalidation-mode unchecked-hash" in DOCKERFILE, "bytecode with times in it"
    assert "SOURCE_DATE_EPOCH=86400 useradd" in DOCKERFILE, "/etc/shadow has the day on which a user was made"
    for line in re.findall(r"apt-get install(?!.*python3-venv).*?rm -rf ([^;&]*)", DOCKERFILE, flags=re.DOTALL):
        assert {"/var/lib/apt/lists/*", "/var/cache/ldconfig/*", "/var/log/*.log"} <= set(line.split())


def test_no_program_in_the_image_changes_users() -> None:
    base = DOCKERFILE.split("FROM python AS build")[0]
    assert "find / -xdev -type f -perm /6000 -exec chmod a-s {} +" in base


def test_copied_files_are_part_of_the_build_context() -> None:
    """The list of files for a build begins by excluding everything."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert "*" in lines
    let_in = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert lines[-3:] == ["**/.*", "**/__pycache__", ""], "what is let in may hold .env or .weft: shut out after it"
    copied = [
        path
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, flags=re.MULTILINE)
        for path in line.split()[:-1]
    ]
    for each in let_in:
        assert any(path == each or path.startswith(f"{each}/") for path in copied), f"{each} is let in for nothing"
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(path == each or path.startswith(f"{each}/") for each in let_in), f".dockerignore shuts out {path}"


def test_a_container_starts_the_services_of_the_wheel() -> None:
    assert 'CMD ["python", "-m", "runtime_core.host"]' in DOCKERFILE
    assert "COPY services /app/services" in DOCKERFILE, "python -m services.<name> works in the images, too"


def start(service: str | None, module: str = "runtime_core.host") -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_") and name != "SERVICE"}
    if service is not None:
        environ["SERVICE"] = service
    return subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("name", "said"), [(None, "SERVICE is not set"), ("agent-handlr", "SERVICE='agent-handlr'")])
def test_an_unknown_service_is_reported_in_one_line(name: str | None, said: str) -> None:
    done = start(name)
    assert done.returncode == 2
    assert done.stderr == f"weft: {done.stderr.removeprefix('weft: ')}"
    assert said in done.stderr
    assert all(each in done.stderr for each in SERVICES)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["services", "runtime_core.host"])
@pytest.mark.parametrize("name", ["state-manager", "state_manager"])
def test_a_service_is_started_by_its_name(name: str, module: str) -> None:
    done = start(name, module)
    assert done.returncode == 1
    assert "weft state-manager: WEFT_REDIS_URL is not set" in done.stderr


@pytest.mark.parametrize(("status", "text"), [(200, "ok"), (503, "nothing has moved for 31 s")])
def test_the_health_of_a_container_is_that_of_its_service(status: int, text: str) -> None:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(ROOT / "deploy/images/healthcheck.py")],
            env={"WEFT_METRICS_PORT": str(server.server_port)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        server.shutdown()
    assert (done.returncode, done.stdout.strip()) == (0 if status == 200 else 1, text)


def test_a_service_that_does_not_answer_is_not_healthy() -> None:
    # Bound and not listening: nobody else can take the port meanwhile.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                "-S",
                str(ROOT / "deploy/images/healthcheck.py"),
                "/healthz",
                str(taken.getsockname()[1]),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stdout.startswith("no answer: ")


def test_a_port_without_a_web_server_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"220 mail\r\n")

        threading.Thread(target=answer, daemon=True).start()
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(ROOT / "deploy/images/healthcheck.py"), "/", str(server.getsockname()[1])],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (1, "no answer: 220 mail\n", "")


def test_a_command_starts_after_its_dependencies_are_healthy() -> None:
    asked: list[str] = []

    class Head(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if len(asked) > 1 else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Head) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/well"
        done = subprocess.run(
            [
                *(sys.executable, "-I", "-S", str(ROOT / "deploy/images/wait_for.py"), url),
                *(sys.executable, "-c", "import sys; print(*sys.argv[1:])", "--block"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        server.shutdown()
    assert asked == ["/well", "/well"]
    assert (done.returncode, done.stdout) == (0, f"waiting for {url}: status 503\n--block\n"), done.stderr
