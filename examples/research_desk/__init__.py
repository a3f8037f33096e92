"""A desk that researches a topic in a folder of documents and writes a report with citations.

1. `documents`  which files of a folder are documents
2. `passages`   a document → its paragraphs, with file and line
3. `ranking`    words, and how well a passage speaks of them
4. `report`     the best passages → sections of text with citations
5. `corpus`     a large collection to search, made when it is needed
6. `thinking`   the agents that plan and write with a language model, where one is named
7. `app`        the agents, the tools and the engine function: what the services run
8. `desk`       the broker and the services, as processes on this machine
9. `__main__`   `python -m examples.research_desk`: starts the desk, submits one task, shows how it goes
10. `compare`   the same question on several engines, and what each took
"""
