"""Tests that need Ray and Spark; they run in an environment of their own."""
