"""Runs of scenarios and fleets: every regime, seed and derate, none of them twice."""
