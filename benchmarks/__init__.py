"""What Weft can do on this machine, measured: `python -m benchmarks --help`, or `make bench`.

Read in this order:

    arguments.py         what can be measured, and how much of it
    question.py          what is asked, and the only right answer
    app.py               the agents and tools that are measured
    stack.py             broker and services, each a process of its own, on a fresh folder
    child.py             one such process: started, asked, its CPU time read, ended
    driver.py            asks questions, so many at a time, and takes the times
    client_process.py    the driver on Weft's client
    autogen_process.py   the driver on AutoGen's runtime in memory (its environment: autogen_environment.py)
    ledger.py            what must hold afterwards: no work left, every trajectory complete
    throughput.py latency.py growth.py recovery.py memory.py profiler.py (with profiled_service.py)
    cost_ledger.py       what one task costs in counts, beside the bounds in cost_ledger.toml (with counted_process.py)
    figures.py machine.py results.py    medians and tables; where it was measured; the file it is kept in
"""
