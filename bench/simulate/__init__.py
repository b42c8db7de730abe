"""Figures of the simulator."""
