"""The record of each task's steps.

1. `recorder` copies the record stream into the `store`, by the `writers` of its `database`; `tables` defines the rows.
2. `reading` reads the steps of a task, `tree` draws them, and `items` turns them into items for training.
3. `export` writes files of steps or items: JSON lines, or Parquet by `parquet`.
"""
