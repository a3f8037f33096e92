"""Benchmarks of Weft on this machine: `python -m benchmarks --help`, or `make bench`.

Read in this order:

    arguments.py         the benchmarks and their sizes
    question.py          the question, and the only right answer
    app.py               the benchmarked agents and tools
    stack.py             broker and services, each a separate process, on a fresh folder
    child.py             starts one such process, sends it orders, reads its CPU time, ends it
    driver.py            asks questions, a given number concurrently, and takes the times
    client_process.py    the driver on Weft's client
    comparison/          the same task on other systems: systems.py lists them, drivers/ holds what they run
    ledger.py            checks afterwards: no work left, every trajectory complete
    throughput.py latency.py load.py growth.py recovery.py memory.py profiler.py (with profiled_service.py)
    cost_ledger.py       the counts of one task, and their bounds in cost_ledger.toml (with counted_process.py)
    broker_cost.py       the broker's CPU time by function, compared with another commit
    figures.py machine.py results.py    medians and tables; the machine; the file of results
"""
