"""The pytest plugin: the app of a test module, and async tests without another plugin."""

from __future__ import annotations

import pytest


def test_the_plugin_names_what_a_test_lacks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_lacking="async def test_without_an_app(weft_app): ...",
        test_plain="from weft import App\napp = App('a')\ndef test_not_async(weft_app): ...",
        test_own="async def test_any_async_test_runs(tmp_path): assert tmp_path.is_dir()",
    )
    result = pytester.runpytest_subprocess("-p", "no:asyncio")
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["*has no app to test: import it*", "*write it as `async def`*"], consecutive=False)


def test_the_ini_option_names_the_app(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nweft_app = desk:app\n")
    pytester.makepyfile(
        desk="from weft import App\napp = App('desk')\n@app.agent('echo')\nasync def echo(ctx, text: str): return text",
        test_desk="async def test_echo(weft_app):\n"
        "    assert await weft_app.assert_completed(await weft_app.submit('echo', 'x')) == 'x'",
    )
    pytester.runpytest_subprocess("-p", "no:asyncio").assert_outcomes(passed=1)


def test_a_failure_of_the_kit_shows_the_line_of_the_test_only(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "from weft import App\napp = App('desk')\n"
        "@app.agent('asks')\nasync def asks(ctx): return await ctx.human('tone?')\n"
        "async def test_end(weft_app):\n    await weft_app.assert_completed(await weft_app.submit('asks'))\n"
        "async def test_kill(weft_app):\n    await weft_app.kill_and_recover('asks')\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:asyncio")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*waits for an answer without a deadline*", "*waits for a person*"], consecutive=False)
    result.stdout.no_fnmatch_line("*app_test.py:*")
    result.stdout.no_fnmatch_line("*crashes.py:*")
