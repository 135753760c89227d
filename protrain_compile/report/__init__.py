"""Reports: the printed schedule, its JSON, and how to find the schedules of a compiled model."""
