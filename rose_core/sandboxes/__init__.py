"""Agents' sandboxes: what is saved after a turn, when, and what may be gone back across.

Start at ``turns`` for the states of a sandbox, ``policy`` for what is saved.
"""
