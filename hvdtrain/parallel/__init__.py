"""The plan, its schedule, and what runs it: pure functions first, then the runtime."""
