"""Plans, their schedules, and the runtime that executes them."""
