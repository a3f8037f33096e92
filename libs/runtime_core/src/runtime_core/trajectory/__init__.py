"""The record of each task's steps: the recorder, the store, and what is read, exported and erased."""
