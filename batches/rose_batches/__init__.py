"""Batches of requests that run on a lease's engines after everybody else's turns."""
