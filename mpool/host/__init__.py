"""What the interpreter and the machine give: threads of native calls, child processes, resources."""
