"""Other libraries' faces of the core. Each needs its library, which comes with the extra of its name."""
