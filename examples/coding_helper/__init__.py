"""A helper that reads and changes the files of one folder, driven by a language model.

1. `files_server`  an MCP server that lists, reads, searches and writes the files; it does not use Weft
2. `app`           the agent, the server's tools, and the approval of writes
3. `__main__`      `python -m examples.coding_helper --folder FOLDER "what to do"`: everything in one process
"""
