"""Pages of tasks."""

from __future__ import annotations

from runtime_core.client.task_view import TaskPage, _cursor_at


def test_a_page_says_how_far_back_it_has_searched() -> None:
    """A search for rare tasks ends its page without any, long before the end of the list."""
    assert TaskPage([], _cursor_at((1_793_491_200_000, "t-1"))).reached_ms == 1_793_491_200_000
    assert TaskPage([], "").reached_ms == 0
