"""The record of each task's steps: the recorder that writes it, the store, exports and erasure."""
