"""Where functions run: declared engine functions, and the engines that run any function.

Reading order: `function` (what `@app.engine_function` declares), `run_config` (which engine, how many workers),
`runtime_engine` (what every engine promises), `local_engine` (threads, processes or this loop), `worker_pool` and
`worker_process` (the two ends of a worker process), `named` (an engine by its name).
"""
