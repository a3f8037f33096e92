"""Where results lie that are too large to travel: files by URL, in a folder for each task.

Reading order: `store` (what a store does, and how one is opened), `files` (a folder of this machine), `arrow` (other
places, through pyarrow), `retention` (what goes when).
"""
