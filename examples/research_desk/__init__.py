"""A desk that researches a topic in a folder of documents and writes a report with citations.

1. `documents`  finds the documents of a folder
2. `passages`   splits a document into paragraphs, with file and line
3. `ranking`    ranks passages by the words of a topic
4. `report`     writes sections of text with citations from the best passages
5. `corpus`     generates a large collection to search
6. `thinking`   declares agents that plan and write with a language model, if one is configured
7. `app`        declares the agents, the tools and the engine function, which the services run
8. `desk`       starts the broker and the services as processes on this machine
9. `__main__`   `python -m examples.research_desk`: starts the desk, submits one task, prints its progress
10. `compare`   compares the times of one search on several engines
"""
