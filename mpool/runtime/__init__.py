"""Process-wide runtime: entries, threads, events, metrics, health, isolation."""
