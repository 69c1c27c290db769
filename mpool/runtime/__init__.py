"""Process-wide runtime: entries, deadlines, events, metrics, health, isolation."""
