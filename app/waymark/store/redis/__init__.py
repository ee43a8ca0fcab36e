"""The transport to Redis: clients, Cluster, Sentinel and read connections."""
