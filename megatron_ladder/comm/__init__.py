"""Who talks to whom: the process mesh, handles of collectives in flight, and the launch of a process."""
