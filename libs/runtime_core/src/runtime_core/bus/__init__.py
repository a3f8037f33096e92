"""The broker: `event_bus` has the verbs of one partition, each of which is one function of `functions/`.

1. `connector` reads the broker's URL and connects; `connection` carries commands; `embedded` and `private_server` are
   servers of our own. `library` loads the functions. `keys` has every key.
2. `namespace` opens a namespace, and `partition` is what all verbs build on. The verbs: `tasks`, `deliveries`,
   `commits` and `admin`, with the types in `values`.
3. Across partitions: `claims`, `topics`, `replies`. `durability` waits for disks and replicas; `spans` traces events.
"""
