"""The work of the state-manager: admits commands, starts tasks, sends answers, frees memory, finds what is stuck.

1. `admitter` carries out the commands of the `ingress`, each bound to one of the `publishers`. `admission` starts the
   task.
2. `scheduler` starts the tasks of `schedules`.
3. `relay` sends answers to the streams that clients name, and requests to agents of other partitions.
4. `keeper` trims streams, frees memory, and compensates for steps of the broker's clock.
5. `stuck` finds and frees stuck work, `backlog` finds work that waits, `measures` reads the metrics of a partition.
6. `dead_letters` lists, redrives and drops deliveries that will not be retried.
"""
