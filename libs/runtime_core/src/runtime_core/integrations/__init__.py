"""Adapters for programs of other libraries. Each needs its library, which the extra of its name installs."""
