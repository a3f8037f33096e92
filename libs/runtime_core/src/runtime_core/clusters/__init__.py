"""Ray and Spark: gateways that serve their engines, and the driver processes that hold the connections."""
