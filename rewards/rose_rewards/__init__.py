"""Rewards as functions: one URL, results that say what they are, teams kept apart."""
