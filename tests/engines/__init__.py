"""Tests that need Ray and Spark; they run in a separate environment."""
