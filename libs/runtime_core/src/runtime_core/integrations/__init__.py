"""Names that programs import from this package. They are those of `weft`."""
