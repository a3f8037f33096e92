"""Redaction: bounds on its cost, and what becomes of the data beyond them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, python

REDACTION = "telemetry/redaction.py"
PATTERNS = "telemetry/secret_patterns.py"
COST = "unit:redaction_cost"
RESULTS = "unit:redaction"

MUTANTS: tuple[Mutant, ...] = (
    python(
        REDACTION,
        "places_of_text",
        "            if allowance.places <= 0:\n                spans.append((here, len(text)))\n                break\n",
        "",
        "a text with many places is looked at closely in a bounded number of them, and the rest is hidden",
        COST,
    ),
    python(
        REDACTION,
        "places_of_pattern",
        "                if allowance.places <= 0:\n                    spans.append((found.start(), len(text)))\n                    break\n",
        "",
        "a text in which a pattern matches often is hidden from some match on",
        COST,
    ),
    python(
        REDACTION,
        "places_of_json",
        "            if allowance.places < 0:\n                raise _TooManyPlaces\n",
        "",
        "JSON with many places is looked at closely in a bounded number of them",
        COST,
    ),
    python(
        REDACTION,
        "strings",
        "        if allowance.strings < 0:\n            raise _TooManyPlaces\n",
        "",
        "a bounded number of strings is matched with the user's patterns",
        COST,
    ),
    python(
        REDACTION,
        "nesting",
        "if depth < NESTING:",
        "if True:",
        "JSON inside of texts is read to a bounded depth",
        COST,
    ),
    python(
        REDACTION,
        "rest_once",
        "if end > self._ends.get(group, 0):",
        "if True:",
        "the end of a long secret is searched for once",
        COST,
    ),
    python(
        REDACTION,
        "rest_of_word",
        "            rest = REST_OF_WORD\n",
        "            rest = None\n",
        "a long word is hidden to its end",
        COST,
    ),
    python(
        REDACTION,
        "coarse_names",
        """if name is not None and value[:1] == b'"' and _is_secret_name(name)""",
        "if False",
        "of JSON with too many places, too, members lose their text by their name",
        COST,
    ),
    python(
        REDACTION,
        "coarse_unreadable",
        "return data if level else _HIDDEN_VALUE",
        "return data",
        "data with too many places that is no JSON is hidden",
        COST,
    ),
    python(
        REDACTION,
        "inside_string",
        "if start < look:",
        "if True:",
        "a number that looks like a known secret leaves JSON as it is",
        COST,
    ),
    python(
        REDACTION,
        "outer_anchor",
        "if not anyone or _OUTER_ANCHOR.search(anyone):",
        "if not anyone:",
        "a pattern that asks for the start of the text is matched with each text",
        COST,
    ),
    python(
        REDACTION,
        "escapes_in_lines",
        'if self._lines is None or b"\\\\" in data:',
        "if self._lines is None:",
        "a pattern is matched with what a string says, not with how JSON writes it",
        COST,
    ),
    python(
        REDACTION,
        "cut_string",
        """text = written[1:-1] if written.endswith(b'"', 1) else written[1:]""",
        "text = written[1:-1]",
        "a string that is cut off is looked at to its last character",
        RESULTS,
    ),
    python(
        PATTERNS,
        "digit_within",
        "{0,%(most)d}+",
        "*",
        "a rule reads a bounded number of bytes to decide",
        COST,
        survives="places are bounded as well: it costs a thousandth of a second for each",
    ),
)
