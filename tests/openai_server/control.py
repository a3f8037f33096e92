"""What a test may ask of the server.

POST /script     a script (`script.py`): its rules replace, or with `more` precede, those that are played
POST /release    {"gate": name, "pieces": n}: n pieces pass; without `pieces` the gate is open from now on
POST /close      {"gate": name}: closed again
GET  /ledger     all entries (`ledger.py`); ?conversation= ?model= for some of them
GET  /counts     numbers of the ledger
GET  /repeated   complete answers to questions that had a complete answer before
GET  /request    ?number=: the body of this request, as it came
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tests.openai_server.script import Script
from tests.openai_server.serving import Model
from tests.openai_server.wire import Request, json_reply


class Release(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    gate: str
    pieces: int | None = None


class Closing(msgspec.Struct, forbid_unknown_fields=True):
    gate: str


class Control:
    """Answers at once: what a client has received is in the ledger when the test reads it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._routes: dict[tuple[str, str], Callable[[Request], object]] = {
            ("POST", "/script"): self._script,
            ("POST", "/release"): self._release,
            ("POST", "/close"): self._close,
            ("GET", "/ledger"): self._ledger,
            ("GET", "/counts"): lambda _: model.ledger.counts(),
            ("GET", "/repeated"): lambda _: model.ledger.repeated(),
            ("GET", "/request"): lambda request: msgspec.Raw(model.ledger.bodies[int(request.query["number"]) - 1]),
        }

    def answer(self, request: Request) -> bytes | None:
        """Return the whole answer; None if the request is none of these."""
        route = self._routes.get((request.method, request.path))
        if route is None:
            return None
        try:
            return json_reply(200, msgspec.json.encode(route(request)))
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            message = f"{request.method} {request.path}: {type(error).__name__}: {error}"
            return json_reply(400, msgspec.json.encode({"error": message}))

    def _script(self, request: Request) -> dict[str, int]:
        script = msgspec.json.decode(request.body, type=Script)
        self._model.play(script)
        return {"rules": len(script.rules)}

    def _release(self, request: Request) -> dict[str, str]:
        release = msgspec.json.decode(request.body, type=Release)
        self._model.gates.release(release.gate, release.pieces)
        return {"gate": release.gate}

    def _close(self, request: Request) -> dict[str, str]:
        closing = msgspec.json.decode(request.body, type=Closing)
        self._model.gates.close(closing.gate)
        return {"gate": closing.gate}

    def _ledger(self, request: Request) -> object:
        entries = self._model.ledger.entries
        for name in ("conversation", "model"):
            if (wanted := request.query.get(name)) is not None:
                entries = [entry for entry in entries if getattr(entry, name) == wanted]
        return entries
