"""Tests of apps: a running app with a clock that tests move, fakes for tools and models, and kills at each step.

Start with `app_test.py`; `plugin.py` is what pytest loads.
"""
