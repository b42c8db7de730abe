"""Every fault that guard, engine host, tap and rollout engine must survive, as one matrix."""
