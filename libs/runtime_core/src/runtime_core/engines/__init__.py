"""Where functions run: declared engine functions, the local engine, and what every engine promises."""
