"""Agents: enrolment, telemetry in, grants out; demand of routers."""
