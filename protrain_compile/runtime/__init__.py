"""The runtime: binds real tensors to schedules and runs them. Passes and the planner never import it."""
