"""The interpreter and the machine: threads of native calls, child processes, resources, forks."""
