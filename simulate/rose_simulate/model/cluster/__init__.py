"""Replicas that may be lent, machines that fail, the planner, a job's own engines."""
