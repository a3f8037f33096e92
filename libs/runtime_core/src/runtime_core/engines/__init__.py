"""Engine functions: what may run on the engines `local`, `ray` and `spark`."""
