"""Replicas that are lent whole: a serving engine put to sleep under a grant, and woken again."""
