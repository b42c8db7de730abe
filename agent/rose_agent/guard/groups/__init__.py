"""Replicas over several nodes: guards that follow the guard whose pod takes the requests."""
