"""A helper that reads and changes the files of one folder, driven by a language model.

1. `files_server`  the folder as an MCP server: list, read, search, write; knows nothing of Weft
2. `app`           the agent, the server's tools, and what a human is asked about
3. `__main__`      `python -m examples.coding_helper --folder FOLDER "what to do"`: all in one process
"""
