"""The measured task on each other system.

Each module is the driver of its system, and, where the system has workers, what they run. It uses the system as its
documents advise, with the settings that were fastest here. WEFT_BENCH_REDIS_URL names the broker, WEFT_BENCH_FOLDER
an empty folder.
"""
