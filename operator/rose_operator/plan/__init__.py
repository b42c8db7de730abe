"""From objects and telemetry to the planner's snapshot; pure."""
