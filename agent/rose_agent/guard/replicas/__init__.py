"""Serving replicas: what is seen of them, what finished requests teach, what a pool shares."""
