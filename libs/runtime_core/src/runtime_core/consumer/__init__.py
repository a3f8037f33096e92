"""The life of one delivery: `owner` and `leader`, `consumer`, `attempt`, `decision`, `effects`."""
